"""A forward kernel in the way of FlashAttention-3 (flash_3_loop.cu) in the model of an SM.

It is not FlashAttention-3's, but its tiles and its order of products are: a warp copies, three
warpgroups of 64 queries multiply. It takes whole tiles of 128 keys, and writes no log-sum-exp.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

from benchmarks.lib import cuda_sass
from gpu_model.ptx.compiler import nvcc
from gpu_model.sm.attention import Batch
from gpu_model.sm.kernel import Kernel, Launch, Stage

SOURCE = Path(__file__).with_name("flash_3_loop.cu")
NAME, GROUPS, KEYS = "attention_of_three_warpgroups", 3, 128
SHARED = 1024 + GROUPS * 64 * 128 + 4 * KEYS * 128


def compiled(folder: Path) -> Kernel:
    """Compiles it into a folder, with the nvcc and the tools that are found."""
    folder.mkdir(parents=True, exist_ok=True)
    object_ = folder / "flash_3_loop.cubin"
    options = ("-arch=sm_90a", "-std=c++20", "-O3", "-cubin")
    subprocess.run([str(nvcc()), *options, "-o", str(object_), str(SOURCE)], check=True)
    return cuda_sass.kernels(object_)[NAME]


def forward(kernel: Kernel, batch: Batch) -> list[Stage]:
    """The pass over sequences of one length, a multiple of KEYS, with heads of 64 columns."""
    length, rows = batch.lengths[0], len(batch.lengths) * batch.heads
    blocks = -(-length // (64 * GROUPS)) * rows
    parameters = struct.pack("<QQQQif", *(n << 40 for n in range(1, 5)), length // KEYS, 0.1)
    kinds = [length] * blocks
    launch = Launch(kernel, (blocks, 1, 1), 128 * (GROUPS + 1), SHARED, parameters, kinds)
    return [Stage("forward", [launch], 4 * rows * length * 64 * 2)]
