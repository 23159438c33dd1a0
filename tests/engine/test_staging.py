"""The worker's part of staging ``Device``, with vLLM's real reload and a GPU that is none."""

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollout_pod.engine.device_slot import Staging
from rollout_pod.engine.fast import FastLoader
from rollout_pod.engine.layerwise import LayerwiseLoader
from rollout_pod.weights.fill import spec_of
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.shadow import Shadow

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def load_weights(self, weights: Any) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], tensor)
            loaded.add(name)
        return loaded


class Quantised:
    """A method of vLLM that is not known to leave weights as they are."""


class Worker:
    """The worker extension with a model, a slot, and a receiver that notes what it is to load."""

    def __init__(self) -> None:
        from vllm.config import DeviceConfig, VllmConfig
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        from rollout_pod.engine.worker import RolloutWorker

        self.model = Model()
        record_metadata_for_reloading(self.model)
        names = frozenset(name for name, _ in self.model.named_parameters())
        reference = LayerwiseLoader(
            model=self.model,
            vllm_config=VllmConfig(device_config=DeviceConfig(device="cpu")),
            boot_parameters=names,
            on_cpu=True,
        )
        self.fast = FastLoader(model=self.model, reference=reference, device=None)
        self.begun: list[str] = []
        self.loading, self.goes_on = threading.Event(), threading.Event()
        self.extension = RolloutWorker()

    def load(self, session: str, *_: Any, **__: Any) -> Any:
        """Of the receiver."""
        self.begun.append(session)
        self.loading.set()
        self.goes_on.wait(20)
        return SimpleNamespace(ok=True)

    def update(self) -> None:
        """The ordinary way."""
        tensors = {name: torch.rand(4, 4) for name, _ in self.model.named_parameters()}
        specs = tuple(spec_of(name, tensor) for name, tensor in tensors.items())
        self.fast.prepare(Manifest("v", specs))
        self.fast.begin()
        self.fast.load(list(tensors.items()))
        self.fast.finish()

    def stage(self, session: str) -> str:
        return self.extension.rollout_stage_weights(session, "v", 5)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    made = Worker()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    made.extension._rollout_staging = Staging(Shadow(0, 0), made.fast, made)  # type: ignore[arg-type]
    return made


def test_what_cannot_wait_is_refused_before_it_is_begun(worker: Worker) -> None:
    assert "the first update goes the ordinary way" in worker.stage("first")
    worker.update()
    assert worker.stage("second") == ""
    assert worker.loading.wait(20)
    assert worker.stage("third") == "another version is being staged"
    worker.goes_on.set()
    worker.extension._rollout_staging.close()
    worker.model.left.weight.data = worker.model.left.weight.data.clone()  # it moved
    assert "the first update goes the ordinary way" in worker.stage("fourth")
    assert worker.begun == ["second"]


def test_a_layer_that_is_not_loaded_by_copies_is_named(worker: Worker) -> None:
    worker.model.right.quant_method = Quantised()  # type: ignore[assignment]
    worker.update()
    why = worker.stage("second")
    assert "not all layers of this model are loaded by copies: 1 x Linear: Quantised" in why
    assert worker.begun == []


def test_a_load_that_could_not_be_judged_is_told(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("unseen")

    monkeypatch.setattr("rollout_pod.engine.fast.survey", broken)
    worker.update()
    assert worker.stage("second") == "the load cannot be replayed: KeyError: 'unseen'"
    assert worker.begun == []
