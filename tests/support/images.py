"""Random images for requests."""

import base64
import io
from functools import lru_cache

import torch


@lru_cache
def png(seed: int = 0, size: tuple[int, int] = (70, 60)) -> bytes:
    from PIL import Image

    dice = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=dice, dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return file.getvalue()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
