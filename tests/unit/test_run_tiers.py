"""The runner of the tiers, on tiers of its own."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "run.py"


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("rollout_tests_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(autouse=True)
def quick(monkeypatch, runner):
    """Each process of each test here takes seconds to start; the import of schemathesis three."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:schemathesis")
    monkeypatch.setattr(runner, "TOGETHER", {})
    monkeypatch.setattr(runner, "GRACE_S", 1.0)


@pytest.fixture
def run(runner, capfd):
    """Runs the tiers in a folder; gives the exit status and the lines."""

    def run(tests: Path, *args: str) -> tuple[int, list[str]]:
        status = runner.main(["--tests", str(tests), *args, "-p", "no:cacheprovider"])
        return status, capfd.readouterr().out.splitlines()

    return run


def tier(tests: Path, name: str, code: str) -> None:
    (tests / name).mkdir()
    (tests / name / "test_it.py").write_text(code)


PASSES = "def test_a(): pass\n"


def test_sums_all_tiers_and_closes_with_one_line(tmp_path):
    tier(tmp_path, "unit", PASSES + "def test_b(): pass\n")
    tier(tmp_path, "wire", PASSES + "import pytest\n@pytest.mark.skip('why')\ndef test_s(): ...\n")
    command = [sys.executable, str(SCRIPT), "--tests", str(tmp_path), "unit", "wire"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"], capture_output=True, text=True, timeout=100
    )
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1]) == (0, "3 passed, 0 failed, 1 skipped")
    assert lines[-4].startswith("unit ")
    assert lines[-4].endswith(" s   2 passed, 0 failed, 0 skipped")


def test_a_failure_and_an_error_fail_the_run_and_the_next_tier_still_runs(tmp_path, run):
    broken = "import pytest\n@pytest.fixture\ndef f(): 1/0\ndef test_e(f): ...\ndef test_f(): 1/0\n"
    tier(tmp_path, "unit", PASSES + broken)
    tier(tmp_path, "wire", PASSES)
    status, lines = run(tmp_path, "unit", "wire")
    assert (status, lines[-1]) == (1, "2 passed, 2 failed, 0 skipped")


@pytest.mark.parametrize(
    "code",
    ["", "import nothing_of_that_name\n", "import pytest\npytest.skip(allow_module_level=True)\n"],
)
def test_a_tier_without_a_test_fails(tmp_path, run, code):
    tier(tmp_path, "unit", code)
    status, lines = run(tmp_path, "unit")
    assert status == 1
    assert lines[-1].startswith("0 passed, 1 failed")


def test_a_tier_that_hangs_is_ended_at_its_deadline(tmp_path, run):
    tier(tmp_path, "unit", PASSES + "import time\ndef test_h(): time.sleep(90)\n")
    status, lines = run(tmp_path, "unit", "--deadline", "4")
    assert status == 1
    assert "DID NOT END WITHIN 4 S" in lines[-3]
    assert lines[-1].endswith("1 failed, 0 skipped")


def test_an_unknown_tier_is_named(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), "gpus"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no tier is called gpus; there are unit, wire, engine, verl, cluster" in done.stderr


def test_all_deadlines_leave_ci_time_for_the_rest(runner):
    assert list(runner.SHARES_S) == ["unit", "wire", "engine", "verl", "cluster"]
    assert sum(runner.SHARES_S.values()) + runner.SPARE_S <= 5100


@pytest.mark.parametrize(
    ("over", "left"),
    [((), 820), ((0,), 820), ((-50,), 870), ((450,), 370), ((0, 820), 0), ((1000,), 0)],
)
def test_what_a_tier_leaves_is_for_those_after_it(runner, over, left):
    tiers = list(runner.SHARES_S)
    before = [
        runner.Result(tier=tier, seconds=runner.SHARES_S[tier] + seconds)
        for tier, seconds in zip(tiers, over, strict=False)
    ]
    tier = tiers[len(over)]
    assert runner.deadline_of(tier, before) == runner.SHARES_S[tier] + left


def test_what_only_computes_runs_beside_the_tier_that_waits(tmp_path, runner):
    tier(tmp_path, "unit", PASSES)
    for number, file in enumerate(runner.PATIENT):
        text = f"import os\ndef test_p{number}(): assert os.nice(0) == 19\n"
        (tmp_path / file).write_text(text)
    tier(tmp_path, "cluster", PASSES)
    done = list(runner.run_tiers(["unit", "cluster"], tmp_path, ()))
    assert [(r.tier, r.passed, r.failed) for r in done] == [
        ("unit", 1, 0), ("cluster", 1, 0), ("chaos", 2, 0)
    ]  # fmt: skip
    apart = sum(r.seconds for r in done[:2])
    assert runner.summary(done)[-2] == f"{'all':<8} {apart:7.1f} s"
    assert runner.summary(done)[2] == "chaos       beside   2 passed, 0 failed, 0 skipped"
    alone = list(runner.run_tiers(["unit"], tmp_path, ()))
    assert [(r.tier, r.passed, r.failed) for r in alone] == [("unit", 1, 2)]


def test_what_runs_beside_another_tier_is_there(runner):
    assert all((runner.ROOT / "tests" / file).exists() for file in runner.PATIENT)


def test_what_hangs_beside_a_tier_is_ended_and_fails(tmp_path, runner):
    tier(tmp_path, "unit", PASSES)
    (tmp_path / runner.PATIENT[0]).write_text("import time\ndef test_p(): time.sleep(90)\n")
    tier(tmp_path, "cluster", PASSES)
    *_, beside = runner.run_tiers(["unit", "cluster"], tmp_path, (), deadline_s=3)
    assert (beside.tier, beside.ok) == ("chaos", False)
    assert beside.trouble == "did not end within 3 s"


def test_a_tier_whose_environment_cannot_be_made_fails(tmp_path, runner, monkeypatch):
    tier(tmp_path, "verl", PASSES)
    monkeypatch.setattr(runner, "ENVIRONMENTS", {"verl": "no_such_script"})
    result = runner.run_tier("verl", deadline_s=30, tests=tmp_path)
    assert not result.ok
    assert result.trouble == "no_such_script.py could not make its environment"
    assert runner.summary([result])[-1] == "0 passed, 1 failed, 0 skipped"


def test_every_environment_has_a_script_and_is_of_a_tier(runner):
    for name, script in runner.ENVIRONMENTS.items():
        assert name in runner.SHARES_S
        assert (runner.ROOT / "scripts" / f"{script}.py").exists()
    assert runner.interpreter("unit") == sys.executable
