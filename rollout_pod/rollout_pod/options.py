"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from rollout_pod.local import default_run_dir
from rollout_pod.protocol import ADMIN_PORT

RUN_DIR = default_run_dir()
SHM_DIR = Path("/dev/shm")
ADMIN_URL = f"http://127.0.0.1:{ADMIN_PORT}"

RunDir = Annotated[
    Path, typer.Option(envvar="ROLLOUT_RUN_DIR", help="Sockets, documents and the local token.")
]
ShmDir = Annotated[Path, typer.Option(help="A shared-memory file system.")]
HostMemory = Annotated[int, typer.Option(min=1 << 20, help="Bytes for versions in shared memory.")]
Admin = Annotated[str, typer.Option(help="The admin port.")]
Timeout = Annotated[float, typer.Option(min=0, help="Seconds to wait.")]


def parse_address(text: str) -> tuple[str, int]:
    """``host:port`` (``[v6]:port`` too)."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise typer.BadParameter(f"{text!r} is not host:port")
    return host.strip("[]"), int(port)
