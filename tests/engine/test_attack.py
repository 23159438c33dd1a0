"""A sample of the sequences of ``tests/unit/test_pod_attack.py``, and a soak, on the real engine.

``ATTACK_SEED`` picks other sequences, ``SOAK_SECONDS`` a longer soak.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak import ENGINE_ARGS, soak
from examples.tiny_models import make
from tests.support import attack
from tests.support.attacked_process import AttackedProcess
from tests.support.process import ServeProcess, serve_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SOAK_S = float(os.environ.get("SOAK_SECONDS", "60"))
MEMORY = {"pod_bytes": 48 << 20, "engine_bytes": 256 << 20}
"""What may grow by how many bytes in so short a time. The engine's pools still fill in the first
minutes, by 127 MiB in 45 s; ``benchmarks.soak`` looks at it after they have, for 5 %.
"""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("versions")
    for number, version in enumerate(attack.VERSIONS):
        make(folder / version, seed=number)
    (folder / "broken").mkdir()
    return folder


@pytest.fixture(scope="module")
def pod(versions: Path) -> Iterator[ServeProcess]:
    source = f"--source={versions}/{{version}}"
    with serve_process(versions / "base", source, engine_args=ENGINE_ARGS) as pod:
        pod.start()
        pod.serving("base")
        yield pod


def test_whatever_comes_no_mix_is_served_and_the_newest_document_wins(
    pod: ServeProcess, versions: Path
) -> None:
    """Every token is transformers' greedy one under the version that its span names."""

    async def run(sequence: list[attack.Operation]) -> AttackedProcess:
        async with AttackedProcess(pod, versions) as attacked:
            for operation in sequence:
                await attacked.apply(operation)
            await attacked.settle(attack.PutDocument("step-2"))
            await attacked.settle(attack.PutDocument("step-1"))
            return attacked

    for sequence in attack.sample():
        attacked = asyncio.run(run(sequence))
        attacked.load.check()
        assert (attacked.load.lost, attacked.load.mixed) == (0, 0)
        print(
            f"{attacked.documents} documents, {attacked.faults} faults, "
            f"{attacked.load.tokens} tokens, {attacked.load.checked} checked"
        )
    assert pod.metric("rollout_unfinished ") == pod.metric("rollout_parked ") == 0


async def test_nothing_is_lost_mixed_left_or_grown_in_a_soak(
    pod: ServeProcess, versions: Path
) -> None:
    pod.cli("update", "base")
    soaked = await soak(pod, versions, seconds=SOAK_S)
    for row in soaked.rows():
        print(*row.values(), sep=": ")
    assert soaked.pauses > 20 and soaked.updates > 5 and soaked.load.continued > 50
    assert not soaked.load.wrong, soaked.load.wrong[:5]
    assert (soaked.load.lost, soaked.load.mixed) == (0, 0)
    assert (soaked.registry, soaked.rested_with) == (0, 0)
    assert soaked.after.fds <= soaked.before.fds
    assert soaked.after.tasks <= soaked.before.tasks
    for of, most in MEMORY.items():
        first, last = soaked.growth(of)
        assert last - first < most, f"{of} grew from {first / 2**20:.0f} to {last / 2**20:.0f} MiB"
