"""The part of the engine that lives in vLLM's worker processes (``--worker-extension-cls``).

vLLM imports this module in every worker before the model is loaded and makes the class a base of
its own worker. All methods carry the prefix ``rollout_``, since vLLM refuses names it has already.
"""

import hashlib
import logging
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollout_pod.engine import boot_record, cpu_repairs, device_slot, reloading
from rollout_pod.engine.arguments import RUN_DIR, STAGING
from rollout_pod.engine.fast import FastLoader
from rollout_pod.engine.layerwise import LayerwiseLoader
from rollout_pod.engine.orphan import SERVER_PID, die_with
from rollout_pod.weights.cuda import Cuda
from rollout_pod.weights.loader import Expected
from rollout_pod.weights.receiver import Receiver
from rollout_pod.weights.report import LoadReport
from rollout_pod.weights.shadow import Shadow, ShadowError
from rollout_pod.weights.spec import UpdatesUnsupportedError

log = logging.getLogger(__name__)

boot_record.install()
if os.environ.get(STAGING) == "Device":
    device_slot.install()
if SERVER_PID in os.environ:
    die_with(int(os.environ[SERVER_PID]))


class RolloutWorker:
    """Methods that the adapter calls on every rank by ``collective_rpc``."""

    # vLLM's worker, of which this class becomes a base
    rank: int
    vllm_config: Any
    model_runner: Any
    rollout_shadow: Shadow | None = None
    """Where the next version waits; set before the KV cache is sized."""

    def rollout_start_receiver(self, run_dir: str, shm_dir: str, world: int) -> dict[str, Any]:
        """Bind this rank's socket. After the model is loaded; once.

        Args:
            run_dir: Has the folder ``ranks``; on another node, the one it was started with.
            shm_dir: Where senders' segments are mounted.
            world: Ranks of all data-parallel engines together.
        """
        from vllm.platforms import current_platform

        rank = self.rollout_rank()
        nodes = int(getattr(self.vllm_config.parallel_config, "nnodes", 1))
        # a sender addresses the ranks that it shares memory with: those of its own node
        here = world // nodes
        model = self.model_runner.get_model()
        record = boot_record.record_of(model)
        text_config = self.vllm_config.model_config.hf_config.get_text_config()
        tied = bool(getattr(text_config, "tie_word_embeddings", False))
        wanted = boot_record.expected(record, tied=tied) if record is not None else None
        why_not = reloading.refusal_of(self.vllm_config, is_recorded=wanted is not None)

        def expected() -> Expected:
            if why_not is not None or wanted is None:
                raise UpdatesUnsupportedError(why_not)
            return wanted

        if record is not None and record.ignored():
            log.info("the model ignored %d tensors of its checkpoint", len(record.ignored()))
        device = None if current_platform.is_cpu() else Cuda(torch.cuda.current_device())
        self._rollout_loader = FastLoader(
            model=model,
            reference=LayerwiseLoader(
                model=model,
                vllm_config=self.vllm_config,
                boot_parameters=record.loaded_parameters if record is not None else None,
                on_cpu=current_platform.is_cpu(),
            ),
            device=device,
        )
        folder = Path(os.environ.get(RUN_DIR, run_dir))
        path = folder / "ranks" / f"rank-{rank % here}.sock"
        self._rollout_receiver = Receiver(
            rank=rank % here,
            world=here,
            host=socket.gethostname(),
            socket_path=path,
            shm_dir=Path(shm_dir),
            expected=expected,
            device=device,
        )
        self._rollout_receiver.start()
        self._rollout_staging = None
        if self.rollout_shadow is not None:
            self._rollout_staging = device_slot.Staging(
                self.rollout_shadow, self._rollout_loader, self._rollout_receiver
            )
        return {
            "rank": rank,
            "host": socket.gethostname(),
            "socket": str(path),
            "gpu_uuid": device.uuid if device is not None else None,
        }

    def rollout_accepted(self, session: str) -> str:
        """See ``Receiver.accepted``."""
        return self._rollout_receiver.accepted(session)

    def rollout_load_weights(
        self, session: str, version: str, flush: bool, timeout_s: float, repair: bool
    ) -> dict[str, Any]:
        """Load what ``session`` brings; never raises: the report says what went wrong.

        ``repair`` is False only in the tests that show what the repairs are for.
        """
        cpu_repairs.enabled = repair
        loader = self._rollout_loader
        replays = loader.enabled
        loader.enabled = replays and repair  # what is copied without the repairs is no whole load
        try:
            report = self._rollout_receiver.load(
                session, loader, version=version, flush=flush, timeout_s=timeout_s
            )
        finally:
            loader.enabled = replays
        if report.ok:
            self._rollout_new_weights()
        return self._rollout_told(report) | {"rank": self.rollout_rank()}

    def _rollout_told(self, report: LoadReport) -> dict[str, Any]:
        notes = (report.note, reloading.stale_draft(self.vllm_config))
        return replace(report, note="; ".join(filter(None, notes))).as_dict()

    def _rollout_new_weights(self) -> None:
        # Adapters were merged for the old weights; older model runners have no such state. The next
        # request that names one reads it again, inside a step: from the copy of ``adapters.copy``.
        reset = getattr(self.model_runner, "reset_lora_state", None)
        if reset is not None:
            reset()

    def rollout_stage_weights(self, session: str, version: str, timeout_s: float) -> str:
        """Begin to take what ``session`` brings to where the next version waits, on a thread of its
        own. Returns at once: why it cannot be, or an empty string.
        """
        if self._rollout_staging is None:
            return "no memory of the device was reserved for it (staging Device)"
        return self._rollout_staging.start(session, version, timeout_s)

    def rollout_switch_weights(self, version: str) -> dict[str, Any]:
        """Give the model what waits beside it; never raises: the report says what went wrong."""
        started = time.monotonic()
        rank, host = self.rollout_rank(), socket.gethostname()
        try:
            if self._rollout_staging is None:
                raise ShadowError("no memory of the device was reserved (staging Device)")
            manifest = self._rollout_loader.switch(self._rollout_staging.shadow, version)
        except ShadowError as error:
            report = LoadReport(rank, host, False, version, error=str(error), touched=False)
        except Exception as error:
            log.exception("rank %d: switching to %s failed", rank, version)
            report = LoadReport(
                rank, host, False, version, error=f"{type(error).__name__}: {error}"
            )
        else:
            self._rollout_new_weights()
            report = LoadReport(
                rank, host, True, version, tensors=len(manifest.tensors), bytes=manifest.nbytes,
                path="switched", manifest=manifest.mark,
            )  # fmt: skip
        return self._rollout_told(replace(report, seconds=time.monotonic() - started))

    def rollout_lose_weights(self) -> None:
        """Whatever the model holds is lost soon: the next load has to write every byte of it."""
        self._rollout_loader.require_full_cover = True

    def rollout_free_memory(self) -> int | None:
        """Bytes that are free on this rank's device, whoever uses the rest; None on CPU."""
        from vllm.platforms import current_platform

        if not current_platform.is_cuda_alike():
            return None
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        return int(free)

    def rollout_fault(self) -> str | None:
        """What has gone wrong with this rank's device for good; None while it works.

        Waits for nothing. vLLM itself learns of a fault with its next step: an idle engine never.
        """
        from vllm.platforms import current_platform

        if not current_platform.is_cuda_alike():
            return None
        try:
            torch.cuda.current_stream().query()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return None

    def rollout_replay(self, on: bool) -> None:
        """Whether later loads may be made by copies; off only where the two are compared."""
        self._rollout_loader.enabled = on

    def rollout_digests(self) -> dict[str, str]:
        """A hash of every parameter's bits, by the model's own names."""
        model = self.model_runner.get_model()
        return {
            name: hashlib.blake2b(
                tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes(),
                digest_size=16,
            ).hexdigest()
            for name, tensor in model.named_parameters()
        }

    def rollout_rank(self) -> int:
        """Global: data-parallel index x world + rank."""
        parallel = self.vllm_config.parallel_config
        index = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        return int(index * parallel.world_size + self.rank)
