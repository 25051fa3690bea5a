"""What measuring a whole training step needs of a device: its clock, its memory, its profile.

`Gpu` measures; `Host` has the same face for a CPU, where the benchmark is tried out without a GPU.
A turn is several steps one after another without waiting in between, as in training, where the host
prepares the next step while the device is busy with this one; a first step that does not count
gives the host its lead.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks.lib import device as gpu_names
from benchmarks.lib import harness, timers

Step = Callable[[], None]


class StepDevice(Protocol):
    device: torch.device
    folder: str
    """Where its results lie."""
    data_sheet_peak: float | None
    """Dense bf16 FLOP/s."""

    def turn(self, step: Step, steps: int) -> float:
        """Seconds of one step, in a turn of `steps`."""

    def matmul_peak(self) -> float:
        """FLOP/s in bf16."""

    def settle(self) -> None:
        """Waits for the device, and gives back memory that nobody holds."""

    def allocated(self) -> int:
        """Bytes of all tensors now."""

    def peak_of(self, step: Step) -> int:
        """The most bytes of all tensors at any time of a step."""

    def graph_pools(self) -> int:
        """Bytes that captured CUDA graphs hold."""

    def settings(self) -> dict[str, Any]:
        """What figures depend on besides the machine."""


class Gpu:
    """The current GPU."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise SystemExit("--device cuda: PyTorch sees no GPU")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.folder = harness.gpu_folder()
        self.data_sheet_peak = gpu_names.data_sheet_peak(torch.cuda.get_device_name())

    def turn(self, step: Step, steps: int) -> float:
        step()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / steps

    def matmul_peak(self) -> float:
        return timers.CudaTimer().matmul_peak(torch.bfloat16)

    def settle(self) -> None:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def peak_of(self, step: Step) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def graph_pools(self) -> int:
        segments = torch.cuda.memory_snapshot()
        # (0, 0) is the allocator's own pool.
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))

    def settings(self) -> dict[str, Any]:
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        chosen = {name: os.environ[name] for name in names if name in os.environ}
        return {"allocator": torch.cuda.get_allocator_backend(), **chosen}


class Host:
    """The same on a CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.folder = "cpu"
        self.data_sheet_peak = None

    def turn(self, step: Step, steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps

    def matmul_peak(self) -> float:
        return timers.HostTimer().matmul_peak(torch.bfloat16)

    def settle(self) -> None:
        harness.reset_peak()

    def allocated(self) -> int:
        return harness.process_bytes("VmRSS")

    def peak_of(self, step: Step) -> int:
        harness.reset_peak()
        step()
        return harness.process_bytes("VmHWM")

    def graph_pools(self) -> int:
        return 0

    def settings(self) -> dict[str, Any]:
        return {}
