"""``kubectl rr``: pause, resume and update RolloutReplicas, and see what became of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollout_client.kube import (
    ApiError,
    KubeError,
    ReplicaGone,
    Superseded,
    SyncKube,
    WaitTimeout,
)
from rollout_client.kube.judge import BASE, progress
from rollout_client.kube.sync import SyncChange
from rollout_client.kubectl import plan

MANAGER = "kubectl-rr"
_SPINNER_WIDTH: Final = 2


class Exit(IntEnum):
    """Exit codes (docs/kubectl-rr.md). 2 is a wrong command line."""

    FAILED = 1
    TIMEOUT = 3
    SUPERSEDED = 4
    NOT_FOUND = 5
    API = 6
    INTERRUPTED = 130


app = typer.Typer(
    name="kubectl-rr",
    help="Pause, resume and update RolloutReplicas.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Argument(help="The RolloutReplica.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Else that of the context.")
]
Context = Annotated[str | None, typer.Option(help="Of the kubeconfig.")]
Server = Annotated[str | None, typer.Option(hidden=True, help="A plain address, for tests.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Until it is so.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds for --wait.")]


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="One of them; else all.")] = None,
    namespace: Namespace = None,
    context: Context = None,
    server: Server = None,
) -> None:
    """Show what replicas are and what they are asked to be."""
    with _kube(namespace, context, server) as kube:
        bodies = kube.list() if name is None else [kube.replica(name).get()]
        if not bodies:
            _say(f"there is no RolloutReplica in namespace {kube.namespace}")
            return
        columns = ("NAME", "READY", "PHASE", "WEIGHTS", "TARGET", "PAUSED", "WHY")
        _table(columns, plan.status_rows(bodies))
        if name is not None:
            _say(progress(bodies[0].get("status") or {}))


@app.command()
def pause(
    name: Name,
    wait: Wait = True,
    timeout: Timeout = 120,
    namespace: Namespace = None,
    context: Context = None,
    server: Server = None,
) -> None:
    """Close the gate: each request in flight returns its partial."""
    with _kube(namespace, context, server) as kube:
        _follow(kube.replica(name).pause(), wait, timeout, f"{name} is paused")


@app.command()
def resume(
    name: Name,
    wait: Wait = True,
    timeout: Timeout = 120,
    namespace: Namespace = None,
    context: Context = None,
    server: Server = None,
) -> None:
    """Open the gate."""
    with _kube(namespace, context, server) as kube:
        _follow(kube.replica(name).resume(), wait, timeout, f"{name} generates")


@app.command()
def update(
    name: Name,
    version: Annotated[str, typer.Argument(help=f"Its name; {BASE!r}: the model's own.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="The trainer's counter of this version.")
    ] = None,
    wait: Wait = False,
    timeout: Timeout = 600,
    namespace: Namespace = None,
    context: Context = None,
    server: Server = None,
) -> None:
    """Ask for a version of the weights."""
    with _kube(namespace, context, server) as kube:
        change = kube.replica(name).set_weight_version(version, step=step)
        _follow(change, wait, timeout, f"every rank of {name} holds {version}")


@app.command()
def history(
    name: Name, namespace: Namespace = None, context: Context = None, server: Server = None
) -> None:
    """Show the last ten updates, the newest first, and who asked for them."""
    with _kube(namespace, context, server) as kube:
        rows = plan.history_rows(kube.replica(name).get())
        if not rows:
            _say(f"{name} has had no update yet")
            return
        columns = ("VERSION", "STEP", "RESULT", "FINISHED", "TOOK", "PAUSED", "BY")
        _table(columns, rows)


@app.command()
def undo(
    name: Name,
    wait: Wait = False,
    timeout: Timeout = 600,
    namespace: Namespace = None,
    context: Context = None,
    server: Server = None,
) -> None:
    """Ask for the version that was committed before the one of the spec."""
    with _kube(namespace, context, server) as kube:
        replica = kube.replica(name)
        target = plan.undo_target(replica.get())
        change = replica.set_weight_version(target.version, step=target.step)
        _say(f"{name} goes back to {target.version}")
        _follow(change, wait, timeout, f"every rank of {name} holds {target.version}")


@contextmanager
def _kube(namespace: str | None, context: str | None, server: str | None) -> Iterator[SyncKube]:
    """Connected; every error ends the program with its code, and says what to do."""
    try:
        with SyncKube(namespace=namespace, context=context, server=server, manager=MANAGER) as kube:
            yield kube
    except plan.CannotUndo as error:
        raise _ended(Exit.FAILED, str(error)) from None
    except WaitTimeout as error:
        remedy = "it goes on by itself: kubectl rr status, or again with a longer --timeout"
        raise _ended(Exit.TIMEOUT, f"{error}; {remedy}") from None
    except Superseded as error:
        raise _ended(Exit.SUPERSEDED, f"{error}: kubectl rr history says who") from None
    except ReplicaGone as error:
        raise _ended(Exit.NOT_FOUND, f"{error}; kubectl get rr -A lists all") from None
    except ApiError as error:
        raise _ended(Exit.API, f"{error}{_api_remedy(error)}") from None
    except KubeError as error:
        raise _ended(Exit.FAILED, str(error)) from None
    except KeyboardInterrupt:
        raise _ended(Exit.INTERRUPTED, "not waited for any longer; it goes on by itself") from None


def _api_remedy(error: ApiError) -> str:
    match error.code:
        case 0:
            return "; is the API server reachable, and KUBECONFIG set?"
        case 401:
            return "; log in again"
        case 403:
            return "; ask for get, list, watch and patch on rolloutreplicas.rollout.dev"
        case 404:
            return "; is the CRD installed? helm install rollout-operator"
        case 422:
            return "; nothing was changed"
    return ""


def _ended(code: Exit, message: str) -> typer.Exit:
    _console(stderr=True).print(Text(f"error: {message}"))
    return typer.Exit(code)


def _follow(change: SyncChange, wait: bool, timeout: float, done: str) -> None:
    if not wait:
        _say("accepted; --wait waits for it")
        return
    console = _console(stderr=True)
    with _live(console) as told:
        change.wait(timeout, on_progress=lambda line, status: told(line))
    _say(done)


@contextmanager
def _live(console: Console) -> Iterator[Callable[[str], Any]]:
    """One line that changes; where nobody watches, each news on a line of its own."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda line: console.print(Text(line))
        return
    with console.status("waiting") as spinner:

        def told(line: str) -> None:
            text = Text(line)
            text.truncate(console.width - _SPINNER_WIDTH, overflow="ellipsis")
            spinner.update(text)

        yield told


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    _console().print(table)


def _say(text: str) -> None:
    _console().print(Text(text))


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 400  # for programs: a row is a line
    return console
