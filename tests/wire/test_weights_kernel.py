"""The copy kernel without a GPU: compiled for one, and run by Triton's interpreter."""

import os
import subprocess
import sys

import pytest

COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rollout_pod.weights.copy_kernel import BLOCK, WARPS, copy_kernel

arrays = dict(sources="*i64", targets="*i64", lengths="*i32", widths="*i32",
              source_pitches="*i64", target_pitches="*i64", entries="*i32", blocks="*i32")
for word in (tl.int64, tl.int32, tl.int16, tl.int8):
    for strided in (False, True):
        constants = {"word": word, "strided": strided, "block": BLOCK}
        source = ASTSource(copy_kernel, signature={**arrays, **dict.fromkeys(constants, "constexpr")},
                           constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32),
                              options={"num_warps": WARPS})
        assert "st.global" in made.asm["ptx"]
"""

INTERPRET = """
import random
import torch
from rollout_pod.weights.copies import Copy
from rollout_pod.weights.replay import HostReplayer, KernelReplayer

dice = random.Random(5)
source = torch.randint(0, 256, (1 << 17,), dtype=torch.uint8)
copies, at = [], 0
while at < 90_000:
    unit = dice.choice([1, 2, 4, 8])
    width, rows, gap = unit * dice.randrange(1, 90), dice.choice([1, 1, 9]), unit * dice.randrange(4)
    at = -(-at // unit) * unit
    copies.append(Copy(unit * dice.randrange(9000), at, width, rows, width + gap, width + 2 * gap))
    at += rows * (width + 2 * gap)
copies.append(Copy(0, 100_000, 70_000 - 70_000 % 8))  # more than one block
results = []
for replayer in (HostReplayer(), KernelReplayer("cpu")):
    target = torch.zeros(1 << 18, dtype=torch.uint8)
    replayer.run(replayer.prepare([
        c._replace(source=c.source + source.data_ptr(), target=c.target + target.data_ptr())
        for c in copies
    ]))
    results.append(target)
assert torch.equal(*results)
assert results[0].any()
"""


@pytest.mark.parametrize(("code", "interpret"), [(COMPILE, "0"), (INTERPRET, "1")])
def test_the_kernel(code: str, interpret: str, tmp_path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
