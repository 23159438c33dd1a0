"""Memory of a worker's GPU in which the next version waits (staging ``Device``).

It is taken before vLLM measures how much is left for the KV cache, which is then that much smaller.
"""

import logging
import threading
from typing import Any, Final

import torch

from rollout_pod.engine.fast import FastLoader
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.device import DeviceError
from rollout_pod.weights.receiver import Receiver
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.shadow import Shadow, StagingLoader
from rollout_pod.weights.shadow_plan import room_for

log = logging.getLogger(__name__)

_GIB: Final = 1 << 30
_JOIN_S: Final = 5.0


class SlotRefusedError(RuntimeError):
    """There is no room for it; the message has the arithmetic."""


def install() -> None:
    """Wrap vLLM's worker, in its own process and before it is made, so that the memory is taken
    when the model is loaded and nothing else is sized yet.
    """
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker.determine_available_memory
    if getattr(original, "rollout_wrapped", False):
        return

    def determine_available_memory(self: Any) -> int:
        self.rollout_shadow = reserve(self)
        return int(original(self))

    determine_available_memory.rollout_wrapped = True  # type: ignore[attr-defined]  # a mark
    Worker.determine_available_memory = determine_available_memory


def reserve(worker: Any) -> Shadow:
    """Take the memory.

    Args:
        worker: vLLM's, with its model.

    Raises:
        SlotRefusedError: the KV cache would have nothing left.
    """
    nbytes = slot_bytes(worker.model_runner.get_model())
    ordinal = torch.cuda.current_device()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(ordinal)
    config = worker.vllm_config.cache_config
    # vLLM counts what it took itself, not what a trainer on the same GPU has
    begun = getattr(worker, "init_snapshot", None)
    used = (begun.free_memory if begun is not None else total) - free
    problem = refusal(
        nbytes,
        used=used,
        free=free,
        total=total,
        utilization=config.gpu_memory_utilization,
        kv_cache=config.kv_cache_memory_bytes,
    )
    if problem:
        raise SlotRefusedError(problem)
    try:
        shadow = Shadow(Cuda(ordinal).allocate(nbytes), nbytes)
    except DeviceError as error:
        raise SlotRefusedError(
            f"weights.staging Device: {nbytes / _GIB:.2f} GiB for the next version cannot be had, "
            f"{free / _GIB:.2f} are free: {error}"
        ) from error
    log.info("%.2f GiB of the GPU are reserved for the next version", nbytes / _GIB)
    return shadow


def slot_bytes(model: torch.nn.Module) -> int:
    """Enough for a version, laid out as the parameters are."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for parameter in model.parameters()
        if (storage := parameter.untyped_storage()).nbytes()
    }
    return room_for(list(storages.values()))


def refusal(
    nbytes: int, *, used: int, free: int, total: int, utilization: float, kv_cache: int | None
) -> str:
    """Why there is no room, in numbers; empty if there is. All in bytes, when the model is loaded.

    Args:
        nbytes: of the slot.
        used: by the engine so far.
        free: of the GPU's memory.
        total: the GPU's memory.
        utilization: the share of ``total`` that vLLM may use.
        kv_cache: where its size is given; vLLM then looks at no share.
    """
    if kv_cache:
        left = free - nbytes - kv_cache
        wanted = f"{kv_cache / _GIB:.2f} GiB for the KV cache (--kv-cache-memory-bytes)"
    else:
        left = int(total * utilization) - used - nbytes
        wanted = (
            f"something for the KV cache, of {total * utilization / _GIB:.2f} GiB in all "
            f"(--gpu-memory-utilization {utilization:g} of {total / _GIB:.2f})"
        )
    if left > 0:
        return ""
    return (
        f"weights.staging Device reserves {nbytes / _GIB:.2f} GiB for the next version beside the "
        f"{used / _GIB:.2f} GiB of the model and {wanted}: {-left / _GIB:.2f} GiB are missing. Use "
        "staging Host, more GPUs for each engine, or leave vLLM more memory"
    )


class Staging:
    """Loads versions into the slot while the engine serves. At most one at a time.

    Args:
        shadow: the slot.
        fast: the worker's loader.
        receiver: the worker's.
    """

    def __init__(self, shadow: Shadow, fast: FastLoader, receiver: Receiver) -> None:
        self.shadow = shadow
        self._fast = fast
        self._receiver = receiver
        self._ordinal = torch.cuda.current_device()
        self._stream = torch.cuda.Stream(self._ordinal)  # type: ignore[no-untyped-call]  # torch's
        near, far = fast.replayers_aside()
        self._loader = StagingLoader(shadow, fast.plan_aside, near=near, far=far)
        self._thread: threading.Thread | None = None

    def start(self, session: str, version: str, timeout_s: float) -> str:
        """Begin to take what ``session`` brings; its sender gets the report. Returns at once: why
        it cannot be, or an empty string.
        """
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(0.05)  # its report is out, the thread may not be
            if self._thread.is_alive():
                return "another version is being staged"
        # now, and not by the thread: a session that was begun is of no use for an ordinary load
        if why := self._fast.refusal_aside():
            return why
        self._thread = threading.Thread(
            target=self._run,
            args=(session, version, timeout_s),
            name="weights-staging",
            daemon=True,
        )
        self._thread.start()
        return ""

    def _run(self, session: str, version: str, timeout_s: float) -> LoadReport:
        torch.cuda.set_device(self._ordinal)  # of this thread
        with torch.cuda.stream(self._stream), torch.no_grad():
            report = self._receiver.load(
                session, self._loader, version=version, flush=False, timeout_s=timeout_s,
                aside=True,
            )  # fmt: skip
        if not report.ok:
            self.shadow.held = None
            log.warning("version %s is not staged: %s", version, report.error)
        return report

    def close(self) -> None:
        """Wait for the thread, whose receiver was closed."""
        if self._thread is not None:
            self._thread.join(_JOIN_S)
