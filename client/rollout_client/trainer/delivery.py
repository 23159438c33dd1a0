"""A version's bytes to all replicas, once, or again."""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rollout_client.trainer.control import Control
from rollout_client.trainer.errors import PeerFailed, Refused
from rollout_client.trainer.fanout import Reached, fan_out
from rollout_client.trainer.muster import LAG_S, Muster
from rollout_client.trainer.parcel import Packer, Parcel
from rollout_client.trainer.pump import present_gpu
from rollout_client.trainer.ranks import Ranks
from rollout_client.trainer.results import ReplicaResult
from rollout_client.trainer.round import Round, follow
from rollout_client.trainer.sending import Sending
from rollout_client.trainer.tensors import Marks, Naming, TensorsChanged, refuse_changed
from rollout_client.trainer.weights import Keep, Specs, Tensors, Weights
from rollout_client.trainer.wishes import Hold
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.on_thread import on_thread

Results = dict[str, ReplicaResult]


@dataclass(frozen=True)
class Sent:
    """The last version, and what it can be sent again from."""

    wish: Hold
    weights: Weights
    packer: Packer
    marks: Marks | None


class Delivery:
    """Sends versions, one after the other.

    Args:
        naming: see ``ServerAdapter``.
        keep: see ``ServerAdapter``.
        ranks: those that gather; None where this one has whole tensors.
        sending: the way to the replicas.
    """

    def __init__(self, naming: Naming, keep: Keep, ranks: Ranks | None, sending: Sending) -> None:
        self._keep: Keep = keep
        self._naming = naming
        self._ranks = ranks
        self._packer = Packer(naming, keep, gathers=ranks is not None)
        self._sending = sending
        self._manifests: dict[type, Manifest] = {}
        """The last one of mappings, and the last one of pairs."""
        self.last: Sent | None = None

    async def close(self) -> None:
        """Give memory back. Idempotent."""
        self.last = None
        await self._sending.close()

    async def send(
        self,
        find: Callable[[], Awaitable[Sequence[Control]]],
        wish: Hold,
        weights: Weights,
        *,
        specs: Specs | None,
        timeout_s: float,
        gpu: int | None,
    ) -> Results:
        """Send a version to all; see ``ServerAdapter.update_weights``."""
        # what the replicas go on asking for, if they are never asked for this one
        before = self.last if self._keep == "reference" else None
        self.last = None
        given = _Given(weights, self._naming, gpu)
        round_ = Round(self._ranks, given.drain)
        parcel: Parcel | None = None
        try:
            # first of all, and on every rank: it may be collective, too
            tensors = await on_thread(given.tensors)
            # of pairs, order counts: what is known of a mapping is no help
            kind = Mapping if isinstance(tensors, Mapping) else Iterable
            known = self._manifests.pop(kind, None)
            if specs is not None:
                known = Manifest(wish.version, tuple(specs))
            controls = await find()
            parcel = await on_thread(
                partial(
                    self._packer.pack, wish.version, tensors, _names(controls), manifest=known,
                    gpu=gpu, before_reading=round_.begin,
                )
            )  # fmt: skip
            results = await self._deliver(controls, wish, parcel, round_, timeout_s)
        except BaseException as error:
            await _end(round_, parcel, error)
            raise
        else:
            await _end(round_, parcel, results)
            self._manifests[kind] = parcel.manifest  # it has proved right
            return results
        finally:
            is_asked_for = parcel is not None and parcel.is_asked_for
            self.last = self._sent(wish, weights, parcel) if parcel and is_asked_for else before

    async def send_again(
        self,
        controls: Sequence[Control],
        *,
        timeout_s: float,
        gpu: int | None,
        quietly: bool = False,
    ) -> Results:
        """Send the last version to those that wait for it; where ranks gather, on all of them.

        Args:
            controls: may be none.
            timeout_s: for each.
            gpu: see ``send``.
            quietly: the trainer goes on meanwhile, and may write to the tensors.

        Raises:
            Refused: nothing is kept of it, or its tensors have been written to since.
        """
        last = self.last
        given = _Given(last.weights if last else {}, self._naming, gpu)
        # what is kept as a copy needs no other rank
        round_ = Round(self._ranks if self._keep == "reference" else None, given.drain)
        parcel: Parcel | None = None
        results: Results = {}
        try:
            if last is None and controls:
                raise Refused(
                    "nothing is kept of the last version: the next update_weights brings one; "
                    "with keep='copy' it could be sent again"
                )
            tensors = await on_thread(given.tensors)
            if last is not None and controls:
                parcel = await on_thread(
                    partial(
                        last.packer.pack, last.wish.version, tensors, _names(controls), gpu=gpu,
                        before_reading=round_.begin,
                    )
                )  # fmt: skip
                try:
                    refuse_changed(last.marks or {}, parcel.marks or {})
                except TensorsChanged as error:
                    raise Refused(f"{last.wish.version}: {error}: hand it over anew") from error
                results = await self._deliver(
                    controls, last.wish, parcel, round_, timeout_s, again=True, quietly=quietly
                )
        except BaseException as error:
            await _end(round_, parcel, error)
            raise
        await _end(round_, parcel, results)
        return results

    async def follow(self, wish: Hold, weights: Weights, gpu: int | None) -> None:
        """The part of a rank that does not send.

        Raises:
            PeerFailed: another rank's error.
        """
        self.last = Sent(wish, weights, self._packer, None) if self._keep == "reference" else None
        await self._gather(weights, gpu)

    async def follow_again(self, gpu: int | None) -> None:
        """The same of ``send_again``.

        Raises:
            PeerFailed: another rank's error.
        """
        if self._ranks is not None and self._keep == "reference":
            await self._gather(self.last.weights if self.last else {}, gpu)

    async def _gather(self, weights: Weights, gpu: int | None) -> None:
        if self._ranks is None:
            return  # sender=False, and each rank has whole tensors
        given = _Given(weights, self._naming, gpu)
        await on_thread(given.tensors)
        await on_thread(partial(follow, self._ranks, given.drain))

    async def _deliver(
        self,
        controls: Sequence[Control],
        wish: Hold,
        parcel: Parcel,
        round_: Round,
        timeout_s: float,
        *,
        again: bool = False,
        quietly: bool = False,
    ) -> Results:
        pump, muster = parcel.pump, None
        if pump is not None:

            def start(missing: Collection[str]) -> None:
                round_.begin()
                for name in missing:
                    pump.leave(name)
                pump.start()

            muster = Muster(_names(controls), start, lag_s=LAG_S)

        async def work(control: Control) -> Reached:
            if again:
                return await self._sending.again(
                    control, wish, parcel, muster=muster, timeout_s=timeout_s, quietly=quietly
                )
            return await self._sending.update(
                control, wish, parcel, muster=muster, timeout_s=timeout_s
            )

        return await fan_out(controls, str(wish), work, timeout_s)

    def _sent(self, wish: Hold, weights: Weights, parcel: Parcel) -> Sent | None:
        if parcel.copy is not None:
            is_whole = parcel.pump is None or parcel.pump.is_whole
            if self._keep != "copy" or not is_whole:
                return None
            # it has the checkpoint's names and types, and needs nobody to be gathered
            return Sent(wish, parcel.copy, Packer(Naming(), "reference", gathers=False), None)
        is_readable_again = callable(weights) or parcel.marks is not None
        if self._keep != "reference" or not is_readable_again:
            return None
        return Sent(wish, weights, self._packer, parcel.marks)


class _Given:
    """What the trainer handed over; a function is called once."""

    def __init__(self, weights: Weights, naming: Naming, gpu: int | None) -> None:
        self._weights, self._naming, self._gpu = weights, naming, gpu
        self._tensors: Tensors | None = None

    def tensors(self) -> Tensors:
        """On any thread."""
        if self._tensors is None:
            with present_gpu(self._gpu):
                self._tensors = self._weights() if callable(self._weights) else self._weights
        return self._tensors

    def drain(self) -> None:
        """Take part in gathering all of it, for nobody."""
        with present_gpu(self._gpu):
            for _ in self._naming.whole_pairs(self.tensors()):
                pass


async def _end(round_: Round, parcel: Parcel | None, how: Results | BaseException) -> None:
    if isinstance(how, BaseException):
        with suppress(PeerFailed):  # this rank's own error is told
            text = f"{type(how).__name__}: {how}"
            await on_thread(partial(round_.end, parcel, text))
        return
    try:
        await on_thread(partial(round_.end, parcel, ""))
    except PeerFailed as error:
        error.results = how
        raise


def _names(controls: Sequence[Control]) -> tuple[str, ...]:
    return tuple(control.name for control in controls)
