"""The vLLM adapter: ``AsyncLLM`` in this process, behind the Engine Protocol.

vLLM itself is imported when the engine starts, in a thread: it takes seconds, and probes have to be
answered meanwhile.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rollout_pod.engine import (
    adapters,
    arguments,
    headless,
    leftovers,
    processes,
    sharing,
    sockets,
)
from rollout_pod.engine.base import (
    CacheReport,
    EngineDeadError,
    EngineError,
    EngineOutput,
    EngineRequest,
    EngineSettings,
    EngineStartError,
    OnDelta,
    Prepared,
    RankReport,
    Share,
    SleepReport,
    SleepUnsupported,
    StagingRefused,
)
from rollout_pod.engine.front_end import App
from rollout_pod.engine.lifeline import Lifeline, words_of
from rollout_pod.engine.openai.front_end import FrontEnd
from rollout_pod.engine.output_tail import OutputTail
from rollout_pod.engine.ranks import Ranks
from rollout_pod.engine.requests import Requests
from rollout_pod.engine.sleep_mode import released, sleep_refusal
from rollout_pod.protocol import EngineInfo, SleepTag

log = logging.getLogger(__name__)

_POLL_S = 0.2
_CALL_S = 60.0
_PAUSE_S = 120.0
"""A pause waits for the step that runs: the longest prefill."""
_MEMORY_S = 600.0
"""Falling asleep copies the weights to host memory that has to be pinned first."""
_OUTPUTS_S = 0.02
"""For what vLLM has received, to reach those who wait for it: as ``pause_generation`` does."""
_SHUTDOWN_S = 1.0
_SHUTDOWN_WORKERS_S = 4.0
"""Where the engine has workers of its own, which it has to end first."""
_NOTE_S = 1.0
_STOP_START_S = 60.0
"""An import of vLLM cannot be interrupted."""
# vLLM's way to say that a child failed and that its output tells why
_CHILD_FAILED = "Engine core initialization failed"


def _freeze_heap() -> None:
    """What vLLM and PyTorch made stays: a collection that looks at all of it stops every request
    for tenths of a second.
    """
    gc.collect()
    gc.freeze()


async def _abort_all(llm: Any) -> None:
    """``pause_generation(mode="abort")`` without the 20 ms for which it sleeps at its end: that
    is for callers who do not wait for their outputs themselves, and every update would pay it.
    """
    await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=True)


async def _until_empty(outputs: "asyncio.Queue[Any]") -> None:
    # whoever reads them runs between two of these looks
    while not outputs.empty():  # noqa: ASYNC110 - vLLM sets no event when it has taken the last
        await asyncio.sleep(0)


def create(settings: EngineSettings) -> "VllmEngine":
    """The entry point ``vllm`` of the group ``rollout_pod.engines``."""
    return VllmEngine(settings)


class VllmEngine:
    """See ``Engine``."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._llm: Any = None
        self._tail = OutputTail()
        self._lifeline = Lifeline(self._tail)
        self._constructing: asyncio.Future[EngineInfo] | None = None
        self._children_before = processes.children_now()
        self._processes: set[psutil.Process] = set()
        self._shared_files: set[str] = set()
        self._closed = False
        self._started = False
        self._shares: tuple[Share, ...] = ()
        self._share: Share | None = None
        self._world = 0
        self._gpu_uuids: tuple[str | None, ...] = ()
        self._sleep_refusal: str | None = None
        self._adapters: dict[str, Any] = {}
        self._requests: Requests | None = None
        self._ranks: Ranks | None = None
        self._front_end = FrontEnd(self._lifeline)
        # The tests that show what the CPU repairs are for switch them off; nobody else should.
        self._cpu_repairs = True

    # --- life ---

    async def start(self) -> EngineInfo:
        """See ``Engine``. Once."""
        if self._started:
            raise EngineStartError("an engine starts once; create another one")
        self._started = True
        try:
            self._constructing = asyncio.ensure_future(asyncio.to_thread(self._construct))
            while not self._constructing.done():
                await asyncio.wait({self._constructing}, timeout=_NOTE_S)
                await asyncio.to_thread(self._note_belongings)
                if (death := self._lifeline.death()) is not None:
                    raise EngineStartError(death)
            info = self._constructing.result()
            # vLLM reads outputs from its first request on. Where other processes make all requests
            # there is none here, and a step's statistics would stay in the queue, for ever.
            self._llm._run_output_handler()
            if self._share is None:
                await self._start_receivers()
                await self._load_adapters()
            else:
                # asked for now, so that no request has to wait for the answer
                await self._lifeline.call(
                    self._llm.get_supported_tasks(), "list its tasks", _CALL_S
                )
            await self._front_end.start(self._llm)
            arguments.read_environment(anew=False)
            await asyncio.to_thread(_freeze_heap)
        except EngineStartError:
            await self.shutdown()
            raise
        except (EngineDeadError, EngineError) as error:
            message = self._tail.last_error() or str(error)
            await self.shutdown()
            raise EngineStartError(message) from error
        except Exception as error:
            message = self._start_message(error)
            await self.shutdown()
            raise EngineStartError(message) from error
        return info

    def share(self, count: int) -> tuple[Share, ...]:
        """See ``SharedEngine``."""
        self._shares = sharing.shares_of(self._settings.run_dir, count)
        return self._shares

    async def attach(self, share: Share) -> None:
        """See ``SharedEngine``."""
        self._share = share
        await self.start()

    async def drained(self) -> None:
        """See ``SharedEngine``."""
        llm = self._alive()
        # the answer comes through this client's own socket, behind all outputs
        await self._lifeline.call(llm.is_paused(), "say whether it is paused", _CALL_S)
        taking = _until_empty(llm.engine_core.outputs_queue)
        await self._lifeline.call(taking, "hand its outputs over", _CALL_S)
        await asyncio.sleep(_OUTPUTS_S)

    def run_ranks(self) -> None:
        """See ``SpanningEngine``."""
        headless.run_ranks(self._settings)

    def condemn(self, reason: str) -> None:
        """See ``SpanningEngine``."""
        self._lifeline.condemn(reason)

    def _construct(self) -> EngineInfo:
        """Everything that blocks. In a thread of its own."""
        arguments.read_environment(anew=True)
        args, front_end_args = arguments.parse(self._settings)
        self._adapters = self._keep_adapters(front_end_args, enabled=bool(args.enable_lora))
        rpc = None
        if self._share is None:
            if swept := leftovers.sweep_pod():
                log.warning("removed from /dev/shm what a killed engine left: %s", sorted(swept))
            (self._settings.run_dir / "ranks").mkdir(parents=True, exist_ok=True)
            rpc = sockets.folder_in(self._settings.run_dir)

        import vllm
        from vllm.v1.engine.async_llm import AsyncLLM

        if self._closed:
            raise EngineStartError("the pod shut down while the engine started")
        share = self._share
        with arguments.environment(args, self._settings, rpc):
            if share is not None:
                llm = sharing.make_client(args, share)
            else:
                with self._tail.inherited(), sharing.launching(self._shares):
                    llm = AsyncLLM.from_engine_args(args)
        self._llm = llm
        self._lifeline.watch(llm)
        model = llm.vllm_config.model_config
        self._ranks = Ranks(llm, self._lifeline)
        self._world = self._ranks.world
        if self._ranks.is_data_parallel and not hasattr(llm.engine_core, "call_utility_all_async"):
            raise EngineStartError(
                "engineArgs: --data-parallel-size above 1 needs vLLM 0.32 or newer"
            )
        self._front_end.prepare(front_end_args, model)
        self._sleep_refusal = sleep_refusal(model)
        self._requests = Requests(llm, self._lifeline, self._adapters)
        return EngineInfo(
            name="vllm",
            version=vllm.__version__,
            logprobs_mode=str(model.logprobs_mode),
            generation_config=args.generation_config,
            max_model_len=model.max_model_len,
            world_size=self._world,
        )

    def _keep_adapters(self, front_end_args: Any, *, enabled: bool) -> dict[str, Any]:
        """Requests for the adapters, and for vLLM's server the same paths and numbers."""
        given, run_dir = front_end_args.lora_modules, self._settings.run_dir
        if self._settings.node is None:  # another machine's ranks read the path they are told
            front_end_args.lora_modules = adapters.moved(given, run_dir)
        requests = adapters.requests_of(front_end_args.lora_modules, enabled=enabled)
        if self._settings.node is None and self._share is None:
            adapters.copy(given, run_dir)
        return requests

    async def _start_receivers(self) -> None:
        # Asked for now, so that no request has to wait for the answer between gate and engine.
        await self._lifeline.call(self._llm.get_supported_tasks(), "list its tasks", _CALL_S)
        settings = self._settings
        answers = await self._on_ranks(
            "rollout_start_receiver",
            (str(settings.run_dir), str(settings.shm_dir), self._world),
            _CALL_S,
        )
        answers.sort(key=lambda answer: int(answer["rank"]))
        self._gpu_uuids = tuple(answer["gpu_uuid"] for answer in answers)

    async def _load_adapters(self) -> None:
        """Now, and not with the first request that names one: a bad one would end the engine."""
        for name, adapter in self._adapters.items():
            call = self._llm.add_lora(adapter)
            try:
                await self._lifeline.call(call, f"load adapter {name}", _CALL_S)
            except EngineDeadError:
                raise
            except Exception as error:
                message = f"engineArgs: --lora-modules {name}: {words_of(error)}"
                raise EngineStartError(message) from error

    def _start_message(self, error: Exception) -> str:
        text = words_of(error)
        if _CHILD_FAILED in text:
            return self._tail.last_error() or text
        return f"{type(error).__name__}: {text}"

    async def shutdown(self) -> None:
        """See ``Engine``."""
        self._closed = True
        await self._stop_constructing()
        await self._front_end.close()
        if self._started:
            await asyncio.to_thread(self._note_belongings)
        llm, self._llm = self._llm, None
        self._lifeline.cut("the engine was shut down")
        if llm is not None:
            try:
                await processes.close_front_end(
                    llm, _SHUTDOWN_S if self._world == 1 else _SHUTDOWN_WORKERS_S
                )
            except Exception:
                log.exception("vLLM's own shutdown failed; its processes are ended")
        await asyncio.to_thread(processes.end_all, list(self._processes))
        await asyncio.to_thread(leftovers.remove_unused, self._shared_files)
        if self._started and self._share is None:
            await asyncio.to_thread(sockets.remove, self._settings.run_dir)
            await asyncio.to_thread(adapters.remove, self._settings.run_dir)
        await asyncio.to_thread(self._tail.close)

    def _note_belongings(self) -> None:
        """Workers whose engine core was killed are no children of this process any more, and what
        a dead process had mapped shows nowhere: so what there is is noted while it lives.
        """
        self._processes.update(processes.engine_children(self._children_before))
        self._shared_files.update(leftovers.mapped_by(list(self._processes)))

    async def _stop_constructing(self) -> None:
        """End a start that is still going on, by ending the processes it waits for."""
        deadline = time.monotonic() + _STOP_START_S
        while self._constructing is not None and not self._constructing.done():
            if time.monotonic() > deadline:
                log.error("the engine's start did not end within %s s", _STOP_START_S)
                return
            await asyncio.to_thread(self._note_belongings)
            await asyncio.to_thread(processes.end_all, list(self._processes))
            await asyncio.wait({self._constructing}, timeout=_POLL_S)
            if self._constructing.done():
                self._constructing.exception()  # seen: a cancelled start awaits it no more

    async def ping(self, *, timeout_s: float) -> None:
        """See ``Engine``."""
        await self._called().check(timeout_s)

    def metrics_text(self) -> bytes:
        """See ``Engine``. Those of ``vllm:`` are there unless it runs with --disable-log-stats."""
        if self._llm is None:
            return b""
        from prometheus_client import CollectorRegistry, generate_latest
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        class OfTheEngine(CollectorRegistry):
            """Without the process' own, which the pod shows."""

            def collect(self) -> Iterator[Any]:
                for family in get_prometheus_registry().collect():
                    if not family.name.startswith("process_"):
                        yield family

        return generate_latest(OfTheEngine())

    def dead_error(self) -> str | None:
        """See ``Engine``."""
        return self._lifeline.death()

    # --- requests ---

    def sampling_params(self, raw: Mapping[str, Any], *, max_tokens: int) -> object:
        """See ``Engine``."""
        return self._asked().sampling_params(raw, max_tokens=max_tokens)

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """See ``Engine``."""
        self._asked().check_tokens(token_ids)

    async def prepare(
        self,
        prompt_token_ids: Sequence[int],
        *,
        lora: str | None = None,
        media: Mapping[str, Sequence[str]] | None = None,
        routed_experts: bool = False,
    ) -> Prepared:
        """See ``Engine``."""
        return await self._asked().preparation.prepare(
            prompt_token_ids, lora=lora, media=media, routed_experts=routed_experts
        )

    async def generate(
        self, request: EngineRequest, on_delta: OnDelta | None = None
    ) -> EngineOutput:
        """See ``Engine``."""
        return await self._asked().generate(request, on_delta)

    async def abort(self, engine_id: str) -> None:
        """See ``Engine``."""
        await self._asked().abort(engine_id)

    def front_end(self) -> App:
        """See ``Engine``."""
        return self._front_end.app()

    # --- scheduler and caches ---

    async def pause(self, *, keep: bool = False) -> None:
        """See ``Engine``."""
        llm = self._alive()
        keeping = {"mode": "keep", "clear_cache": True}
        pausing = llm.pause_generation(**keeping) if keep else _abort_all(llm)
        await self._lifeline.call(pausing, "pause", _PAUSE_S)
        if keep:  # what is still on its way was sampled by the present version
            await self.drained()

    async def resume(self) -> None:
        """See ``Engine``."""
        llm = self._alive()
        # A second resume can deadlock the engines of a data-parallel group.
        if await self._lifeline.call(llm.is_paused(), "say whether it is paused", _CALL_S):
            await self._lifeline.call(llm.resume_generation(), "resume", _CALL_S)

    async def clear_caches(self) -> CacheReport:
        """See ``Engine``."""
        llm = self._alive()
        if not await self._called().clear_prefix_caches():
            return CacheReport(prefix=False, multimodal=False, encoder=False)
        # These two answer nothing and raise when they fail.
        await self._lifeline.call(llm.reset_mm_cache(), "clear its multimodal cache", _CALL_S)
        await self._lifeline.call(llm.reset_encoder_cache(), "clear its encoder cache", _CALL_S)
        return CacheReport(prefix=True, multimodal=True, encoder=True)

    # --- sleep ---

    def sleep_refusal(self) -> str | None:
        """See ``Engine``."""
        return self._sleep_refusal

    async def sleep(self, level: int) -> SleepReport:
        """See ``Engine``."""
        llm = self._alive()
        if self._sleep_refusal is not None:
            raise SleepUnsupported(self._sleep_refusal)
        before = await self._called().free_memory()
        if level == 2:
            await self._on_ranks("rollout_lose_weights", (), _CALL_S)
        await self._lifeline.call(llm.sleep(level=level), "fall asleep", _MEMORY_S)
        return released(before, await self._called().free_memory())

    async def wake(self, tags: frozenset[SleepTag]) -> int:
        """See ``Engine``."""
        llm = self._alive()
        before = await self._called().free_memory()
        names = sorted(tag.value for tag in tags)
        await self._lifeline.call(llm.wake_up(tags=names), "wake up", _MEMORY_S)
        # vLLM lets its scheduler go on as soon as everything is resident.
        if not await self._lifeline.call(llm.is_paused(), "say whether it is paused", _CALL_S):
            await self.pause()
        after = await self._called().free_memory()
        return 0 if before is None or after is None else max(0, before - after)

    # --- weights ---

    async def load_weights(
        self, session: str, *, version: str, flush: bool, timeout_s: float
    ) -> tuple[RankReport, ...]:
        """See ``Engine``."""
        call = (session, version, flush, timeout_s, self._cpu_repairs)
        return await self._called().reports("rollout_load_weights", call, version, timeout_s)

    async def accepted_manifests(self, session: str) -> tuple[str, ...]:
        """See ``Engine``."""
        return tuple(await self._on_ranks("rollout_accepted", (session,), _CALL_S))

    async def stage_weights(self, session: str, *, version: str, timeout_s: float) -> None:
        """See ``Engine``."""
        problems = await self._on_ranks(
            "rollout_stage_weights", (session, version, timeout_s), _CALL_S
        )
        said = sorted({problem for problem in problems if problem})
        if said:
            kind = StagingRefused if all(problems) else EngineError
            raise kind("; ".join(said))

    async def switch_weights(self, version: str, *, timeout_s: float) -> tuple[RankReport, ...]:
        """See ``Engine``."""
        return await self._called().reports(
            "rollout_switch_weights", (version,), version, timeout_s
        )

    async def publish_version(self, version: str) -> None:
        """See ``Engine``."""
        update = getattr(self._alive(), "update_weight_version", None)
        if update is not None:  # vLLM 0.26 knows no versions
            await self._lifeline.call(update(version), "take the version's name", _CALL_S)

    def rank_sockets(self) -> tuple[Path, ...]:
        """See ``Engine``."""
        ranks, node = self._settings.run_dir / "ranks", self._settings.node
        here = self._world // (node.count if node else 1)
        return tuple(ranks / f"rank-{rank}.sock" for rank in range(here))

    def gpu_uuids(self) -> tuple[str | None, ...]:
        """See ``Engine``."""
        return self._gpu_uuids

    def model_path(self) -> Path | None:
        """See ``Engine``."""
        path = Path(self._settings.model)
        return path if path.is_dir() else None

    # --- inside ---

    def _alive(self) -> Any:
        death = self.dead_error()
        if death is not None:
            raise EngineDeadError(death)
        if self._llm is None:
            raise EngineError("the engine has not started yet")
        return self._llm

    def _asked(self) -> Requests:
        self._alive()
        if self._requests is None:
            raise EngineError("the engine has not started yet")
        return self._requests

    def _called(self) -> Ranks:
        self._alive()
        if self._ranks is None:
            raise EngineError("the engine has not started yet")
        return self._ranks

    async def _on_ranks(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        """Call a method of every rank's worker."""
        return await self._called().call(method, args, timeout_s)
