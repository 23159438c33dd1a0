"""Tiny random checkpoints for the demo and the tests.

All weights are random, those of the norms too: with norms of one, and with tensors in order, many
faults of a weight update would not show. The same shape with another seed is another version of
the same model. Usage: ``python -m examples.tiny_models DIR --kind dense --seed 1``.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Kind = Literal["dense", "tied", "moe"]
DType = Literal["float32", "bfloat16"]
KINDS: tuple[Kind, ...] = ("dense", "tied", "moe")
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")

_HEADS, _KV_HEADS = 4, 2
_SPECIALS = ("<unk>", "<s>", "</s>")


def make(
    path: str | Path,
    *,
    kind: Kind = "dense",
    seed: int = 0,
    hidden: int = 128,
    layers: int = 3,
    vocab: int = 1024,
    dtype: DType = "float32",
    shards: int = 1,
) -> None:
    """Write a complete checkpoint folder: config, safetensors, generation config, tokenizer.

    ``dense`` is Qwen3 with its own output head, ``tied`` Qwen3 whose head is the embedding,
    ``moe`` Qwen3-MoE with 8 experts of which 2 are active.

    Args:
        path: The folder, made when missing; files of these names are overwritten.
        kind: The architecture.
        seed: Equal arguments and seed make equal weights.
        hidden: Hidden size, a multiple of 4 x 8.
        layers: Number of decoder layers.
        vocab: Size of the vocabulary, at least 512.
        dtype: Of every tensor.
        shards: Number of safetensors files; more than one also makes an index.

    Raises:
        ValueError: a size that cannot work; the message names it.
    """
    import torch
    from transformers import GenerationConfig

    if kind not in KINDS or dtype not in DTYPES:
        raise ValueError(f"kind is one of {KINDS}, dtype one of {DTYPES}; got {kind!r}, {dtype!r}")
    if hidden <= 0 or hidden % (_HEADS * 8):
        raise ValueError(f"hidden: a positive multiple of {_HEADS * 8}, got {hidden}")
    if vocab < 512 or layers < 1 or shards < 1:
        raise ValueError("vocab is at least 512, layers and shards at least 1")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(kind, hidden=hidden, layers=layers, vocab=vocab)
    config.dtype = getattr(torch, dtype)
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=2, bos_token_id=1).save_pretrained(folder)
    _save_weights(folder, config, seed=seed, dtype=getattr(torch, dtype), shards=shards)
    _save_tokenizer(folder, vocab)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors makes private files; a pod reads as another user


def _config(kind: Kind, *, hidden: int, layers: int, vocab: int) -> Any:
    from transformers import Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": hidden // _HEADS,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": kind == "tied",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "moe":
        return Qwen3MoeConfig(
            **common,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=hidden // 2,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            architectures=["Qwen3MoeForCausalLM"],
        )
    return Qwen3Config(**common, architectures=["Qwen3ForCausalLM"])


def _save_weights(folder: Path, config: Any, *, seed: int, dtype: Any, shards: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # By sorted name, so that a seed means the same weights whatever order modules come in.
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1.0 + 0.3 * noise)
            else:
                # Wide enough that every layer changes the greedy tokens.
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    # save_pretrained and not a plain state dict: it writes the checkpoint names (an expert each).
    with _quiet():
        model.to(dtype).save_pretrained(folder, max_shard_size=1 << 40)
    if shards > 1:
        _split(folder / "model.safetensors", shards)


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _split(file: Path, shards: int) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    if shards > len(tensors):
        raise ValueError(f"shards: at most {len(tensors)}, one tensor each; got {shards}")
    weight_map = {}
    for i in range(shards):
        part = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        # Interleaved: no layer comes whole from one file.
        names = list(tensors)[i::shards]
        save_file({n: tensors[n] for n in names}, file.with_name(part), {"format": "pt"})
        weight_map.update(dict.fromkeys(names, part))
    index = {
        "metadata": {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())},
        "weight_map": weight_map,
    }
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    file.unlink()


def _save_tokenizer(folder: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # One token a byte, then filler words so that every id of the model decodes to something.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_SPECIALS, *alphabet]
    words += [f"w{i}" for i in range(len(words), vocab)]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=_SPECIALS[0],
        bos_token=_SPECIALS[1],
        eos_token=_SPECIALS[2],
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    ).save_pretrained(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.tiny_models", description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="dense")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--shards", type=int, default=1)
    args = vars(parser.parse_args())
    make(args.pop("dir"), **args)


if __name__ == "__main__":
    main()
