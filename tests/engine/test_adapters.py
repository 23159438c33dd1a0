"""The pod's own copies of LoRA adapters; what an engine does with them is in ``test_request.py``."""

import errno
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_pod.engine import adapters
from rollout_pod.engine.base import EngineSettings, EngineStartError, Node, Share
from rollout_pod.engine.vllm import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@dataclass
class Module:
    """As vLLM's ``LoRAModulePath``."""

    name: str
    path: str
    is_3d_lora_weight: bool = False


def make(folder: Path, content: str = "weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(content)
    return folder


def found(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): f.read_text() for f in folder.rglob("*") if f.is_file()}


def test_they_are_copied_where_the_requests_look(tmp_path: Path) -> None:
    given = [
        Module("a", str(make(tmp_path / "a"))),
        Module("b", str(make(tmp_path / "b", "other"))),
    ]
    (run := tmp_path / "run").mkdir()
    adapters.copy(given, run)
    requests = adapters.requests_of(adapters.moved(given, run), enabled=True)
    assert {n: (r.lora_int_id, r.lora_path) for n, r in requests.items()} == {
        "a": (1, f"{run}/lora-copies/1"), "b": (2, f"{run}/lora-copies/2"),
    }  # fmt: skip
    assert [module.path for module in given] == [f"{tmp_path}/a", f"{tmp_path}/b"]
    for module in given:
        assert found(Path(requests[module.name].lora_path)) == found(Path(module.path))
    adapters.copy([given[1]], run)  # a later start
    assert found(run / "lora-copies") == {f"1/{n}": t for n, t in found(tmp_path / "b").items()}
    assert (run / "lora-copies").stat().st_mode & 0o777 == 0o700
    adapters.remove(run)
    assert list(run.iterdir()) == []
    adapters.copy(None, run)
    assert (list(run.iterdir()), adapters.moved(None, run)) == ([], None)


def test_adapters_that_lie_in_the_run_folder_stay(tmp_path: Path) -> None:
    """It is mounted in every container of the pod: they may write there."""
    given = make(tmp_path / "adapters" / "style")
    adapters.copy([Module("style", str(given))], tmp_path)
    adapters.remove(tmp_path)
    assert found(given).keys() == {"adapter_config.json", "adapter_model.safetensors"}


def test_what_is_copied(tmp_path: Path) -> None:
    """What a link names, as in Hugging Face's cache; nothing of what may lie beside an adapter."""
    blobs = make(tmp_path / "blobs")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "optimizer.pt").write_text("large")
    (folder / "model.safetensors").write_text("larger")
    os.mkfifo(folder / "adapter_pipe")
    (folder / "adapter_loop").symlink_to(folder)
    adapters.copy([Module("a", str(folder))], tmp_path)
    copy = tmp_path / "lora-copies" / "1"
    assert found(copy) == found(blobs)
    assert not any(file.is_symlink() for file in copy.iterdir())


def test_what_cannot_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(EngineStartError) as caught:
            adapters.copy([Module("style", str(path))], tmp_path)
        assert str(caught.value).startswith("engineArgs: --lora-modules style: ")
        return str(caught.value)

    assert f"{tmp_path}/gone is no folder, and could not be fetched" in refused(tmp_path / "gone")
    bare = make(tmp_path / "bare")
    (bare / "adapter_model.safetensors").unlink()
    assert f"{bare} holds no adapter_model" in refused(bare)
    (bare / "adapter_config.json").unlink()
    assert f"{bare} holds no adapter_config.json" in refused(bare)

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    assert "No space left on device" in refused(make(tmp_path / "whole"))


@pytest.mark.parametrize("where", ["steers", "front end", "node"])
def test_who_copies_and_who_reads_what(tmp_path: Path, where: str) -> None:
    folder, run = make(tmp_path / "a"), tmp_path / "run"
    settings = EngineSettings(model="m", run_dir=run)
    if where == "node":
        node = Node(rank=0, count=2, host="h", head="h", port=1)
        settings = replace(settings, node=node)
    engine = VllmEngine(settings)
    if where == "front end":
        engine._share = Share(index=1, count=2, input_address="i", output_address="o")
    args: Any = SimpleNamespace(lora_modules=[Module("a", str(folder))])
    requests = engine._keep_adapters(args, enabled=True)
    path = str(folder) if where == "node" else f"{run}/lora-copies/1"
    assert requests["a"].lora_path == args.lora_modules[0].path == path
    assert (run / "lora-copies").exists() == (where == "steers")
