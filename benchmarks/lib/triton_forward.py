"""A forward kernel that Triton compiled (triton_kernel.py) in the model of an SM.

Triton's wheel is installed into a folder that git ignores: it compiles for GPUs that are not there.
Its release is of the year of the figures that it is compared with.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

from benchmarks.lib import cuda_sass
from gpu_model.sm.attention import Batch
from gpu_model.sm.kernel import Kernel, Launch, Stage

VERSION = "3.1.0"
SOURCE = Path(__file__).with_name("triton_kernel.py")
ROWS, WARPS = 128, 8  # of a block, as in SOURCE


def compiled(folder: Path) -> tuple[Kernel, int]:
    """The kernel, and the bytes of shared memory that a block of it asks for."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = folder / f"triton-{VERSION}"
    if not packages.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
        subprocess.run([*pip, str(packages), f"triton=={VERSION}"], check=True)
    environment = os.environ | {"PYTHONPATH": str(packages)}
    subprocess.run([sys.executable, str(SOURCE), str(folder)], check=True, env=environment)
    shared = json.loads((folder / "kernel.json").read_text())["shared"]
    return cuda_sass.kernels(folder / "kernel.cubin")["forward"], shared


def forward(kernel: Kernel, shared: int, batch: Batch) -> list[Stage]:
    """The pass over sequences of one length, a multiple of ROWS, with heads of 64 columns.
    `shared`: bytes that a block asks for."""
    length, heads = batch.lengths[0], len(batch.lengths) * batch.heads
    grid = length // ROWS, heads, 1
    parameters = struct.pack("<QQQQQfii", *(n << 40 for n in range(1, 6)), 0.18, length, 64)
    kinds = [length] * (grid[0] * heads)
    launch = Launch(kernel, grid, 32 * WARPS, shared, parameters, kinds)
    return [Stage("forward", [launch], heads * length * (8 * 64 + 4))]
