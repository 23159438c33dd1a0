"""Which tensors the replaying loader takes as pieces."""

from typing import Any, cast

import pytest
import torch

from rollout_pod.engine.fast import FastLoader
from rollout_pod.engine.survey import Survey
from rollout_pod.weights.copies import Copy, CopyPlan
from rollout_pod.weights.manifest import Manifest
from rollout_pod.weights.spec import TensorSpec

NAMES = ("embed", "other")


def prepared(aliases: tuple[tuple[str, str], ...], fast: set[str]) -> frozenset[str]:
    """What a loader takes as pieces, whose survey found only these names to come by copies."""
    tensors = tuple(TensorSpec(name, "float32", (1,), 4) for name in NAMES)
    manifest = Manifest("step-1", tensors, aliases)
    model = torch.nn.Linear(1, 1)
    loader = FastLoader(model=model, reference=cast("Any", None), device=None)
    copies = {name: (Copy(0, 0, 4),) for name in fast}
    plan = CopyPlan(copies=copies, full=False, reasons=("1 x Head: processes weights",))
    loader._survey = Survey(plan, layers=(model,), parameters=frozenset(), places=())
    loader._for = manifest.names.union(alias for alias, _ in aliases)
    found = loader.prepare(manifest)
    assert loader.summary()[0] == "mixed"
    return found


@pytest.mark.parametrize(
    ("aliases", "fast", "pieces"),
    [
        ((), {"embed", "other"}, {"embed", "other"}),
        ((("head", "embed"),), {"embed", "head", "other"}, {"embed", "other"}),
        ((("head", "embed"),), {"head", "other"}, {"other"}),
        ((("head", "embed"),), {"embed", "other"}, {"other"}),
        ((("tail", "embed"), ("head", "embed")), {"embed", "tail", "other"}, {"other"}),
    ],
)
def test_a_tensor_comes_one_way_under_all_of_its_names(aliases, fast, pieces) -> None:
    assert prepared(aliases, fast) == pieces
