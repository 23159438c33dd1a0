"""A tiny random Qwen2-VL: takes images and videos, needs no network."""

from pathlib import Path

import torch

from examples.tiny_models import DType, _save_tokenizer

VOCAB = 1024
_SPECIALS = (
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>",
    "<|im_end|>",
)  # fmt: skip
START, END, IMAGE, VIDEO = range(VOCAB, VOCAB + 4)
"""Token ids; one ``IMAGE`` between ``START`` and ``END`` is a placeholder."""
_PIXELS = 56 * 56


def make_vision(
    path: Path, *, seed: int, hidden: int = 128, tower: int = 64, dtype: DType = "float32"
) -> None:
    """Write a complete checkpoint folder.

    Args:
        path: The folder.
        seed: Of the weights.
        hidden: Hidden size of the text model, a multiple of 32; it has four heads.
        tower: The same of the part that sees.
        dtype: Of every tensor.
    """
    from transformers import (
        AutoTokenizer,
        GenerationConfig,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    text = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB + 64,
        "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0,
            "mrope_section": [hidden // 32, 3 * hidden // 64, 3 * hidden // 64],
        },
    }  # fmt: skip
    vision = {
        "depth": 2, "embed_dim": tower, "hidden_size": hidden, "num_heads": 4, "mlp_ratio": 2,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    config = Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=False,
        architectures=["Qwen2VLForConditionalGeneration"],
    )  # fmt: skip
    config.dtype = getattr(torch, dtype)
    model = Qwen2VLForConditionalGeneration(config).to(torch.float32)
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=dice)
            if "norm" in name or "ln_q" in name:
                parameter.copy_(1.0 + 0.3 * noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
    model.to(config.dtype).save_pretrained(path)
    GenerationConfig(eos_token_id=2, bos_token_id=1).save_pretrained(path)
    _save_tokenizer(path, VOCAB)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIALS)})
    image = Qwen2VLImageProcessor(min_pixels=_PIXELS, max_pixels=4 * _PIXELS)
    video = Qwen2VLVideoProcessor(min_pixels=_PIXELS, max_pixels=4 * _PIXELS)
    Qwen2VLProcessor(
        image_processor=image, video_processor=video, tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(path)  # fmt: skip
    assert tokenizer.convert_tokens_to_ids(list(_SPECIALS[:4])) == [START, END, IMAGE, VIDEO]
