"""Which layers of a model can be loaded by copies alone, of a load that was recorded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rollout_pod.weights.copies import Copy, CopyPlan, uncovered
from rollout_pod.weights.recording import Recorder

PLAIN_METHODS: Final = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
)
"""What vLLM processes nothing for on a GPU. Any other may compute what no dispatcher sees."""


@dataclass(frozen=True)
class Survey:
    """What a recorded load allows.

    Args:
        plan: for tensors that need no loader.
        layers: those that do; all that processes weights of other layers is among them.
        parameters: in the model's names, of layers that do not.
        places: where the plan writes: module, name, address of each tensor.
    """

    plan: CopyPlan
    layers: tuple[torch.nn.Module, ...]
    parameters: frozenset[str]
    places: tuple[tuple[torch.nn.Module, str, int], ...]

    def in_place(self) -> bool:
        """Whether every tensor that the plan writes to is where it was."""
        return all(
            (tensor := own_tensors(module).get(name)) is not None and tensor.data_ptr() == address
            for module, name, address in self.places
        )


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the module itself."""
    both = (*module._parameters.items(), *module._buffers.items())
    return {name: tensor for name, tensor in both if tensor is not None}


def survey(
    model: torch.nn.Module,
    recorder: Recorder,
    names: Sequence[str],
    loaded_in: Mapping[torch.nn.Module, set[str]],
) -> Survey:
    """Judge a load that has ended.

    Args:
        model: As the load left it.
        recorder: That watched it.
        names: Of the checkpoint, all that were given.
        loaded_in: Which names went through the loaders of which layer.
    """
    copies: dict[str, list[Copy]] = {name: [] for name in names}
    layers: dict[torch.nn.Module, set[str]] = {m: set(found) for m, found in loaded_in.items()}
    arrived: dict[torch.nn.Module, set[str]] = {}
    seen: set[int] = set()
    for _, module, tensor in _tensors(model):
        base = tensor.untyped_storage().data_ptr()
        slices = recorder.slices_in(tensor)
        for each in slices:
            layers.setdefault(module, set()).add(each.name)
            arrived.setdefault(module, set()).add(each.name)
            if base not in seen:
                copies[each.name].extend(c._replace(target=c.target + base) for c in each.copies)
        seen.add(base)

    slow: dict[torch.nn.Module, str] = {}
    users = _users(model)
    for module, found in layers.items():
        why = _why_slow(module, found, arrived.get(module, set()), recorder)
        if not why and module in users:
            why = f"{type(module).__name__}: {users[module]} computes something of it"
        if why:
            slow[module] = why
    known = set().union(*layers.values()) if layers else set()
    lost = [name for name in recorder.impure if name not in known]
    if lost:
        # something was made of it, and nobody knows for which layer
        why = f"{lost[0]}: {recorder.impure[lost[0]]}"
        slow = dict.fromkeys(model.modules(), why)
    slow_names = _spread(layers, slow)
    if lost:
        slow_names = set(names)

    plan_copies = {n: tuple(copies[n]) for n in names if n not in slow_names}
    owners = {module for module in layers if module not in slow}
    tensors = [(path, m, t) for path, m, t in _tensors(model) if m in owners]
    ranges = {
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in model.parameters()
    }
    everything = [copy for each in plan_copies.values() for copy in each]
    return Survey(
        plan=CopyPlan(
            copies=plan_copies,
            full=not slow and uncovered(sorted(ranges), everything) == 0,
            reasons=_reasons(slow),
        ),
        layers=tuple(m for m in model.modules() if m in slow or _processes(m)) if slow else (),
        # the layers that an engine with adapters wraps keep their names in what it says of a load
        parameters=frozenset(path.replace(".base_layer.", ".") for path, _, _ in tensors),
        places=tuple((m, path.rpartition(".")[2], t.data_ptr()) for path, m, t in tensors),
    )


def _why_slow(
    module: torch.nn.Module, names: set[str], arrived: set[str], recorder: Recorder
) -> str:
    method = getattr(module, "quant_method", None)
    if method is not None and type(method).__name__ not in PLAIN_METHODS:
        return f"{type(module).__name__}: {type(method).__name__} processes weights"
    if _processes(module):
        return f"{type(module).__name__} processes weights"
    for name in sorted(names):
        if name in recorder.impure:
            return f"{type(module).__name__}: {recorder.impure[name]}"
    if names - arrived:
        return f"{type(module).__name__}: bytes were not seen to arrive"
    return ""


def _spread(
    layers: Mapping[torch.nn.Module, set[str]], slow: dict[torch.nn.Module, str]
) -> set[str]:
    """A loader that gets one tensor of a layer must get all, and those of other layers that the
    same tensors go to. Adds to ``slow``; returns the names.
    """
    names: set[str] = set()
    while True:
        for module in slow:
            names |= layers.get(module, set())
        more = [m for m, found in layers.items() if m not in slow and found & names]
        if not more:
            return names
        for module in more:
            slow[module] = f"{type(module).__name__}: shares tensors with such a layer"


def _reasons(slow: Mapping[torch.nn.Module, str]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for why in slow.values():
        counts[why] = counts.get(why, 0) + 1
    return tuple(f"{count} x {why}" for why, count in counts.items())


def _processes(module: torch.nn.Module) -> bool:
    """Attention: its method is called once everything else is loaded."""
    return callable(getattr(module, "process_weights_after_loading", None))


def _users(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Layers inside of one that processes weights: what it keeps of theirs may be no view of them
    (multi-head latent attention splits a projection). By what.
    """
    return {
        inner: type(module).__name__
        for module in model.modules()
        if _processes(module)
        for inner in module.modules()
        if inner is not module
    }


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Any, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, tensor in own_tensors(module).items():
            if tensor.numel() and not tensor.is_meta:
                yield (f"{prefix}.{name}" if prefix else name), module, tensor
