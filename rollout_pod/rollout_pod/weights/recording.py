"""Watches a load and notes which bytes of which checkpoint tensor went where.

Everything that touches a tensor passes torch's dispatcher, and this sees it: views keep the place,
``copy_`` carries bytes on, and whatever else reads a checkpoint's bytes makes the tensor *impure*:
something was computed of it. So does whatever writes in place over bytes that have arrived, even
where it happens to change none of these (zeros that are scaled, values that are clamped); beside
them a fill may put what it likes. A checksum is taken of every slice when it is copied, and again
of where it is said to have arrived when the load is over, for what no dispatcher sees. So a plan is
what was seen, and was true of this load.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout_pod.weights.copies import (
    MAX_ROWS,
    Copy,
    Layout,
    UnplannableError,
    decompose,
    uncovered,
)

_COPY: Final = torch.ops.aten.copy_.default
_CLONES: Final = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})
_FILLS: Final = frozenset(
    {
        torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default,
    }
)  # fmt: skip
"""Of what they leave alone they change nothing: loaders zero what a vocabulary is padded with."""
_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))
_CHUNK: Final = 1 << 22


@dataclass(frozen=True)
class Slice:
    """A part of a checkpoint tensor, and the view that it was copied to; bytes, but for the view's
    shape and strides.
    """

    name: str
    copies: tuple[Copy, ...]
    """Sources count from the start of the tensor, targets from the start of the storage."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """Elements, from the start of the storage."""
    checksum: torch.Tensor

    def view(self, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        """The bytes as they are in a storage now."""
        base = torch.empty(0, dtype=self.dtype, device=device)
        return base.set_(storage, self.offset, self.shape, self.strides)

    def moved(self, nbytes: int) -> "Slice":
        """The same, further on in the storage."""
        return replace(
            self,
            offset=self.offset + nbytes // self.dtype.itemsize,
            copies=tuple(c._replace(target=c.target + nbytes) for c in self.copies),
        )

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """First byte written and the one after the last."""
        return (
            min(c.target for c in self.copies),
            max(c.target + (c.rows - 1) * c.target_pitch + c.width for c in self.copies),
        )


@dataclass(frozen=True)
class _Whole:
    """A storage that is a checkpoint tensor, ``start`` bytes into it."""

    name: str
    start: int


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it out
    """Enter it around the load."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._wholes: dict[int, _Whole] = {}
        self._slices: dict[int, list[Slice]] = {}
        self.impure: dict[str, str] = {}
        """Names of tensors that something was computed of, and what."""

    def source(self, name: str, tensor: torch.Tensor) -> None:
        """A checkpoint's tensor that is now given to the loaders; contiguous, and a copy of its
        own.
        """
        if tensor.numel():
            key = _key(tensor)
            self._slices.pop(key, None)
            start = int(tensor.storage_offset()) * tensor.dtype.itemsize
            self._wholes[key] = _Whole(name, start)

    def names_of(self, tensor: torch.Tensor) -> set[str]:
        """Checkpoint tensors of which there are bytes in this one's memory."""
        if tensor.is_meta or not tensor.numel():
            return set()
        key = _key(tensor)
        whole = self._wholes.get(key)
        if whole is not None:
            return {whole.name}
        return {found.name for found in self._slices.get(key, ())}

    def slices_in(self, tensor: torch.Tensor) -> Sequence[Slice]:
        """What arrived in this tensor's memory and is there still, as its checksum says; tensors
        of which some slice is not are impure from now on.
        """
        if tensor.is_meta or not tensor.numel():
            return ()
        storage = tensor.untyped_storage()
        found = self._slices.get(storage.data_ptr(), [])
        if not found:
            return ()
        now = torch.stack([checksum(each.view(storage, tensor.device)) for each in found])
        then = torch.stack([each.checksum for each in found])
        for each, same in zip(found, (now == then).tolist(), strict=True):
            if not same:
                self.impure.setdefault(each.name, "it is changed after it is copied")
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See ``TorchDispatchMode``."""
        kwargs = kwargs or {}
        if func is _COPY:
            self._copied(args[0], args[1])
            return func(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        before = {_key(tensor) for tensor in given}
        result = func(*args, **kwargs)
        made = [tensor for tensor in _tensors(result) if _key(tensor) not in before]
        for tensor in made:
            # whoever had this memory before is dead
            self._wholes.pop(_key(tensor), None)
            self._slices.pop(_key(tensor), None)
        if func in _CLONES and len(given) == len(made) == 1:
            self._cloned(given[0], made[0], str(func))
        elif made or _written(func, args) or not list(_tensors(result)):
            filled = _written(func, args) if func in _FILLS else []
            for tensor in given:
                if _key(tensor) in self._wholes or not any(tensor is other for other in filled):
                    self._taint(tensor, str(func))
                else:
                    self._spoil(self._under(tensor), str(func))
        return result

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.is_meta or source.is_meta or not target.numel():
            return
        if _key(target) in self._wholes:
            self._taint(target, "written to")
            return
        if _same_place(target, source):
            return
        if source.dtype != target.dtype:
            self._taint(source, f"converted to {target.dtype}")
            self._spoil(self._under(target), "written over")
            return
        if source.shape != target.shape:
            source = source.expand(target.shape)
        self._arrived(target, source)

    def _cloned(self, source: torch.Tensor, made: torch.Tensor, what: str) -> None:
        # a copy of what is in the model already may be kept anywhere
        if _key(source) not in self._wholes or source.dtype != made.dtype:
            self._taint(source, what)
        else:
            self._arrived(made, source)

    def _arrived(self, target: torch.Tensor, source: torch.Tensor) -> None:
        whole = self._wholes.get(_key(source))
        size = target.dtype.itemsize
        under = self._under(target)
        if whole is not None:
            try:
                copies = decompose(
                    target.shape, size,
                    Layout(int(source.storage_offset()) * size - whole.start, source.stride()),
                    Layout(int(target.storage_offset()) * size, target.stride()),
                )  # fmt: skip
            except UnplannableError as error:
                self._taint(source, str(error))
                self._spoil(under, "written over")
                return
            new = [
                Slice(
                    whole.name, copies, target.dtype, tuple(target.shape), target.stride(),
                    int(target.storage_offset()), checksum(source),
                )
            ]  # fmt: skip
        else:
            new = self._carried(target, source)
        # by identity: there are tensors in them
        gone = {id(each) for each in under if new and _covers(target, each)}
        self._spoil((each for each in under if id(each) not in gone), "written over")
        if new:
            here = self._slices.setdefault(_key(target), [])
            here[:] = [each for each in here if id(each) not in gone]
            here.extend(new)

    def _under(self, target: torch.Tensor) -> list[Slice]:
        """What has arrived where this view writes, whole or in part."""
        here = self._slices.get(_key(target), [])
        if not here or not target.numel():
            return []
        size = target.dtype.itemsize
        start = int(target.storage_offset()) * size
        end = start + _span(target) * size
        near = [s for s in here if s.bounds[0] < end and start < s.bounds[1]]
        if not near:
            return []
        if _dense(target):
            return _hit([(start, end)], near)
        layout = Layout(start, target.stride())
        try:
            rows = decompose(target.shape, size, layout, layout)
        except UnplannableError:
            return near
        if sum(row.rows for row in rows) > MAX_ROWS:
            return near
        return _hit(
            [
                (at, at + row.width)
                for row in rows
                for at in (row.target + i * row.target_pitch for i in range(row.rows))
            ],
            near,
        )

    def _spoil(self, slices: Iterable[Slice], what: str) -> None:
        for each in slices:
            self.impure.setdefault(each.name, what)

    def _carried(self, target: torch.Tensor, source: torch.Tensor) -> list[Slice]:
        """What came by an earlier copy goes on, if this one keeps its layout."""
        found = self._slices.get(_key(source), [])
        if not found:
            return []
        size = target.dtype.itemsize
        start = int(source.storage_offset()) * size
        end = start + source.numel() * size
        inside = [s for s in found if s.bounds[0] < end and s.bounds[1] > start]
        keeps = source.stride() == target.stride() and _dense(source)
        moved: list[Slice] = []
        for each in inside:
            if keeps and start <= each.bounds[0] and each.bounds[1] <= end:
                moved.append(
                    each.moved(int(target.storage_offset() - source.storage_offset()) * size)
                )
            else:
                self.impure.setdefault(each.name, "it is rearranged after it is copied")
        return moved

    def _taint(self, tensor: torch.Tensor, what: str) -> None:
        for name in self.names_of(tensor):
            self.impure.setdefault(name, what)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor's bits in logical order: 64 bits, there where the tensor is, without waiting."""
    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8)
    if not tensor.is_cuda:
        digest = hashlib.blake2b(raw.numpy().data, digest_size=8).digest()
        return torch.tensor(int.from_bytes(digest, "little", signed=True))
    return mixed(raw)


def mixed(raw: torch.Tensor) -> torch.Tensor:
    """A checksum of bytes by torch's own operations."""
    nbytes = len(raw)
    word, dtype = next((w, d) for w, d in _WORDS if nbytes % w == 0 and raw.data_ptr() % w == 0)
    values = raw.view(dtype)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    weights = torch.arange(
        1, 2 * min(_CHUNK, max(len(values), 1)), 2, dtype=torch.int64, device=raw.device
    )  # odd, so that no bit is lost
    for at in range(0, len(values), _CHUNK):
        part = values[at : at + _CHUNK].to(torch.int64)
        # the multiplication mixes bits upwards, the shift downwards
        product = (part ^ (part >> 31)) * weights[: len(part)]
        total = total * 1_000_003 + (product ^ (product >> 29)).sum()
    return total + word


def _key(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _span(tensor: torch.Tensor) -> int:
    """Elements from its first to its last in memory."""
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def _dense(tensor: torch.Tensor) -> bool:
    return _span(tensor) == tensor.numel()


def _hit(ranges: Sequence[tuple[int, int]], slices: Iterable[Slice]) -> list[Slice]:
    """Those of which there is a byte in ``ranges``, or which are too many pieces to tell."""
    total = sum(stop - start for start, stop in ranges)
    return [each for each in slices if uncovered(ranges, each.copies) != total]


def _covers(target: torch.Tensor, under: Slice) -> bool:
    """Whether a view writes all bytes of a slice."""
    if _dense(target):
        start = int(target.storage_offset()) * target.dtype.itemsize
        end = start + target.numel() * target.dtype.itemsize
        return start <= under.bounds[0] and under.bounds[1] <= end
    place = (target.dtype, tuple(target.shape), target.stride(), target.storage_offset())
    return place == (under.dtype, under.shape, under.strides, under.offset)


def _same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _written(func: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """What an operation changes of what it is given by position."""
    return [
        arg
        for spec, arg in zip(func._schema.arguments, args, strict=False)
        if spec.alias_info is not None and spec.alias_info.is_write
        if isinstance(arg, torch.Tensor)
    ]


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
