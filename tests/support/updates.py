"""Updates by a trainer's sender into the receivers of a place."""

import asyncio
from collections.abc import Sequence

from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.trainer import SentWeights, WeightSender
from tests.support.fake_device import FakeDevice
from tests.support.weights import ModelLoader, Place, expected_of


class Loads:
    """Runs every rank's load when the manifest is accepted, as an engine would."""

    def __init__(self, place: Place, version: str, loaders: list[ModelLoader]) -> None:
        self._place = place
        self._version = version
        self._loaders = loaders
        self._loop = asyncio.get_running_loop()
        self.tasks: list[asyncio.Future[LoadReport]] = []

    def __call__(self, session: str) -> None:
        for receiver, loader in zip(self._place.receivers, self._loaders, strict=True):
            call = self._loop.run_in_executor(
                None,
                lambda receiver=receiver, loader=loader: receiver.load(
                    session, loader, version=self._version, flush=False, timeout_s=20
                ),
            )
            self.tasks.append(call)

    async def reports(self) -> tuple[LoadReport, ...]:
        return tuple(await asyncio.gather(*self.tasks))


async def update(
    place: Place, trainer: WeightSender, version: str, tensors, loaders=None, **given
) -> tuple[SentWeights, list[ModelLoader]]:
    loaders = loaders or [ModelLoader() for _ in place.receivers]
    loads = Loads(place, version, loaders)
    sent = await trainer.send_async(
        version, tensors, timeout_s=20, on_accepted=loads, **given
    )  # fmt: skip
    assert await loads.reports() == sent.reports
    return sent, loaders


def sender(place: Place, gpu: FakeDevice | None, **settings) -> WeightSender:
    return WeightSender(
        place.rank_sockets, shm_dir=place.shm_dir, device=gpu,
        **{"bucket_bytes": 4096, **settings},
    )  # fmt: skip


def start_on(place: Place, devices: Sequence[FakeDevice | None], tensors) -> None:
    """A rank for each view of a GPU."""
    place.start_receivers(*[expected_of(tensors)] * len(devices))
    for receiver, device in zip(place.receivers, devices, strict=True):
        receiver._memories.device = device
