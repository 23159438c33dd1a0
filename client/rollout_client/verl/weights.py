"""verl's streams of weights as the adapter reads them."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

import torch

from rollout_pod.weights.headers import read_header

Stream = Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]]

_END: Final = object()


class Pairs(Iterator[tuple[str, torch.Tensor]]):
    """Pairs of name and tensor, read on another thread than the loop's.

    verl's generators gather a tensor at each step, with the gradient mode and on the device of the
    thread that runs them; checkpoint engines receive them in the event loop.

    Args:
        weights: what verl hands over.
        timeout_s: for one tensor that an engine receives.
    """

    def __init__(self, weights: Stream, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        # a process that never touched a GPU must not begin to by asking
        has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's own
        self._device = torch.cuda.current_device() if has_gpu else None
        self._done = False
        if isinstance(weights, AsyncIterable):
            received = aiter(weights)

            async def receive() -> Any:
                with torch.no_grad():
                    return await anext(received, _END)

            self._step: Callable[[], Any] = lambda: self._in_loop(receive())
        else:
            gathered = iter(weights)
            self._step = lambda: next(gathered, _END)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._done:
            raise StopIteration
        try:
            with torch.no_grad(), self._on_device():
                found = self._step()
        except BaseException:
            self._done = True
            raise
        if found is _END:
            self._done = True
            raise StopIteration
        name, tensor = found
        return name, tensor.detach()

    async def drain(self) -> None:
        """Read what is left: others take part in gathering it, and would wait."""
        await asyncio.to_thread(self._exhaust)

    def _exhaust(self) -> None:
        for _ in self:
            pass

    def _in_loop(self, step: Any) -> Any:
        if threading.get_ident() == self._loop_thread:
            step.close()
            raise RuntimeError("weights that come in the event loop are read on another thread")
        future = asyncio.run_coroutine_threadsafe(step, self._loop)
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(
                f"the checkpoint engine brought no tensor in {self._timeout_s:g} s"
            ) from None

    def _on_device(self) -> Any:
        if self._device is None:
            return contextlib.nullcontext()
        return torch.cuda.device(self._device)


def read_types(checkpoint: Path | str | None) -> dict[str, str]:
    """Types of the tensors of a local checkpoint, by name; none where it has no safetensors files.

    Raises:
        SourceError: a file is broken.
    """
    types: dict[str, str] = {}
    for file in sorted(Path(checkpoint).glob("*.safetensors")) if checkpoint else ():
        with file.open("rb") as opened:
            for spec, _ in read_header(file, file.stat().st_size, opened.read):
                types[spec.name] = spec.dtype
    return types


def casting(types: Mapping[str, str], *, default: str) -> Callable[[str, torch.dtype], torch.dtype]:
    """In which type each tensor is sent: trainers keep all of them in one, engines do not.

    Args:
        types: those of the checkpoint, which the engine expects.
        default: verl's ``rollout.dtype``, for tensors that the checkpoint does not have.
    """

    def cast(name: str, dtype: torch.dtype) -> torch.dtype:
        want = getattr(torch, types.get(name, default), None)
        # To make a quantised tensor takes more than another type: the pod says what is wrong.
        if not isinstance(want, torch.dtype) or not dtype.is_floating_point:
            return dtype
        return want if want.is_floating_point and want.itemsize > 1 else dtype

    return cast
