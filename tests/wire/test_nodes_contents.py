"""Two nodes with real weights agents, each of which reads a volume of its own."""

import hashlib
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rollout_pod.nodes.agents import NodeAgents
from rollout_pod.weights.agent_client import AgentClient, StageError
from tests.support.node_group import group_site, joined
from tests.support.weights import Place, expected_of, make_place, mixed_tensors, write_checkpoint

pytestmark = pytest.mark.timeout(120)


@dataclass
class Nodes:
    volumes: tuple[Path, Path]
    """What each reads: its agent's working directory."""
    head: Place
    both: NodeAgents
    _sessions: int = 0

    async def stage(self, version: str) -> None:
        self._sessions += 1
        await self.both.stage(
            session=f"s{self._sessions}", version=version, path=version,
            rank_sockets=self.head.rank_sockets, bucket_bytes=4096, timeout_s=20,
        )  # fmt: skip


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    """A relative path leads each agent to another volume."""
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(group_site())
        places, clients, volumes = [], [], []
        for number in range(2):
            place = stack.enter_context(make_place())
            place.start_receivers(expected_of(mixed_tensors(0)))
            volume = tmp_path / str(number)
            volume.mkdir()
            place.start_agent(folder=volume)
            client = AgentClient(place.agent_socket)
            stack.push_async_callback(client.close)
            places.append(place)
            clients.append(client)
            volumes.append(volume)
        both, _ = await stack.enter_async_context(
            joined(site, clients[0], clients[1], run_dir=places[1].run_dir)
        )
        yield Nodes((volumes[0], volumes[1]), places[0], both)


def with_sums(folder: Path) -> None:
    name = "model.safetensors"
    sha = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{sha}  {name}\n")


async def test_copies_are_the_same_whatever_their_inodes_and_times(nodes: Nodes) -> None:
    one, other = nodes.volumes
    write_checkpoint(one / "v1", mixed_tensors(1))
    shutil.copytree(one / "v1", other / "v1")
    os.utime(other / "v1" / "model.safetensors", (1, 1))
    await nodes.stage("v1")
    # hashes that are known on one node only cannot be compared
    with_sums(one / "v1")
    await nodes.stage("v1")


async def test_another_version_of_the_same_shape_is_not_loaded(nodes: Nodes) -> None:
    """A volume that is behind, or a path that was written anew between two reads."""
    one, other = nodes.volumes
    write_checkpoint(one / "v1", mixed_tensors(1))
    write_checkpoint(other / "v1", mixed_tensors(2))
    with pytest.raises(StageError, match="node 1 has tensors of the same size, but with other"):
        await nodes.stage("v1")
    shutil.rmtree(other / "v1")
    shutil.copytree(one / "v1", other / "v1")
    await nodes.stage("v1")


async def test_a_byte_that_is_not_sampled_counts_where_hashes_are_known(nodes: Nodes) -> None:
    tensors = mixed_tensors(1)
    for volume in nodes.volumes:
        write_checkpoint(volume / "v1", tensors)
        with_sums(volume / "v1")
        big = tensors["layers.1.big"].clone()
        big.view(torch.uint8).view(-1)[2000] ^= 1
        tensors = {**tensors, "layers.1.big": big}
    with pytest.raises(StageError, match="node 1 has files with other SHA-256 than the head"):
        await nodes.stage("v1")
