"""docs/trainers.md: its examples do what they say, and it leaves nothing out."""

import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout_client import trainer
from rollout_client.trainer import AdapterError, ServerAdapter
from tests.support import docs
from tests.support.local_pods import local_pods

PAGE = (docs.FOLDER / "trainers.md").read_text()


async def test_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"layers.{i}.weight": torch.randn(16, 16) for i in range(4)}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    examples = docs.blocks("trainers.md", "python")
    assert len(examples) == 2
    async with local_pods(expected=tensors) as (pod,):
        for code, version in zip(examples, ("step-3", "renamed"), strict=True):
            here = f'"{pod.run_dir}", "{pod.url}"'
            await docs.run_block(code.replace('"/tmp/rollout"', here))
            assert pod.state.weight_version == version


def test_every_call_and_every_error_is_told() -> None:
    for name, member in inspect.getmembers(ServerAdapter, callable):
        if not name.startswith("_") and name != "aclose":
            assert f"`{name}(" in PAGE, member
    for name in trainer.__all__:
        kind = getattr(trainer, name)
        if isinstance(kind, type) and issubclass(kind, AdapterError) and kind is not AdapterError:
            assert f"`{name}`" in PAGE, name


def test_examples_that_are_not_run_compile() -> None:
    for code in docs.blocks("trainers.md", "python no-test"):
        compile(code, "trainers.md", "exec", flags=0x2000)  # may await
