"""What a front end is started with."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from rollout_pod.engine.base import EngineSettings, Share

MAX_COUNT: Final = 64


class FrontEndSettings(msgspec.Struct, frozen=True):
    """The command line of ``serve``, as far as a front end needs it."""

    engine: str
    model: str
    args: tuple[str, ...]
    run_dir: str
    shm_dir: str
    host: str
    port: int
    log_level: str
    share: Share
    heartbeat_timeout_s: float = 120.0

    def engine_settings(self) -> EngineSettings:
        """For its own client of the engine."""
        return EngineSettings(
            model=self.model, args=self.args, run_dir=Path(self.run_dir),
            shm_dir=Path(self.shm_dir),
        )  # fmt: skip


def split_count(args: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Take ``--api-server-count`` out of an engine's arguments, under the name that it has for
    ``vllm serve``: how many front ends there are to be. 1 is none beside the process that steers.

    Raises:
        ValueError: it is no positive integer.
    """

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"engineArgs: {message}")

    parser = Parser(add_help=False, allow_abbrev=False, prefix_chars="-")
    parser.add_argument(
        "--api-server-count", "--api_server_count", "-asc", dest="count", type=int, default=1
    )
    given, rest = parser.parse_known_args(list(args))
    if not 1 <= given.count <= MAX_COUNT:
        raise ValueError(
            f"engineArgs: --api-server-count must be 1 to {MAX_COUNT}, not {given.count}"
        )
    return tuple(rest), int(given.count)
