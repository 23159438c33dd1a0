"""One engine a module: to start one takes longer than all that is done with it."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollout_pod.engine.vllm import VllmEngine
from tests.support.engine_kit import checkpoint, running

_FIRST = (
    "test_tied.py", "test_tensor_parallel.py",
    "test_process.py", "test_push.py", "test_openai.py", "test_trainer.py",
)  # fmt: skip
"""In a process in which the whole tier had run before, transformers and a fresh engine differed on
a tied model. Alone or first they agree; what is left behind that does it is not known yet. Then the
longest ones, so that two workers end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    # Importing vLLM and its dependencies warns; nothing of it is ours to mend.
    for item in items:
        if "tests/engine/" in str(item.path):
            for ignored in (
                "ignore:.*torch.jit.script.*:DeprecationWarning",
                "ignore::DeprecationWarning:vllm.*",
                "ignore::FutureWarning:vllm.*",
            ):
                item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[VllmEngine]:
    """A running engine of the module's ``KIND``, seed 0, with its ``ARGS``."""
    module = request.module
    async with running(checkpoint(module.KIND, 0), *getattr(module, "ARGS", ())) as started:
        yield started
