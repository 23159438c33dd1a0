"""Run the test tiers, fastest first, each in a pytest of its own and within a deadline.

Prints how long each tier took and closes with ``N passed, N failed, N skipped``. A tier that ran
no test, did not end in time or left no report counts as failed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET  # the reports are pytest's own
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARES_S: Mapping[str, float] = {
    "unit": 500, "wire": 480, "engine": 1500, "verl": 270, "cluster": 1250
}  # fmt: skip
"""What each tier gets in any case: about what it takes."""
SPARE_S: float = 1100
"""For whichever tiers take longer, in their order: machines differ by half. With environment, lint
and demo all of it keeps CI under 90 minutes where Kubernetes was built before."""
TOGETHER: Mapping[str, Sequence[str]] = {
    "unit": ("-n2", "--dist=loadfile"),
    "wire": ("-n2", "--dist=loadfile"),
    "engine": ("-n2", "--dist=loadfile", "--no-loadscope-reorder"),
}
"""Tiers whose files may run beside each other: the cluster's and verl's share one cluster, one pod.
The engine's begin with the longest ones (tests/engine/conftest.py)."""
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

    @property
    def ok(self) -> bool:
        """Some test ran and nothing failed."""
        return not self.failed and not self.trouble


def run_tier(tier: str, *, deadline_s: float, tests: Path, args: Sequence[str] = ()) -> Result:
    """Run one tier's pytest and read its report."""
    started = time.monotonic()
    try:
        python = interpreter(tier)
    except EnvironmentFailed as error:
        return Result(tier=tier, seconds=time.monotonic() - started, trouble=str(error))
    with tempfile.TemporaryDirectory(prefix="rollout-tests-") as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", str(tests / tier), f"--junitxml={report}"]
        command += [*TOGETHER.get(tier, ()), "-q", "-rfEs", "--durations=5", *args]
        status = _bounded(command, deadline_s)
        seconds = time.monotonic() - started
        passed, failed, skipped = read_report(report)
    trouble = ""
    if status is None:
        trouble = f"did not end within {deadline_s:.0f} s"
    elif not passed + failed:
        trouble = f"ran no test (pytest's exit status {status})"
    elif status and not failed:
        trouble = f"pytest's exit status was {status}"
    return Result(
        tier=tier, seconds=seconds, passed=passed, failed=failed, skipped=skipped, trouble=trouble
    )


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


def _bounded(command: Sequence[str], deadline_s: float) -> int | None:
    """The exit status, or None where the deadline ended it. Its whole process group is ended."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        print(f"\n{command[3]}: {deadline_s:.0f} s are over", file=sys.stderr, flush=True)
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        process.wait()
        raise


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


def summary(results: Sequence[Result]) -> list[str]:
    """The closing lines."""
    lines = [
        f"{r.tier:<8} {r.seconds:7.1f} s   {r.passed} passed, {r.failed} failed, "
        f"{r.skipped} skipped{'   ' + r.trouble.upper() if r.trouble else ''}"
        for r in results
    ]
    failed = sum(max(r.failed, bool(r.trouble)) for r in results)
    passed, skipped = sum(r.passed for r in results), sum(r.skipped for r in results)
    total = f"{'all':<8} {sum(r.seconds for r in results):7.1f} s"
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
    results: list[Result] = []
    for tier in chosen.tiers or SHARES_S:
        print(f"== {tier}", flush=True)
        deadline_s = chosen.deadline or deadline_of(tier, results)
        results.append(run_tier(tier, deadline_s=deadline_s, tests=chosen.tests, args=args))
    print("\n" + "\n".join(summary(results)), flush=True)
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
