"""The migration page names each public method of the classes of verl that it replaces."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "migration-from-verl.md"


def package() -> Path:
    found = importlib.util.find_spec("verl")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def methods_of(path: Path, name: str) -> set[str]:
    """The public methods that the class itself defines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                item.name
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
                and not item.name.startswith("_")
            }
    raise AssertionError(f"{path} has no class {name}")


CLASSES = [
    ("workers/rollout/base.py", "BaseRollout"),
    ("workers/rollout/replica.py", "RolloutReplica"),
    ("workers/rollout/vllm_rollout/bucketed_weight_transfer.py", "BucketedWeightSender"),
    ("workers/rollout/vllm_rollout/bucketed_weight_transfer.py", "BucketedWeightReceiver"),
    ("workers/rollout/vllm_rollout/vllm_rollout.py", "ServerAdapter"),
    ("workers/rollout/vllm_rollout/vllm_async_server.py", "vLLMHttpServer"),
    ("workers/rollout/vllm_rollout/vllm_async_server.py", "vLLMReplica"),
    ("checkpoint_engine/base.py", "CheckpointEngineManager"),
]


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_the_page_names_what_a_user_of_verl_calls(module: str, name: str) -> None:
    page = PAGE.read_text()
    assert name in page
    missing = {method for method in methods_of(package() / module, name) if method not in page}
    assert not missing
