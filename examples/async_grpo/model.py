"""The policy: a Qwen3 of a third of a million parameters, random at first."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.async_grpo.task import ANSWER_LENGTH, END, LENGTH, VOCABULARY

HIDDEN, LAYERS, HEADS, KV_HEADS = 128, 2, 4, 2
INITIAL_SPREAD = 0.06
"""Standard deviation of the random weights: the usual 0.02 is for models a hundred times wider."""
MAX_LENGTH = 4 * (LENGTH + ANSWER_LENGTH)


def new_model(*, seed: int) -> Any:
    """A random model: equal seeds make equal weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        architectures=[Qwen3ForCausalLM.__name__],  # without, vLLM takes it for an encoder
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HIDDEN // HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        initializer_range=INITIAL_SPREAD,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=None,
    )
    config.dtype = torch.float32
    return Qwen3ForCausalLM(config)


def save_model(model: Any, folder: Path) -> None:
    """Write the folder that a replica starts with: config and weights."""
    model.config.save_pretrained(folder)
    save_weights(model.state_dict(), folder)


def save_weights(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the folder of a weight version. The file appears whole or not at all."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.part"
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, part)
    part.chmod(0o644)  # a pod reads it as another user
    os.replace(part, folder / "model.safetensors")


def score_answers(model: Any, prompts: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the answers' tokens and the entropies of their distributions (temperature 1).

    Args:
        model: Of ``new_model``.
        prompts: Token ids, int64 ``[rollouts, prompt]``, all of one length.
        answers: Token ids, int64 ``[rollouts, tokens]``, padded on the right: what follows a
            token has no influence on it.

    Returns:
        Two float32 tensors ``[rollouts, tokens]``.
    """
    inputs = torch.cat([prompts, answers[:, :-1]], dim=1)
    logits = model(input_ids=inputs, use_cache=False).logits[:, prompts.shape[1] - 1 :].float()
    table = torch.log_softmax(logits, dim=-1)
    return table.gather(2, answers[..., None])[..., 0], -(table.exp() * table).sum(-1)
