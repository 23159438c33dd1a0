"""The sender that fits a pod: whether a named transport can work between it and the ranks, before a
byte is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_pod.protocol import PushTarget, Transport
from rollout_pod.weights.device import Device
from rollout_pod.weights.push_errors import PushRefused
from rollout_pod.weights.trainer import Mode, WeightSender


def checked_ranks(target: PushTarget, ranks: Sequence[int] | None) -> Sequence[int]:
    """The global numbers of the ranks to send to.

    Raises:
        PushRefused: the pod has none of that number.
    """
    numbers = range(target.world) if ranks is None else ranks
    wrong = [rank for rank in numbers if not 0 <= rank < len(target.sockets)]
    if wrong:
        raise PushRefused(f"ranks: the pod has {target.world}, none is numbered {wrong[0]}")
    return numbers


def checked_transport(
    target: PushTarget, mine: Transport, device: Device | None, ranks: Sequence[int]
) -> Transport:
    """What sender and pod ask for together. ``auto`` is left to hello, which picks and reports.

    Raises:
        PushRefused: they name two, or one that cannot work: what and why.
    """
    if "auto" not in (mine, target.transport) and mine != target.transport:
        raise PushRefused(
            f"transport: the sender names {mine}, the pod's document {target.transport}: let one "
            "of them be auto"
        )
    asked = target.transport if mine == "auto" else mine
    if asked != "cuda_ipc":
        return asked
    if device is None:
        raise PushRefused(
            "transport cuda_ipc does not work: the tensors are on the host; give the sender their "
            "GPU (device), or ask for transport auto"
        )
    for rank in ranks:
        there = target.gpu_uuids[rank]
        if there != device.uuid:
            raise PushRefused(
                f"transport cuda_ipc does not work: the sender is on {device.uuid}, rank {rank} on "
                f"{there or 'no GPU'}; place both on one GPU, or ask for transport auto"
            )
    return asked


@dataclass
class Placement:
    """What one process wants of its sender, and the sender itself, kept as long as it fits."""

    shm_dir: Path | None
    """None takes what the pod says."""
    device: Device | None
    transport: Transport
    mode: Mode
    bucket_bytes: int | None
    """None takes what the pod's document names."""
    ranks: tuple[int, ...] | None
    _sender: WeightSender | None = None
    _made_for: tuple[object, ...] = ()

    @property
    def sender(self) -> WeightSender | None:
        """The present one."""
        return self._sender

    def sender_for(self, target: PushTarget) -> WeightSender:
        """The one of the last push, unless the pod is another, or asks for something else.

        Raises:
            PushRefused: see ``checked_ranks`` and ``checked_transport``.
        """
        numbers = checked_ranks(target, self.ranks)
        transport = checked_transport(target, self.transport, self.device, numbers)
        bucket_bytes = self.bucket_bytes or target.bucket_bytes
        shm_dir = self.shm_dir or Path(target.shm_dir)
        key = (target.boot_id, transport, bucket_bytes, shm_dir)
        if self._sender is not None and self._made_for == key:
            return self._sender
        self.close()
        self._sender = WeightSender(
            [Path(target.sockets[rank]) for rank in numbers], shm_dir=shm_dir,
            transport=transport, mode=self.mode, bucket_bytes=bucket_bytes, device=self.device,
            ranks=self.ranks, world=target.world,
        )  # fmt: skip
        self._made_for = key
        return self._sender

    def close(self) -> None:
        """Let the ranks unmap the sender's memory. Idempotent."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()
