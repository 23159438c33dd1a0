"""The trainer's ranks that gather together: they agree whether to begin, and learn how it ended.

Text in tensors of one size: nothing is pickled.
"""

from typing import TYPE_CHECKING, Final, Literal

import torch
import torch.distributed as dist

from rollout_client.trainer.errors import PeerFailed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TEXT: Final = 1024
"""Bytes; what is longer is cut."""


class Ranks:
    """One rank's part. Calls are collective, block, and have the group's own deadline.

    Args:
        group: see ``ServerAdapter``.
        sender: whether this rank sends; None: rank 0 of the group does.

    Raises:
        ValueError: no process group was made.
    """

    def __init__(
        self, group: "ProcessGroup | Literal['world']", *, sender: bool | None = None
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("group: call torch.distributed.init_process_group first")
        self._group = dist.group.WORLD if group == "world" else group
        self.is_sender = dist.get_rank(self._group) == 0 if sender is None else sender
        if "nccl" in dist.get_backend(self._group):
            # asked here: the threads that call us have a present GPU of their own
            self._device = torch.device("cuda", torch.cuda.current_device())
        else:
            self._device = torch.device("cpu")

    def tell(self, text: str) -> list[str]:
        """Everybody's text, by rank.

        Raises:
            PeerFailed: a rank is gone or late.
        """
        data = text.encode()[:_TEXT].decode(errors="ignore").encode()
        mine = torch.zeros(_TEXT, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        mine = mine.to(self._device)
        all_texts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        try:
            dist.all_gather(all_texts, mine, group=self._group)
        except RuntimeError as error:
            raise PeerFailed(f"a rank of the trainer is gone or late: {error}") from error
        return [bytes(t.cpu().tolist()).rstrip(b"\0").decode() for t in all_texts]
