"""One engine core, clients in several processes: vLLM's own arrangement (``--api-server-count``),
without its servers. The process that starts the core is client 0 and steers it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout_pod.engine.base import EngineStartError, Share


def shares_of(run_dir: Path, count: int) -> tuple[Share, ...]:
    """Where ``count`` further clients meet the core."""
    folder = run_dir / "clients"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for stale in folder.iterdir():
        stale.unlink()
    return tuple(
        Share(
            index=index,
            count=count + 1,
            input_address=f"ipc://{folder}/{index}-in.sock",
            output_address=f"ipc://{folder}/{index}-out.sock",
        )
        for index in range(1, count + 1)
    )


@contextmanager
def launching(shares: Sequence[Share]) -> Iterator[None]:
    """A core that is launched inside gives its outputs to these clients, too.

    vLLM's client that owns its core names only itself to it (``MPClient.__init__``), and what
    launches a core for several clients owns none: so the addresses are added on the way.
    """
    if not shares:
        yield
        return
    from vllm.v1.engine import core_client

    launch = core_client.launch_core_engines

    def launch_for_all(config: Any, executor: Any, log_stats: bool, addresses: Any) -> Any:
        if config.parallel_config.data_parallel_size > 1:
            raise EngineStartError(
                "engineArgs: --api-server-count above 1 goes with --data-parallel-size 1 only"
            )
        addresses.inputs.extend(share.input_address for share in shares)
        addresses.outputs.extend(share.output_address for share in shares)
        return launch(config, executor, log_stats, addresses)

    core_client.launch_core_engines = launch_for_all
    try:
        yield
    finally:
        core_client.launch_core_engines = launch


def make_client(args: Any, share: Share) -> Any:
    """An ``AsyncLLM`` on a core that another process has started, or is about to start: blocks
    until it has.
    """
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    context = UsageContext.ENGINE_CONTEXT
    return AsyncLLM.from_vllm_config(
        args.create_engine_config(context),
        usage_context=context,
        disable_log_stats=args.disable_log_stats,
        client_addresses={
            "input_address": share.input_address,
            "output_address": share.output_address,
        },
        client_count=share.count,
        client_index=share.index,
    )
