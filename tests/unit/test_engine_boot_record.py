"""What a boot load was given, used or not, and what an update has to bring."""

import torch

from rollout_pod.engine.boot_record import BootRecord, _Touches, expected, spec_of
from rollout_pod.weights.loader import TensorSpec

WEIGHTS = {
    "model.embed_tokens.weight": torch.ones(4, 2),
    "model.norm.weight": torch.ones(2, dtype=torch.bfloat16),
    "rotary.inv_freq": torch.ones(1),
}


def record_of(load):
    record = BootRecord()
    with _Touches(record.touched):
        load(record.watch((name, tensor.clone()) for name, tensor in WEIGHTS.items()))
    return record


def test_a_description_of_a_tensor():
    spec = spec_of("a", torch.ones(3, 2, dtype=torch.bfloat16))
    assert spec == TensorSpec("a", "bfloat16", (3, 2), 12)
    assert spec_of("s", torch.tensor(1.0)) == TensorSpec("s", "float32", (), 4)


def test_tensors_that_the_model_skips_are_known_and_optional():
    target = torch.zeros(4, 2)

    def load(weights):
        for name, tensor in weights:
            if name == "model.embed_tokens.weight":
                target.copy_(tensor)
            elif name == "model.norm.weight":
                tensor.narrow(0, 0, 1).float()

    record = record_of(load)
    assert record.ignored() == {"rotary.inv_freq"}
    wanted = expected(record, tied=False)
    assert wanted.tensors.keys() == WEIGHTS.keys()
    assert wanted.optional == {"rotary.inv_freq"}


def test_tensors_used_after_all_were_collected_count_as_used():
    def load(weights):
        torch.cat([tensor.flatten().float() for _, tensor in list(weights)])

    assert record_of(load).ignored() == frozenset()


def test_tensors_in_a_list_count_as_used():
    def load(weights):
        torch.stack([next(iter(weights))[1]])

    assert "model.embed_tokens.weight" not in record_of(load).ignored()


def test_a_look_at_the_shape_counts_as_use():
    assert record_of(lambda weights: [t.shape for _, t in weights]).ignored() == frozenset()


def test_a_tied_head_may_be_sent_or_left_out():
    record = record_of(lambda weights: [t + 1 for _, t in weights])
    wanted = expected(record, tied=True)
    assert wanted.optional == {"lm_head.weight"}
    embedding = wanted.tensors["model.embed_tokens.weight"]
    assert wanted.tensors["lm_head.weight"] == TensorSpec(
        "lm_head.weight", embedding.dtype, embedding.shape, embedding.nbytes
    )
    assert "lm_head.weight" not in expected(record, tied=False).tensors


def test_a_tied_head_that_the_model_did_load_must_be_sent():
    record = record_of(lambda weights: [t + 1 for _, t in weights])
    record.tensors["lm_head.weight"] = spec_of("lm_head.weight", torch.ones(4, 2))
    record.touched.add("lm_head.weight")
    assert expected(record, tied=True).optional == frozenset()
