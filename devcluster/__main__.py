"""The command line: ``python -m devcluster up|down|status|kubectl …|helm …``."""

import os
import sys

import typer
from rich.console import Console
from rich.table import Column, Table

from devcluster import cluster, teardown
from devcluster.client import connect
from devcluster.errors import DevclusterError
from devcluster.external import check_external
from devcluster.report import Reporter
from devcluster.settings import SECOND, Settings, load_settings
from devcluster.status import look, save_metrics

app = typer.Typer(
    help="A real one-node Kubernetes for the demo and the tests.",
    no_args_is_help=True,
    add_completion=False,
)
node = typer.Typer(help="A second node beside the first.", no_args_is_help=True)
app.add_typer(node, name="node")
# kubectl and helm: everything after the first word goes through untouched, also a `--`
SCRIPT_WIDTH = 400
PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


def _settings() -> Settings:
    try:
        return load_settings(os.environ)
    except ValueError as error:
        raise DevclusterError(str(error)) from error


@app.command()
def up() -> None:
    """Build what is missing, start what does not run, and wait until the node is ready."""
    settings = _settings()
    if settings.external:
        print(f"using the external cluster, context {check_external(settings)}")
        return
    cluster.up(settings, Reporter())
    print(f"export KUBECONFIG={settings.kubeconfig}")


@app.command()
def down() -> None:
    """Remove processes, mounts, interfaces, iptables chains and the state folder."""
    settings = _settings()
    if settings.external:
        print("DEVCLUSTER=external: your cluster is left alone")
        return
    teardown.down(settings, Reporter())


@node.command("add")
def add_node() -> None:
    """Start a second node, and wait until it is ready; it shares address, network and images."""
    cluster.add_node(_own(), Reporter())
    print(SECOND.name)


@node.command("remove")
def remove_node() -> None:
    """Take the second node away, with whatever runs on it."""
    teardown.remove_node(_own(), Reporter())


def _own() -> Settings:
    settings = _settings()
    if settings.external:
        raise DevclusterError("DEVCLUSTER=external: add nodes to your cluster by its own means")
    return settings


@app.command()
def status() -> None:
    """Show every part with its pid, health and log; exit 1 if one does not work."""
    settings = _settings()
    if settings.external:
        print(f"the external cluster answers, context {check_external(settings)}")
        return
    parts = look(settings)
    table = Table(
        *("part", "pid", "health"), Column("log", overflow="fold"), box=None, pad_edge=False
    )
    for part in parts:
        pid = "-" if part.pid is None else str(part.pid)
        table.add_row(part.part, pid, part.ailment or "ok", str(part.log))
    # without a terminal a script reads it: every line whole
    Console(width=None if sys.stdout.isatty() else SCRIPT_WIDTH).print(table)
    raise typer.Exit(1 if any(part.ailment for part in parts) else 0)


@app.command()
def metrics() -> None:
    """Write every part's metrics beside its log and print the files' names."""
    for file in save_metrics(_settings()):
        print(file)


@app.command("data-dir")
def data_dir() -> None:
    """Print the folder that pods may mount by hostPath, for checkpoints."""
    settings = _settings()
    if settings.external and settings.data_env is None:
        raise DevclusterError(
            "DEVCLUSTER=external: set DEVCLUSTER_DATA_DIR to a folder that your nodes mount at "
            "the same path (kind: extraMounts; k3d: --volume)"
        )
    print(settings.data_env if settings.external else settings.data)


@app.command(context_settings=PASS_ON)
def kubectl(context: typer.Context) -> None:
    """Run kubectl against the cluster; all arguments are kubectl's."""
    found = connect(_settings())
    _become(found.kubectl_path, context.args, found.environment())


@app.command(context_settings=PASS_ON)
def helm(context: typer.Context) -> None:
    """Run helm against the cluster; all arguments are helm's."""
    found = connect(_settings())
    _become(found.helm_path, context.args, found.environment())


def _become(program: str, arguments: list[str], env: dict[str, str]) -> None:
    sys.stdout.flush()
    os.execve(program, [program, *arguments], env)  # noqa: S606 - no shell is wanted


def main() -> None:
    """Run the command line; errors are told in words."""
    try:
        app()
    except DevclusterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
