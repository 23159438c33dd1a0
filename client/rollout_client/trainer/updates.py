"""The adapter's updates, one after the other, and what is watched between two of them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollout_client.trainer.control import Control
from rollout_client.trainer.fanout import Reached, fan_out
from rollout_client.trainer.fleet import Fleet
from rollout_client.trainer.keeper import Keeper
from rollout_client.trainer.push_socket import needed_version
from rollout_client.trainer.results import ReplicaResult
from rollout_client.trainer.weights import Keep, Names, Specs, Weights
from rollout_client.trainer.wishes import Hold

if TYPE_CHECKING:
    import torch

    from rollout_client.trainer.delivery import Delivery
    from rollout_client.trainer.ranks import Ranks

Results = dict[str, ReplicaResult]
"""One for each replica, by its name (``namespace/name``) or the URL of its admin port."""


@dataclass(frozen=True)
class Settings:
    """See ``ServerAdapter``."""

    names: Names | None
    cast: "torch.dtype | Callable[[str, torch.dtype], torch.dtype] | None"
    keep: Keep
    resend: bool
    transport: Literal["auto", "shared_memory", "cuda_ipc"]
    gpu: int | None


class Updates:
    """What only steers replicas loads neither torch nor the weight protocol.

    Args:
        fleet: the replicas.
        settings: the adapter's.
        ranks: those that gather; None where each has whole tensors.
        sender: whether this rank steers and sends.
    """

    def __init__(
        self, fleet: Fleet, settings: Settings, ranks: "Ranks | None", *, sender: bool
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._ranks = ranks
        self._is_sender = sender
        self._made: Delivery | None = None
        self._keeper = Keeper(self._again_to)
        self._turn = asyncio.Lock()

    async def aclose(self) -> None:
        """Watch nobody any more, and give memory back. Idempotent."""
        await self._keeper.stop()
        if self._made is not None:
            await self._made.close()

    async def fetch(self, wish: Hold, timeout_s: float) -> Results:
        """Let the replicas fetch a version."""

        async def work(control: Control) -> Reached:
            await control.check_update(wish)
            return Reached(await (await control.wish(wish)).reached())

        async with self._turn:
            await self._keeper.stop()
            if not self._is_sender:
                return {}
            return await fan_out(await self._fleet.controls(), str(wish), work, timeout_s)

    async def send(
        self, wish: Hold, weights: Weights, specs: Specs | None, timeout_s: float
    ) -> Results:
        """Send a version, or take part in gathering it."""
        async with self._turn:
            await self._keeper.stop()
            if not self._is_sender:
                await self._delivery.follow(wish, weights, self._gpu)
                return {}
            controls: list[Control] = []

            async def find() -> Sequence[Control]:
                controls.extend(await self._fleet.controls())
                return controls

            try:
                return await self._delivery.send(
                    find, wish, weights, specs=specs, timeout_s=timeout_s, gpu=self._gpu
                )
            finally:
                self._watch(controls)

    async def resend(self, timeout_s: float) -> Results:
        """Send the last version again to those that ask for it."""
        async with self._turn:
            await self._keeper.stop()
            if not self._is_sender:
                await self._delivery.follow_again(self._gpu)
                return {}
            last = self._delivery.last
            controls = await self._fleet.controls()
            try:
                needed = [await needed_version(control.run_dir) for control in controls]
                asking = [
                    control
                    for control, version in zip(controls, needed, strict=True)
                    if version is not None and (last is None or version == last.wish.version)
                ]
                return await self._delivery.send_again(asking, timeout_s=timeout_s, gpu=self._gpu)
            finally:
                self._watch(controls)

    def _watch(self, controls: Sequence[Control]) -> None:
        last = self._delivery.last
        if last is not None and self._settings.resend and not last.packer.gathers:
            self._keeper.start(controls, last.wish)

    async def _again_to(self, control: Control, timeout_s: float) -> None:
        await self._delivery.send_again([control], timeout_s=timeout_s, gpu=self._gpu, quietly=True)

    @property
    def _delivery(self) -> "Delivery":
        if self._made is None:
            from rollout_client.trainer.delivery import Delivery
            from rollout_client.trainer.sending import Sending
            from rollout_client.trainer.tensors import Naming

            given = self._settings
            naming = Naming(given.names, given.cast)
            self._made = Delivery(naming, given.keep, self._ranks, Sending(given.transport))
        return self._made

    @property
    def _gpu(self) -> int | None:
        if self._settings.gpu is not None:
            return self._settings.gpu
        from rollout_client.trainer.tensors import present_gpu_index

        return present_gpu_index()
