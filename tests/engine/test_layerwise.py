"""The loader alone, with vLLM's real reload and a model of two layers."""

import pytest
import torch
from torch import nn

from rollout_pod.engine.layerwise import IncompleteLoadError, LayerwiseLoader

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

OLD = {"norm.weight": 1.0, "proj.left": 2.0, "proj.right": 3.0}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.empty(4))
        self.right = nn.Parameter(torch.empty(4, 4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, bias=False)
        self.proj = Pair()
        for name, parameter in self.named_parameters():
            parameter.data.fill_(OLD[name])

    def load_weights(self, weights):
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name not in parameters:
                continue
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], tensor)
            loaded.add(name)
        return loaded

    def values(self) -> dict[str, float]:
        found = {}
        for name, parameter in self.named_parameters():
            assert parameter.unique().numel() == 1, name
            found[name] = parameter.unique().item()
        return found


@pytest.fixture
def model():
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model()
    record_metadata_for_reloading(model)
    return model


@pytest.fixture
def loader(model):
    from vllm.config import DeviceConfig, VllmConfig

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    return LayerwiseLoader(
        model=model, vllm_config=config, boot_parameters=frozenset(OLD), on_cpu=False
    )


def whole(value: float) -> list[tuple[str, torch.Tensor]]:
    shapes = {name: p.shape for name, p in Model().named_parameters()}
    return [(name, torch.full(shape, value)) for name, shape in shapes.items()]


def test_all_is_loaded_where_it_was(model, loader):
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    loader.begin()
    for each in reversed(whole(9.0)):
        loader.load([each])
        each[1].zero_()  # the receiver's memory is used again
    loader.finish()
    assert set(model.values().values()) == {9.0}
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places


def test_a_parameter_that_got_nothing_is_an_error(loader):
    loader.begin()
    loader.load([(name, t) for name, t in whole(9.0) if name != "proj.left"])
    with pytest.raises(IncompleteLoadError, match=r"1 parameters .*: proj\.left"):
        loader.finish()


def test_a_load_before_does_not_count(loader):
    loader.begin()
    loader.load(whole(9.0))
    loader.finish()
    loader.begin()
    with pytest.raises(IncompleteLoadError, match="3 parameters"):
        loader.finish()


def test_a_flush_drops_the_tensor_that_failed_and_half_layers(model, loader):
    loader.begin()
    loader.load([("norm.weight", torch.full((4,), 9.0))])
    loader.load([("proj.left", torch.full((4,), 9.0))])
    with pytest.raises(AssertionError):
        loader.load([("proj.right", torch.ones(2, 3))])
    loader.flush()
    assert model.values() == OLD | {"norm.weight": 9.0}
    loader.begin()
    loader.load(whole(7.0))
    loader.finish()
    assert set(model.values().values()) == {7.0}


def test_a_flush_of_nothing_is_no_harm(model, loader):
    loader.flush()
    assert model.values() == OLD
