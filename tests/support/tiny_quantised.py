"""Tiny checkpoints whose linear layers are quantised, as llm-compressor writes them: a weight of 8
bits, and a scale for each of its rows; activations are quantised on the way.
"""

import json
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

Kind = Literal["int8", "fp8"]

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_MOST: dict[Kind, float] = {"int8": 127.0, "fp8": torch.finfo(torch.float8_e4m3fn).max}


def quantise(source: Path, target: Path, kind: Kind) -> Path:
    """Write ``target`` from the checkpoint ``source``."""
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            tensors |= load_file(file)
        elif not file.name.startswith("model"):
            shutil.copy(file, target)
    quantised: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith(_LINEAR):
            quantised[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True) / _MOST[kind]
        scaled = weight.float() / scale
        quantised[name] = (
            scaled.round().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)
        )
        quantised[f"{module}.weight_scale"] = scale.to(torch.bfloat16)
    save_file(quantised, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = _config(kind)
    (target / "config.json").write_text(json.dumps(config))
    return target


def _config(kind: Kind) -> dict[str, object]:
    bits = {"num_bits": 8, "type": "int" if kind == "int8" else "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int8" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": bits | {"strategy": "channel", "dynamic": False},
                "input_activations": bits | {"strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    }
