"""Where vLLM keeps its OpenAI server: the one place that knows how versions differ."""

from typing import Any


def front_end_args() -> Any:
    """The class that declares the server's command line."""
    try:
        from vllm.entrypoints.launchers.cli_args import FrontendArgs
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.cli_args import FrontendArgs
    return FrontendArgs


def app_builders() -> tuple[Any, Any]:
    """``build_app`` and ``init_app_state``."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
    return build_app, init_app_state


def import_tool_parser(path: str) -> None:
    """Let a file register its tool parsers."""
    from vllm.tool_parsers import ToolParserManager

    ToolParserManager.import_tool_parser(path)
