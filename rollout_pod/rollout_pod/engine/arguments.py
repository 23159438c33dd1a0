"""The engine's command line (``spec.engineArgs``), by vLLM's own parser, with our defaults."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from rollout_pod.engine.base import EngineSettings, EngineStartError, Node
from rollout_pod.engine.orphan import SERVER_PID
from rollout_pod.engine.sleep_mode import can_sleep

STAGING = "ROLLOUT_POD_STAGING"
"""Environment of the engine's processes: ``EngineSettings.staging``."""

RUN_DIR = "ROLLOUT_POD_RUN_DIR"
"""The same of an engine that spans machines: this node's ``EngineSettings.run_dir``."""

WORKER_EXTENSION = "rollout_pod.engine.worker.RolloutWorker"

_CPU_KV_BYTES = 256 << 20


_FRONT_END = frozenset(
    {
        "chat_template",
        "chat_template_content_format",
        "trust_request_chat_template",
        "default_chat_template_kwargs",
        "response_role",
        "return_tokens_as_token_ids",
        "enable_auto_tool_choice",
        "exclude_tools_when_tool_choice_none",
        "tool_call_parser",
        "tool_parser_plugin",
        "tool_strict_level",
        "enable_prompt_tokens_details",
        "enable_force_include_usage",
        "sse_keep_alive_interval",
        "lora_modules",
    }
)
"""What vLLM's OpenAI server may be told; its sockets, keys and other routes are not ours."""


def parse(settings: EngineSettings) -> tuple[Any, Any]:
    """Make vLLM's ``AsyncEngineArgs`` of the settings, and the arguments of its OpenAI server.

    Log-probs are those of the distribution that was sampled, and sampling defaults are vLLM's, not
    the model's, unless the arguments say otherwise. Imports vLLM, which takes seconds.

    Raises:
        EngineStartError: unknown or refused argument, or a model folder that is none.
    """
    check_model(settings.model)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from rollout_pod.engine.openai.compat import front_end_args

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM is untyped here
        def error(self, message: str) -> NoReturn:
            raise EngineStartError(f"engineArgs: {message}")

    parser = AsyncEngineArgs.add_cli_args(Parser(add_help=False, allow_abbrev=False))
    parser = front_end_args().add_cli_args(parser)
    served = settings.served_model_name or settings.model
    parser.set_defaults(
        model=settings.model,
        served_model_name=[served],
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        worker_extension_cls=WORKER_EXTENSION,
    )
    if current_platform.is_cpu():
        if settings.staging == "Device":
            raise EngineStartError("weights.staging Device needs a GPU; use Host")
        parser.set_defaults(enforce_eager=True)
    _place(parser, settings)
    if can_sleep():
        parser.set_defaults(enable_sleep_mode=True)  # so that a sleep needs no restart
    try:
        namespace = parser.parse_args(list(settings.args))
    except (ValueError, TypeError) as error:
        raise EngineStartError(f"engineArgs: {error}") from error
    _refuse_ours(namespace, settings)
    _check_place(namespace, settings.node)
    _refuse_servers(parser, namespace, [f.name for f in fields(front_end_args())])
    if current_platform.is_cpu():
        _apply_cpu_defaults(namespace, parser.get_default("gpu_memory_utilization"))
    try:
        return AsyncEngineArgs.from_cli_args(namespace), namespace
    except (ValueError, TypeError) as error:
        raise EngineStartError(f"engineArgs: {error}") from error


def check_model(model: str) -> None:
    """Refuse early what vLLM would take for the name of a repository.

    Raises:
        EngineStartError: it looks like a folder and is none, or holds no model.
    """
    path = Path(model)
    if not path.is_absolute() and not model.startswith("."):
        return
    if not path.exists():
        raise EngineStartError(f"model: {model} does not exist")
    if path.is_dir() and not any((path / name).exists() for name in ("config.json", "params.json")):
        raise EngineStartError(f"model: {model} holds no config.json")


@contextmanager
def environment(args: Any, settings: EngineSettings, sockets: Path | None) -> Iterator[None]:
    """Set the environment of the processes started inside; what is set already wins.

    Args:
        args: The engine's.
        settings: The pod's.
        sockets: The folder for those of its processes, where there is one.
    """
    variables = {**_variables(args, sockets), STAGING: settings.staging}
    if settings.node is not None:
        variables[RUN_DIR] = str(settings.run_dir.absolute())
        if "VLLM_HOST_IP" not in os.environ:
            variables["VLLM_HOST_IP"] = settings.node.host
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def read_environment(*, anew: bool) -> None:
    """Whether vLLM reads its variables each time, as while an engine starts, or once and for all,
    as its other processes do afterwards: it looks one up for each token that it puts out, a tenth
    of what a token costs this process.
    """
    from vllm import envs

    if anew:
        envs.disable_envs_cache()
    else:
        envs.enable_envs_cache()


def _variables(args: Any, sockets: Path | None) -> Mapping[str, str]:
    from vllm.platforms import current_platform

    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        # How long a load may take is the startup probe's business.
        "VLLM_ENGINE_READY_TIMEOUT_S": "86400",
    }
    if sockets is not None:
        wanted["VLLM_RPC_BASE_PATH"] = str(sockets)
    if current_platform.is_cpu():
        if args.enforce_eager:
            # Two samplers are compiled even in eager mode: a first request of 25 s.
            wanted["TORCH_COMPILE_DISABLE"] = "1"
        if args.distributed_executor_backend == "uni":
            # The engine core is a process of its own nevertheless; the worker lives inside it.
            # Its threads are not bound to cores then, and more than one slows a small model.
            wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            wanted["OMP_NUM_THREADS"] = "1"
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    return {**missing, SERVER_PID: str(os.getpid())}


def _refuse_ours(namespace: Any, settings: EngineSettings) -> None:
    """What the pod itself sets cannot be another's: its weight updates would not work."""
    for name, ours, why in (
        ("model", settings.model, "name the model in spec.model"),
        ("worker_extension_cls", WORKER_EXTENSION, "weight updates need the pod's own"),
    ):
        if getattr(namespace, name) != ours:
            option = "--" + name.replace("_", "-")
            raise EngineStartError(f"engineArgs: {option} cannot be set; {why}")
    if getattr(namespace, "stream_interval", 1) > 1:  # versions are noted as tokens come
        raise EngineStartError(
            "engineArgs: --stream-interval must be 1; leave it out, the pod itself puts together "
            "what a stream's reader is too slow for"
        )
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        if getattr(namespace, name, None) is not None:
            # those that a pause cut come back all at once, and would lose what they hold
            raise EngineStartError(
                f"engineArgs: --{name.replace('_', '-')} cannot be set; bound the requests in "
                "flight where they are sent, or add replicas"
            )


def _place(parser: Any, settings: EngineSettings) -> None:
    """Where this node's ranks are among all.

    Raises:
        EngineStartError: this vLLM knows no nodes.
    """
    node = settings.node
    if node is None:
        return
    if not any("--nnodes" in action.option_strings for action in parser._actions):
        raise EngineStartError("nodes above 1 need a vLLM that knows --nnodes")
    if settings.staging == "Device":
        raise EngineStartError("weights.staging Device works on one node only; use Host")
    parser.set_defaults(
        nnodes=node.count,
        node_rank=node.rank,
        master_addr=node.head,
        master_port=node.port,
        distributed_executor_backend="mp",
    )


def _check_place(namespace: Any, node: Node | None) -> None:
    if getattr(namespace, "nnodes", 1) != (node.count if node else 1):
        raise EngineStartError("engineArgs: --nnodes cannot be set; set spec.nodes")
    if node is None:
        return
    for name, ours in (
        ("node_rank", node.rank),
        ("master_addr", node.head),
        ("master_port", node.port),
        ("distributed_executor_backend", "mp"),
    ):
        if getattr(namespace, name) != ours:
            option = "--" + name.replace("_", "-")
            raise EngineStartError(f"engineArgs: {option} cannot be set with nodes above 1")
    if namespace.data_parallel_size > 1:
        raise EngineStartError(
            "engineArgs: --data-parallel-size above 1 works on one node only; make more replicas"
        )
    ranks = namespace.tensor_parallel_size * namespace.pipeline_parallel_size
    if ranks % node.count:
        raise EngineStartError(
            f"engineArgs: --tensor-parallel-size x --pipeline-parallel-size is {ranks}: with "
            f"{node.count} nodes it must be a multiple of that"
        )


def _refuse_servers(parser: Any, namespace: Any, names: Iterable[str]) -> None:
    for name in sorted(set(names) - _FRONT_END):
        if getattr(namespace, name) != parser.get_default(name):
            option = "--" + name.replace("_", "-")
            raise EngineStartError(
                f"engineArgs: {option} is of vLLM's own HTTP server, which does not run here"
            )
    if namespace.enable_auto_tool_choice and not namespace.tool_call_parser:
        raise EngineStartError("engineArgs: --enable-auto-tool-choice needs --tool-call-parser")


def _apply_cpu_defaults(namespace: Any, default_utilization: float) -> None:
    if (
        namespace.kv_cache_memory_bytes is None
        and namespace.gpu_memory_utilization == default_utilization
        and not os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    ):
        # vLLM would take most of the host's memory.
        namespace.kv_cache_memory_bytes = _CPU_KV_BYTES
    if namespace.enable_lora:
        # vLLM's CPU kernels take the last slot for requests that name no adapter: it stays empty.
        namespace.max_loras = max(namespace.max_loras, len(namespace.lora_modules or ()) + 1)
    if (
        namespace.distributed_executor_backend is None
        and namespace.tensor_parallel_size
        * namespace.pipeline_parallel_size
        * namespace.data_parallel_size
        == 1
        and "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    ):
        namespace.distributed_executor_backend = "uni"
