"""``kubectl rr`` against the operator, between its fakes: what is shown, and the exit codes."""

import asyncio
import subprocess
import sys

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rollout_client.kubectl.app import Exit, app
from tests.support.fake_apiserver import Fault
from tests.support.operator_kit import Bench, bench

SOURCE = {"source": {"path": "/ckpt/{version}"}}


async def rr(b: Bench, *args: str) -> Result:
    server = b.server.url

    def run() -> Result:
        return CliRunner().invoke(app, [*args, "--namespace=ns", f"--server={server}"])

    return await asyncio.to_thread(run)


async def ok(b: Bench, *args: str) -> str:
    result = await rr(b, *args)
    assert result.exit_code == 0, result.output
    return result.stdout


async def test_a_day_with_the_plugin():
    async with bench() as b:
        assert "no RolloutReplica in namespace ns" in await ok(b, "status")
        admin = await b.serving(weights=SOURCE)
        assert await ok(b, "pause", "qwen") == "qwen is paused\n"
        assert admin.documents[-1].paused
        assert await ok(b, "resume", "qwen") == "qwen generates\n"
        assert "every rank of qwen holds step-1" in await ok(
            b, "update", "qwen", "step-1", "--step=1", "--wait"
        )
        assert "accepted" in await ok(b, "update", "qwen", "step-2", "--step", "2")
        await b.until(lambda: b.status().get("weightVersion") == "step-2")
        lines = (await ok(b, "history", "qwen")).splitlines()
        assert [line.split()[0] for line in lines] == ["VERSION", "step-2", "step-1", "base"]
        assert lines[1].split()[1:3] == ["2", "Committed"]
        assert lines[1].split()[-1] == "kubectl-rr"
        assert "qwen goes back to step-1" in await ok(b, "undo", "qwen", "--wait")
        document = admin.documents[-1]
        assert document.weights is not None
        assert (document.weights.version, document.weights.step) == ("step-1", 1)
        await b.ready("Serving")
        shown = (await ok(b, "status", "qwen")).splitlines()
        assert shown[0].split() == ["NAME", "READY", "PHASE", "WEIGHTS", "TARGET", "PAUSED", "WHY"]
        assert shown[1].split() == ["qwen", "True", "Serving", "step-1", "step-1", "no"]
        assert shown[2] == "Serving; holds step-1"


async def test_failures_say_the_remedy_and_have_their_exit_codes():
    async with bench() as b:
        missing = await rr(b, "pause", "nobody")
        assert (missing.exit_code, Exit.NOT_FOUND) == (5, 5)
        assert "kubectl get rr -A" in missing.stderr
        admin = await b.serving(weights=SOURCE)
        admin.missing = {"step-404"}
        failed = await rr(b, "update", "qwen", "step-404", "--wait")
        assert failed.exit_code == Exit.FAILED
        assert "/ckpt/step-404: no such folder" in failed.stderr
        admin.hold = asyncio.Event()
        late = await rr(b, "update", "qwen", "step-1", "--wait", "--timeout=0.5")
        assert late.exit_code == Exit.TIMEOUT
        assert "not on step-1 after 0.5 s" in late.stderr
        assert "goes on by itself" in late.stderr
        losing = asyncio.ensure_future(rr(b, "update", "qwen", "step-2", "--wait"))
        await b.until(lambda: admin.documents[-1].weights.version == "step-2")
        b.patch(weightVersion="step-3")
        lost = await losing
        assert lost.exit_code == Exit.SUPERSEDED
        assert "the last writer wins" in lost.stderr
        admin.hold.set()
        await b.until(lambda: b.status().get("weightVersion") == "step-3")
        b.server.faults.append(Fault(lambda r: r.method == "PATCH" and r.query.get("fieldManager") == "kubectl-rr", 403, message="no"))  # fmt: skip
        denied = await rr(b, "resume", "qwen")
        assert denied.exit_code == Exit.API
        assert "ask for get, list, watch and patch" in denied.stderr
    gone = await asyncio.to_thread(
        CliRunner().invoke, app, ["status", "--server=http://127.0.0.1:9", "--namespace=ns"]
    )
    assert gone.exit_code == Exit.API
    assert "is the API server reachable" in gone.stderr


async def test_undo_without_a_history_says_what_to_do():
    async with bench() as b:
        await b.serving(weights=SOURCE)
        refused = await rr(b, "undo", "qwen")
        assert refused.exit_code == Exit.FAILED
        assert "kubectl rr update qwen VERSION" in refused.stderr


@pytest.mark.parametrize(
    "args", [["update", "qwen"], ["nonsense"], ["update", "q", "v", "--step=-1"]]
)
def test_a_wrong_command_line_is_two(args: list[str]):
    assert CliRunner().invoke(app, args).exit_code == 2


@pytest.mark.parametrize("missing", ["typer", "kubernetes"])
def test_without_its_extra_it_says_what_to_install(missing: str):
    code = (
        f"import sys; sys.modules[{missing!r}] = None; "
        "from rollout_client.kubectl.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "pip install 'rollout-replica[kubectl]'" in done.stderr
    assert "Traceback" not in done.stderr
