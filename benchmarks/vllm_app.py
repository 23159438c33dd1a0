"""vLLM's own server over the engine of a pod, in the pod's process: what differs is the server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

from benchmarks.pod import MeasuredModel, MeasuredPod
from rollout_pod.engine.openai.compat import app_builders, front_end_args
from rollout_pod.serve import Server, bind
from tests.support.process import free_port


@asynccontextmanager
async def vllm_app(pod: MeasuredPod, model: MeasuredModel) -> AsyncIterator[str]:
    """Serves its token route; yields the address. Nothing passes the pod's gate."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = front_end_args().add_cli_args(AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()))
    args = parser.parse_args([f"--model={model.path}", *model.args, "--tokens-only"])
    llm = pod.engine._llm
    args.structured_outputs_config = llm.vllm_config.structured_outputs_config
    build_app, init_app_state = app_builders()
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    app.state.server = SimpleNamespace(should_exit=False)  # its handlers end it with the engine
    port = free_port()
    server = Server(app, bind(("127.0.0.1", port)))
    serving = asyncio.create_task(server.run_until_exit())
    try:
        async with app.router.lifespan_context(app):
            while not server.started:
                if serving.done():
                    serving.result()
                await asyncio.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
            server.should_exit = True
            await serving
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
