"""Which layers a recorded load may be replayed for."""

import torch

from rollout_pod.engine.survey import Survey, survey
from rollout_pod.weights.recording import Recorder


class UnquantizedLinearMethod:
    """Of vLLM, by its name."""


class Linear(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.quant_method = UnquantizedLinearMethod()


class Latent(torch.nn.Module):
    """Attention that keeps a product of its projection."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = Linear()

    def process_weights_after_loading(self, _: torch.dtype) -> None:
        self.product = self.kv_b_proj.weight.detach() * 2


class Model(torch.nn.Module):
    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.o_proj = Linear()


def recorded(model: torch.nn.Module) -> Survey:
    given = {name: torch.rand(4, 4) for name, _ in model.named_parameters()}
    loaded_in = {}
    with Recorder() as recorder, torch.no_grad():
        for name, tensor in given.items():
            recorder.source(name, tensor)
            model.get_parameter(name).copy_(tensor)
            loaded_in[model.get_submodule(name.rpartition(".")[0])] = {name}
    return survey(model, recorder, list(given), loaded_in)


def test_plain_layers_are_replayed() -> None:
    found = recorded(Model(Linear()))
    assert found.plan.copies.keys() == {"attention.weight", "o_proj.weight"}
    assert (found.layers, found.plan.full, found.plan.reasons) == ((), True, ())


def test_what_attention_computes_something_of_keeps_the_loaders() -> None:
    model = Model(Latent())
    found = recorded(model)
    assert found.plan.copies.keys() == {"o_proj.weight"}
    assert set(found.layers) == {model.attention, model.attention.kv_b_proj}
    assert found.plan.reasons == ("1 x Linear: Latent computes something of it",)
    assert not found.plan.full
    assert found.parameters == {"o_proj.weight"}
