"""What the suite has to be told of an engine."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rollout_pod.engine.base import Engine

if TYPE_CHECKING:
    import torch

Fault = Literal["none", "wrong", "lost"]
"""Of a sender: ``wrong`` offers a version whose tensors do not fit, ``lost`` vanishes when half of
the bytes are sent."""

SEND_S = 60.0


class EngineSubject(ABC):
    """One kind of engine, as its author starts it for the tests.

    A model of few and random weights is enough. There must be two versions of them, ``base`` and
    ``step-1``, which give other tokens after ``prompt``.
    """

    greedy: ClassVar[Mapping[str, Any]] = {"temperature": 0, "ignore_eos": True}
    """Sampling parameters that give the same tokens every time, as many as are asked for."""
    prompt: ClassVar[Sequence[int]] = (5, 6, 7, 8, 9, 10, 11, 12)
    long: ClassVar[int] = 1000
    """So many tokens take a second or more."""
    exact: ClassVar[bool] = True
    """Whether tokens that are computed in another order (in another batch, or after a cut) are the
    same: with float32, mostly; with bfloat16, hardly."""

    @abstractmethod
    def create(self, version: str = "base") -> Engine:
        """Make an engine of this version that is not started; its folders are its own."""

    @abstractmethod
    def create_broken(self) -> Engine:
        """Make one whose start fails: of a model that does not exist, say."""

    @abstractmethod
    async def send(
        self, engine: Engine, version: str, *, fault: Fault, accepted: Callable[[str], None]
    ) -> None:
        """Send a version to the engine's ranks; return when all of them have loaded it.

        ``send_tensors`` does it for an engine that speaks the weight protocol.

        Args:
            engine: It runs.
            version: ``base`` or ``step-1``.
            fault: What goes wrong.
            accepted: To be told of the session (from any thread) once every rank accepted the
                manifest; the suite calls ``load_weights`` then.

        Raises:
            Exception: it did not work, as it does not with a fault.
        """

    @abstractmethod
    def kill(self, engine: Engine) -> None:
        """End the engine as a crash does, or the out-of-memory killer: all of it or a part."""


class _VanishedError(Exception):
    """What a sender dies of in these tests."""


async def send_tensors(
    engine: Engine,
    version: str,
    tensors: "Mapping[str, torch.Tensor]",
    *,
    fault: Fault,
    accepted: Callable[[str], None],
) -> None:
    """``EngineSubject.send`` by the weight protocol, through shared memory, in small buckets.

    Args:
        engine: It runs, on this machine.
        version: The name.
        tensors: By the checkpoint's names, on the CPU.
        fault: See ``Fault``.
        accepted: See ``EngineSubject.send``.
    """
    from rollout_pod.weights.fill import spec_of
    from rollout_pod.weights.manifest import Manifest
    from rollout_pod.weights.trainer import WeightSender

    given = dict(tensors)
    if fault == "wrong":
        name = next(reversed(given))
        given[f"{name}.of_another_model"] = given.pop(name)
    manifest = Manifest(version, tuple(spec_of(name, tensor) for name, tensor in given.items()))

    def pairs() -> "Iterator[tuple[str, torch.Tensor]]":
        for number, pair in enumerate(given.items()):
            if fault == "lost" and number >= len(given) // 2:
                raise _VanishedError("the sender vanished")
            yield pair

    sender = WeightSender(engine.rank_sockets(), bucket_bytes=1 << 16)
    try:
        await asyncio.to_thread(
            sender.send, version, pairs(), manifest=manifest, timeout_s=SEND_S, on_accepted=accepted
        )
    finally:
        await asyncio.to_thread(sender.close)
