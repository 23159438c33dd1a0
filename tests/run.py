"""Run the test tiers, fastest first, each in a pytest of its own and within a deadline.

Prints how long each tier took and closes with ``N passed, N failed, N skipped``. A tier that ran
no test, did not end in time or left no report counts as failed.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET  # the reports are pytest's own
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARES_S: Mapping[str, float] = {
    "unit": 350, "wire": 480, "engine": 1650, "verl": 300, "cluster": 1500
}  # fmt: skip
"""What each tier gets in any case: about what it takes."""
SPARE_S: float = 820
"""For whichever tiers take longer, in their order: machines differ by half. With environment, lint
and demo all of it keeps CI under 90 minutes where Kubernetes was built before."""
TOGETHER: Mapping[str, Sequence[str]] = {
    "unit": ("-n2", "--dist=loadfile"),
    "wire": ("-n3", "--dist=loadfile"),
    "engine": ("-n2", "--dist=loadfile", "--no-loadscope-reorder"),
}
"""Tiers whose files may run beside each other: the cluster's and verl's share one cluster, one pod.
The engine's begin with the longest ones (tests/engine/conftest.py)."""
REPORTS = ("-q", "-rfEs", "--durations=5")
PATIENT = ("unit/test_operator_chaos.py", "unit/test_pod_attack.py")
"""Compute for minutes in virtual time, so that they may wait for a processor as long as they
like."""
IDLE = "cluster"
"""The tier that leaves the processors idle half of its time."""
ENVIRONMENTS: Mapping[str, str] = {"verl": "verl_env"}
"""Tiers that do not run in .venv, and the script that makes what they run in."""
GRACE_S = 30.0
"""For pytest to say where it stands after the deadline, before it is killed."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one tier did."""

    tier: str
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    trouble: str = ""
    """Why the tier failed apart from its tests; empty where it did not."""
    is_beside: bool = False
    """It ran while another tier did: its time is not added to the others'."""

    @property
    def ok(self) -> bool:
        """Some test ran and nothing failed."""
        return not self.failed and not self.trouble


class Run:
    """One pytest and its report. Leaving the block ends it and all that it started."""

    def __init__(self, tier: str, command: Sequence[str]) -> None:
        """Start it; ``command`` without the report's place."""
        self._tier = tier
        self._started = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-tests-")
        self._report = Path(self._folder.name) / "report.xml"
        self._process = subprocess.Popen(
            [*command, f"--junitxml={self._report}"], cwd=ROOT, start_new_session=True
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def result(self, deadline_s: float) -> Result:
        """Wait for its end; at the deadline, counted from its start, it is ended."""
        left = self._started + deadline_s - time.monotonic()
        status, trouble = 0, ""
        try:
            status = self._process.wait(max(0.0, left))
        except subprocess.TimeoutExpired:
            trouble = f"did not end within {deadline_s:.0f} s"
            print(f"\n{self._tier}: {deadline_s:.0f} s are over", file=sys.stderr, flush=True)
            self._end()
        seconds = time.monotonic() - self._started
        passed, failed, skipped = read_report(self._report)
        if not trouble and not passed + failed:
            trouble = f"ran no test (pytest's exit status {status})"
        elif not trouble and status and not failed:
            trouble = f"pytest's exit status was {status}"
        return Result(
            tier=self._tier, seconds=seconds, passed=passed, failed=failed, skipped=skipped,
            trouble=trouble,
        )  # fmt: skip

    def _end(self) -> None:
        """Its whole process group; pytest may say first where it stands."""
        for number in (signal.SIGINT, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_S)


def run_tier(tier: str, *, deadline_s: float, tests: Path, args: Sequence[str] = ()) -> Result:
    """Run one tier's pytest and read its report."""
    started = time.monotonic()
    try:
        python = interpreter(tier)
    except EnvironmentFailed as error:
        return Result(tier=tier, seconds=time.monotonic() - started, trouble=str(error))
    command = [python, "-m", "pytest", str(tests / tier), *TOGETHER.get(tier, ()), *REPORTS, *args]
    with Run(tier, command) as run:
        return run.result(deadline_s)


def run_tiers(
    tiers: Sequence[str], tests: Path, args: Sequence[str], *, deadline_s: float | None = None
) -> Iterator[Result]:
    """Run them one after the other, and ``PATIENT`` beside ``IDLE`` where both are asked for."""
    patient = [tests / file for file in PATIENT if (tests / file).exists()]
    apart = IDLE in tiers and "unit" in tiers and not args and bool(patient)
    done: list[Result] = []
    for tier in tiers:
        print(f"== {tier}", flush=True)
        within_s = deadline_s or deadline_of(tier, done)
        with contextlib.ExitStack() as stack:
            beside = None
            if apart and tier == IDLE:
                nice = ("nice", "-n19", sys.executable, "-m", "pytest")
                command = [*nice, *map(str, patient), *REPORTS]
                beside = stack.enter_context(Run("chaos", command))
            elsewhere = [f"--ignore={file}" for file in patient] if apart and tier != IDLE else []
            done.append(run_tier(tier, deadline_s=within_s, tests=tests, args=[*elsewhere, *args]))
            yield done[-1]
            if beside is not None:
                yield replace(beside.result(within_s), is_beside=True)


def deadline_of(tier: str, before: Sequence[Result]) -> float:
    """How long a tier may take, so that each after it keeps its share: its own, and what those
    ``before`` it have left of theirs and of the time to spare.
    """
    over = sum(result.seconds - SHARES_S[result.tier] for result in before)
    return max(SHARES_S[tier], SHARES_S[tier] + SPARE_S - over)


class EnvironmentFailed(Exception):
    """What a tier runs in could not be made."""


def interpreter(tier: str) -> str:
    """The Python that runs a tier; makes its environment first where it has one of its own.

    Raises:
        EnvironmentFailed: the script that makes it failed; it has said why.
    """
    if tier not in ENVIRONMENTS:
        return sys.executable
    script = ROOT / "scripts" / f"{ENVIRONMENTS[tier]}.py"
    if subprocess.run([sys.executable, str(script)], cwd=ROOT, check=False).returncode:
        raise EnvironmentFailed(f"{script.name} could not make its environment")
    return str(ROOT / f".venv-{tier}" / "bin" / "python")


def read_report(report: Path) -> tuple[int, int, int]:
    """Passed, failed (errors too) and skipped (expected failures too) of a JUnit report."""
    if not report.exists():
        return 0, 0, 0
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    # A test that passes and whose teardown fails is told once as an error.
    return max(0, tests - failures - errors - skipped), failures + errors, skipped


def _time_of(result: Result) -> str:
    return "   beside" if result.is_beside else f"{result.seconds:7.1f} s"


def summary(results: Sequence[Result]) -> list[str]:
    """The closing lines."""
    lines = [
        f"{r.tier:<8} {_time_of(r)}   {r.passed} passed, {r.failed} failed, "
        f"{r.skipped} skipped{'   ' + r.trouble.upper() if r.trouble else ''}"
        for r in results
    ]
    failed = sum(max(r.failed, bool(r.trouble)) for r in results)
    passed, skipped = sum(r.passed for r in results), sum(r.skipped for r in results)
    total = f"{'all':<8} {sum(r.seconds for r in results if not r.is_beside):7.1f} s"
    return [*lines, total, f"{passed} passed, {failed} failed, {skipped} skipped"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named tiers, or all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tiers", nargs="*", metavar="TIER", help=", ".join(SHARES_S))
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="the tiers' folder")
    parser.add_argument("--deadline", type=float, help="seconds, instead of each tier's own")
    chosen, args = parser.parse_known_args(argv)
    unknown = [tier for tier in chosen.tiers if tier not in SHARES_S]
    if unknown:
        parser.error(f"no tier is called {', '.join(unknown)}; there are {', '.join(SHARES_S)}")
    tiers = chosen.tiers or list(SHARES_S)
    results = list(run_tiers(tiers, chosen.tests, args, deadline_s=chosen.deadline))
    print("\n" + "\n".join(summary(results)), flush=True)
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
