"""One pass over the weights that several ranks make together, as the rank that sends sees it."""

import threading
from collections.abc import Callable
from typing import Final

from rollout_client.trainer.errors import PeerFailed
from rollout_client.trainer.parcel import Parcel
from rollout_client.trainer.ranks import Ranks

_GO: Final = "go"
_NOTHING: Final = "nothing"
_NO: Final = "no: "


class Round:
    """All ranks agree whether to read; all read everything; all learn how it ended. So none waits
    in a gather for one that has given up, and none goes on where another failed.

    Args:
        ranks: None where this one reads alone.
        drain: reads everything for nobody, in case the others begin and this rank cannot.
    """

    def __init__(self, ranks: Ranks | None, drain: Callable[[], None]) -> None:
        self._ranks = ranks
        self._drain = drain
        self._lock = threading.Lock()
        self._has_begun = False

    def begin(self) -> None:
        """Let all ranks read now. Blocks; idempotent."""
        with self._lock:
            if self._ranks is not None and not self._has_begun:
                self._has_begun = True
                self._ranks.tell(_GO)

    def end(self, parcel: Parcel | None, error: str) -> None:
        """Everything is read, or nobody reads. Blocks.

        Args:
            parcel: what was sent; None where there was nothing to send.
            error: what this rank failed with; empty where it did not.

        Raises:
            PeerFailed: this rank did not fail, and another one did.
        """
        pump = parcel.pump if parcel is not None else None
        if self._ranks is None:
            if pump is not None:
                pump.join()
            return
        if not self._has_begun:
            told = self._ranks.tell(_NO + error if error else _NOTHING)
            if _GO not in told:
                _refuse(told, error)
                return
            if pump is not None:
                pump.start()
            else:
                self._drain()
        if pump is not None:
            pump.join()
        _refuse([text and _NO + text for text in self._ranks.tell(error)], error)


def follow(ranks: Ranks, drain: Callable[[], None]) -> None:
    """The part of a rank that does not send. Blocks.

    Raises:
        PeerFailed: another rank failed.
        Exception: what ``drain`` raised, after the others were told.
    """
    told = ranks.tell("")
    if _GO not in told:
        _refuse(told, "")
        return
    try:
        drain()
    except Exception as error:
        ranks.tell(f"{type(error).__name__}: {error}")
        raise
    _refuse([text and _NO + text for text in ranks.tell("")], "")


def _refuse(told: list[str], error: str) -> None:
    failed = [(rank, t.removeprefix(_NO)) for rank, t in enumerate(told) if t.startswith(_NO)]
    if failed and not error:
        rank, why = failed[0]
        raise PeerFailed(f"rank {rank} of the trainer: {why}", target=f"rank {rank}")
