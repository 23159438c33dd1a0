"""``make demo``: the whole life of a RolloutReplica on a real Kubernetes, told step by step.

Everything a person would do is done by kubectl and helm, and each command is shown. At the end a
table says what was measured; the exit status is 1 when any of it is wrong.
"""

import asyncio
import contextlib
import subprocess
import sys
import time

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from devcluster.errors import DevclusterError
from examples import tiny_models
from examples.demo.callers import Batch
from examples.demo.check import compare
from examples.demo.cluster import ROOT, DemoError, Done
from examples.demo.play import ready_replica
from examples.demo.stage import COLUMNS, MANIFEST, NAMESPACE, Stage, checkpoints_folder
from examples.demo.steps import bad_version, count_tokens, delete, long_generations

CHART = "helm/rollout-operator"
RELEASE = "rollout-operator"
WIDTH = 120
"""Of a log; a terminal knows its own."""
VERSIONS = ("base", "step-1", "step-2")


def make_checkpoints(console: Console) -> None:
    """Write one tiny random model a version; what is there already is made anew."""
    folder = checkpoints_folder()
    console.rule("[bold]Checkpoints", align="left")
    with Progress(*COLUMNS, console=console) as bar:
        task = bar.add_task(f"tiny random models in {folder}", total=len(VERSIONS))
        for seed, version in enumerate(VERSIONS):
            tiny_models.make(folder / version, kind="dense", seed=seed)
            bar.advance(task)


def cluster_up(console: Console) -> None:
    """Start the dev cluster, or see that the user's own answers."""
    console.rule("[bold]A one-node Kubernetes", align="left")
    console.print("[bold cyan]$ python -m devcluster up", highlight=False)
    if subprocess.run([sys.executable, "-m", "devcluster", "up"], cwd=ROOT, check=False).returncode:
        raise DemoError("the cluster did not come up (see above)")


async def install(stage: Stage) -> None:
    """Namespace, chart, replica."""
    stage.step("Install the operator with helm", "the operator runs as a pod, under RBAC")
    await stage.shell.kubectl("create", "namespace", NAMESPACE)
    # the CRD stays when a release goes; another one left it behind may own it
    await stage.shell.helm(
        *("upgrade", "--install", RELEASE, CHART),
        *("--take-ownership", "--wait", "--timeout", "2m"),
    )
    await stage.show("get", "deployments,pods")

    stage.step("Apply a RolloutReplica", "one object becomes a pod, a Service and a Secret")
    await stage.shell.kubectl("apply", "-f", MANIFEST)
    with stage.waiting("vLLM starts and loads the base checkpoint"):
        await ready_or_stalled(stage)
    await stage.show("get", "rr,pods,services", "-o", "wide")


async def ready_or_stalled(stage: Stage) -> None:
    """Wait for Ready; a replica that is stalled will not get there by itself.

    Raises:
        DemoError: it is stalled (with the reason), or the time is over.
    """

    def wait(condition: str, *, quiet: bool) -> asyncio.Task[Done]:
        args = ("wait", f"--for=condition={condition}", f"rr/{stage.name}", "--timeout=240s")
        return asyncio.create_task(stage.shell.kubectl(*args, quiet=quiet, timeout_s=250))

    ready, stalled = wait("Ready", quiet=False), wait("Stalled", quiet=True)
    try:
        await asyncio.wait({ready, stalled}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            await ready
            return
        status = (await stage.shell.get("rr", stage.name))["status"]
        said = next((c["message"] for c in status["conditions"] if c["type"] == "Ready"), "")
        raise DemoError(f"the replica is stalled: {said}")
    finally:
        for task in (ready, stalled):
            task.cancel()
        await asyncio.gather(ready, stalled, return_exceptions=True)


def prove(stage: Stage, batches: list[Batch]) -> None:
    """Lengths, and every token against Hugging Face."""
    pairs = [
        (batch.prompts[caller], rollout)
        for batch in batches
        for caller, rollout in sorted(batch.rollouts.items())
    ]
    asked = sum(len(batch.prompts) for batch in batches)
    exact = sum(
        len(r.token_ids) == len(r.log_probs) == batch.max_tokens and r.finish_reason == "length"
        for batch in batches
        for r in batch.rollouts.values()
    )
    stage.report.add("rollouts of exactly the length asked for", f"{exact} of {asked}",
                     exact == asked)  # fmt: skip
    stage.step("Compare with Hugging Face transformers", "float32, the same checkpoints")
    with stage.waiting("reading every rollout with each version's checkpoint"):
        proof = compare(pairs, {v: stage.checkpoints / v for v in VERSIONS})
    stage.report.add(
        "tokens that are Hugging Face's greedy choice under their version",
        f"{proof.greedy} of {proof.tokens}, {proof.ties} ties, {proof.wrong} wrong; "
        f"log-probs within {proof.worst_log_prob:.1e}",
        proof.holds,
    )


def show_report(stage: Stage, batches: list[Batch]) -> None:
    """The closing tables."""
    seen = Table(title="The 16 long generations", title_justify="left")
    for column in ("caller", "tokens", "requests", "weight versions (tokens)"):
        seen.add_column(column)
    for caller, rollout in sorted(batches[1].rollouts.items()):
        spans = ", ".join(f"{s.version} [{s.start}, {s.end})" for s in rollout.weight_versions)
        seen.add_row(str(caller), str(len(rollout.token_ids)), str(rollout.attempts), spans)
    stage.console.print(seen)
    table = Table(title="What was measured", title_justify="left")
    for column in ("what", "value", ""):
        table.add_column(column, overflow="fold")
    for what, value, ok in stage.report.rows:
        table.add_row(what, value, "[green]ok" if ok else "[bold red]WRONG")
    stage.console.print(table)


async def clean(stage: Stage) -> None:
    """Remove what the demo made in the cluster, in the order that needs no operator's help."""
    stage.step("Clean up", "the CRD stays (keep policy); the namespace goes")
    # each of them says so when there is nothing to remove, which is no failure here
    with contextlib.suppress(DemoError):
        await stage.shell.kubectl("delete", "rr", "--all", "--timeout=60s", timeout_s=70)
    with contextlib.suppress(DemoError):
        await stage.shell.helm("uninstall", RELEASE, "--wait", "--timeout=60s")
    await stage.shell.kubectl(
        "delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=90s", timeout_s=100
    )


async def story(stage: Stage) -> None:
    """All steps in order."""
    left = await stage.shell.kubectl("get", "namespace", NAMESPACE, quiet=True, check=False)
    if left.output:
        stage.say("an earlier demo was interrupted: its namespace goes first")
        await clean(stage)
    try:
        await install(stage)
        async with ready_replica(stage) as play:
            await long_generations(play)
            await bad_version(play)
            await count_tokens(play)
            await delete(play)
        prove(stage, play.batches)
    except BaseException:
        log = ROOT / ".demo" / "failure.log"
        log.parent.mkdir(exist_ok=True)
        log.write_text(await asyncio.to_thread(stage.shell.cluster.dump, NAMESPACE))
        stage.console.print(f"[red]The state of the namespace is in {log.relative_to(ROOT)}")
        raise
    finally:
        await clean(stage)
    show_report(stage, play.batches)


def words(error: BaseException) -> str:
    """The innermost reasons of an error, without its groups."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(words(inner) for inner in error.exceptions)
    return str(error) if isinstance(error, DemoError) else f"{type(error).__name__}: {error}"


def main() -> int:
    """Run the demo; the exit status."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    began = time.monotonic()
    try:
        make_checkpoints(console)
        cluster_up(console)
        stage = Stage(console)
        asyncio.run(story(stage))
    except KeyboardInterrupt:
        console.print("[red]interrupted")
        return 130
    except (DevclusterError, DemoError, ExceptionGroup, OSError, httpx.HTTPError) as error:
        console.print(f"[bold red]The demo failed:[/bold red] {words(error)}", soft_wrap=True)
        return 1
    took = f"{time.monotonic() - began:.0f} s"
    if not stage.report.holds:
        console.print(f"[bold red]Something above is wrong.[/bold red] ({took})")
        return 1
    console.print(
        f"[bold green]All as promised[/bold green], in {took}. The cluster runs on "
        "(`make cluster-down` stops it); the operator and the replica are gone. To install them by "
        "hand: README, \"By hand\".", soft_wrap=True,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
