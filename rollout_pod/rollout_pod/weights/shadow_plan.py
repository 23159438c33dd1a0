"""Where the bytes of a version wait on the GPU before they become the model's. Pure.

The place is laid out as the model's own memory is: what a load writes there is moved to where the
parameters are by a few large copies, and nothing else of the model is touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_pod.weights.buckets import ALIGN, align
from rollout_pod.weights.copies import Copy, CopyPlan, uncovered


@dataclass(frozen=True)
class ShadowPlan:
    """A copy plan in two halves.

    Args:
        inward: the same plan, with targets in the waiting place.
        outward: copies from there to the model.
        nbytes: of the waiting place.
    """

    inward: CopyPlan
    outward: tuple[Copy, ...]
    nbytes: int


@dataclass
class _Region:
    """A stretch of the model's memory that a plan writes, and the copies that do."""

    start: int
    stop: int
    copies: list[Copy]


def shadow_of(plan: CopyPlan, address: int) -> ShadowPlan:
    """Split a plan.

    Args:
        plan: whose targets are addresses.
        address: of the waiting place, a multiple of ``ALIGN``.
    """
    regions = _regions([copy for copies in plan.copies.values() for copy in copies])
    outward: list[Copy] = []
    moves: dict[int, int] = {}
    position = 0
    for region in regions:
        # as it lies in the model, so that copies take words of the same size
        begin = align(position) + region.start % ALIGN
        position = begin + region.stop - region.start
        shift = address + begin - region.start
        for copy in region.copies:
            moves[copy.target] = copy.target + shift
        outward.extend(_out(region, shift))
    inward = {
        name: tuple(copy._replace(target=moves[copy.target]) for copy in copies if copy.nbytes)
        for name, copies in plan.copies.items()
    }
    return ShadowPlan(
        CopyPlan(inward, full=plan.full, reasons=plan.reasons), tuple(outward), align(position)
    )


def room_for(sizes: Sequence[int]) -> int:
    """Bytes that are enough for every plan that writes memory blocks of these sizes."""
    return sum(align(size) + ALIGN for size in sizes)


def _end(copy: Copy) -> int:
    return copy.target + (copy.rows - 1) * copy.target_pitch + copy.width


def _regions(copies: Sequence[Copy]) -> list[_Region]:
    found: list[_Region] = []
    for copy in sorted(copies, key=lambda copy: copy.target):
        if not copy.nbytes:
            continue
        if found and copy.target <= found[-1].stop:
            found[-1].stop = max(found[-1].stop, _end(copy))
            found[-1].copies.append(copy)
        else:
            found.append(_Region(copy.target, _end(copy), [copy]))
    return found


def _out(region: _Region, shift: int) -> list[Copy]:
    if uncovered([(region.start, region.stop)], region.copies) == 0:
        return [Copy(region.start + shift, region.start, region.stop - region.start)]
    return [
        Copy(
            copy.target + shift, copy.target, copy.width, copy.rows, copy.target_pitch,
            copy.target_pitch,
        )
        for copy in region.copies
    ]  # fmt: skip
