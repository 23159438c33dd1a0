"""Whether a named transport can work between a sender and the ranks, before a byte is sent."""

from collections.abc import Sequence

from rollout_pod.protocol import PushTarget, Transport
from rollout_pod.weights.device import Device
from rollout_pod.weights.push_errors import PushRefused


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
