"""vLLM's own server app on the gated client: the routes of the allow-list, nothing else of it."""

import logging
import traceback
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from rollout_pod.engine.base import EngineDeadError
from rollout_pod.engine.front_end import ROUTES, App, NoFrontEnd
from rollout_pod.engine.lifeline import Lifeline, words_of
from rollout_pod.engine.openai.client import GatedClient
from rollout_pod.engine.openai.compat import app_builders, import_tool_parser

log = logging.getLogger(__name__)

_TASKS_S = 5.0


class FrontEnd:
    """Made with the engine, started and closed with it.

    A server that cannot start takes no rollouts with it: its routes say why.
    """

    def __init__(self, lifeline: Lifeline) -> None:
        self._lifeline = lifeline
        self._why_not = "the engine has not started yet"
        self._args: Any = None
        self._app: Any = None
        self._client: GatedClient | None = None
        self._lifespan = AsyncExitStack()

    def prepare(self, args: Any, model_config: Any) -> None:
        """All that takes long and needs no event loop. Not on its thread."""
        if model_config.skip_tokenizer_init:
            self._why_not = "the engine runs with --skip-tokenizer-init: send token ids instead"
            return
        try:
            app_builders()
            if args.tool_parser_plugin:
                import_tool_parser(args.tool_parser_plugin)
        except Exception as error:
            self._fail(error)
            return
        self._args = args

    async def start(self, llm: Any) -> None:
        """Make the app and enter its lifespan. Where that fails, ``app`` says why."""
        if self._args is None:
            return
        client = GatedClient(llm)
        try:
            self._app = await self._make(llm, client)
        except EngineDeadError:
            raise
        except Exception as error:
            self._fail(error)
            return
        self._client = client

    def app(self) -> App:
        """The app.

        Raises:
            NoFrontEnd: there is none; the message says why.
        """
        if self._app is None:
            raise NoFrontEnd(self._why_not)
        app: App = self._app
        return app

    async def close(self) -> None:
        """Leave the lifespan. Idempotent; never raises."""
        app, self._app, self._why_not = self._app, None, "the engine was shut down"
        try:
            await self._lifespan.aclose()
            if self._client and app is not None:
                await self._client.close(timeout_s=_TASKS_S)
        except Exception:
            log.exception("vLLM's server did not end well")

    async def _make(self, llm: Any, client: GatedClient) -> Any:
        build_app, init_app_state = app_builders()
        tasks = await self._lifeline.call(llm.get_supported_tasks(), "list its tasks", 60.0)
        args = self._args
        # what the engine made of --reasoning-parser and its like
        args.structured_outputs_config = llm.vllm_config.structured_outputs_config
        app = build_app(args, tasks, llm.model_config)
        app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") in ROUTES]
        for kind in (AttributeError, KeyError):  # vLLM does it for TypeError
            app.add_exception_handler(kind, _misread)
        app.middleware_stack = app.build_middleware_stack()  # it had been built already
        await init_app_state(client, app.state, args, tasks)
        # its handlers would end the server of a dead engine; ours has its own supervisor
        app.state.server = SimpleNamespace(should_exit=False)
        await self._lifespan.enter_async_context(app.router.lifespan_context(app))
        return app

    def _fail(self, error: Exception) -> None:
        self._why_not = f"vLLM's server did not start: {type(error).__name__}: {words_of(error)}"
        log.error("no OpenAI routes: %s", self._why_not, exc_info=error)


async def _misread(_: Request, error: Exception) -> JSONResponse:
    """The request models of vLLM look into values before their types are checked, and trip over
    others: that is the caller's mistake. All else stays what it is.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not any(frame.filename.endswith("/protocol.py") for frame in frames):
        raise error
    told = {
        "message": f"a field has a value of another type than its own: {error}",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    return JSONResponse({"error": told}, 400)
