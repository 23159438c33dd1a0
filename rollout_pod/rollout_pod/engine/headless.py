"""vLLM's ranks on a node that is not the head's: no scheduler, no requests."""

import logging
import signal
from types import FrameType

from rollout_pod.engine import arguments, leftovers, sockets
from rollout_pod.engine.base import EngineSettings, EngineStartError
from rollout_pod.engine.lifeline import words_of

log = logging.getLogger(__name__)


def run_ranks(settings: EngineSettings) -> None:
    """See ``SpanningEngine.run_ranks``. For the main thread of a process of its own: SIGTERM ends
    it, and all that it has started.
    """
    if settings.node is None:
        raise EngineStartError("these ranks belong to no node")
    args, _ = arguments.parse(settings)
    if swept := leftovers.sweep_pod():
        log.warning("removed from /dev/shm what a killed engine left: %s", sorted(swept))
    (settings.run_dir / "ranks").mkdir(parents=True, exist_ok=True)
    rpc = sockets.folder_in(settings.run_dir)

    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)  # so that vLLM's own finalizers run
    with arguments.environment(args, settings, rpc):
        try:
            config = args.create_engine_config(headless=True)
            executor = MultiprocExecutor(config, monitor_workers=False)
        except Exception as error:
            raise EngineStartError(words_of(error)) from error
    try:
        executor.start_worker_monitor(inline=True)
    finally:
        executor.shutdown()
