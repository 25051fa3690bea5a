"""Measures the matrix-multiply rate of this process's device: the 100 % of MFU.

A measured peak instead of a data sheet's: it holds for CPUs as well, for the threads this process
really has, and for whatever else the machine is doing.
"""

import time
from dataclasses import dataclass
from functools import cache

import torch

from bert_unpad.ops import matmul

_SECONDS = 0.2  # a dtype
_SIZE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class MatmulPeak:
    """The best rate seen."""

    flops_per_second: float
    """Rate of one process; a multiply-add is 2 operations."""
    size: int
    """The matrices were [size, size]."""
    dtype: torch.dtype

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.flops_per_second / 1e12:.3g} TFLOP/s "
            f"({name} matmul {self.size} x {self.size} x {self.size})"
        )


def measure_matmul_peak(device: torch.device, dtype: torch.dtype) -> MatmulPeak:
    """Multiplies square matrices for about 0.2 s and takes the fastest time, once a process.

    On a CPU in float32 too, and the better rate counts: without bf16 instructions `ops.linear`
    multiplies 16-bit activations in float32, and its share of the slower rate was 1.2. float16 it
    always multiplies so there; PyTorch's own product may take seconds for what is measured here.
    """
    dtypes = [dtype]
    if device.type == "cpu" and dtype != torch.float32:
        dtypes = [torch.float32] if dtype == torch.float16 else [dtype, torch.float32]
    threads = torch.get_num_threads()
    peaks = [_measure(device, d, threads) for d in dtypes]
    return max(peaks, key=lambda peak: peak.flops_per_second)


@cache
@torch.no_grad()
def _measure(device: torch.device, dtype: torch.dtype, threads: int) -> MatmulPeak:
    """`threads` are those that the process has now."""
    size = _SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    multiply = matmul.product if device.type == "cpu" else torch.matmul
    multiply(a, b)  # loads the library and picks the kernel
    _wait(device)
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        multiply(a, b)
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return MatmulPeak(2 * size**3 / best, size, dtype)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
