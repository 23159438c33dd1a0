"""Our own engine keeps the contract that others are asked to keep."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout_pod.engine.base import Engine, EngineSettings
from rollout_pod.engine.processes import children_now, engine_children
from rollout_pod.engine.vllm import create
from rollout_pod.testing import EngineContract, EngineSubject, Fault, send_tensors
from tests.support.engine_kit import BASE_ARGS, GREEDY, SHM, checkpoint, tensors_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

VERSIONS = {"base": checkpoint("dense", 0), "step-1": checkpoint("dense", 1)}


class VllmSubject(EngineSubject):
    greedy = GREEDY

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._before: dict[int, frozenset[int]] = {}

    def create(self, version: str = "base") -> Engine:
        return self._create(VERSIONS[version])

    def create_broken(self) -> Engine:
        return self._create(self._folder / "no-model")

    def _create(self, model: Path) -> Engine:
        self._count += 1
        engine = create(
            EngineSettings(
                model=str(model), args=BASE_ARGS, run_dir=self._folder / str(self._count),
                shm_dir=SHM,
            )
        )  # fmt: skip
        self._before[id(engine)] = children_now()
        return engine

    async def send(
        self, engine: Engine, version: str, *, fault: Fault, accepted: Callable[[str], None]
    ) -> None:
        tensors = tensors_of(VERSIONS[version])
        await send_tensors(engine, version, tensors, fault=fault, accepted=accepted)

    def kill(self, engine: Engine) -> None:
        for process in engine_children(self._before[id(engine)]):
            os.kill(process.pid, signal.SIGKILL)


class TestVllmEngine(EngineContract):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> Iterator[EngineSubject]:
        with tempfile.TemporaryDirectory(prefix="eng-") as folder:  # short: sockets lie in it
            yield VllmSubject(Path(folder))
