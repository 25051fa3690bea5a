"""Clocks for one step on a device, and the device's measured peaks.

On a GPU a step is timed by events on its stream, behind a kernel that keeps the device busy while
the host queues the step, so that no gap between launches is counted; and with a cold L2, which a
write twice its size empties. `HostTimer` has the same face for a CPU, where a benchmark is tried
out without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from benchmarks.lib import harness

FLUSH_BYTES = 256 << 20
BUSY_CYCLES = 800_000  # 0.4 ms at 2 GHz; a backward pass through autograd is queued in less


class Timer(Protocol):
    def measure(self, step: Callable[[], Any]) -> Any:
        """Runs the step; what comes back is for `seconds`."""

    def seconds(self, handle: Any) -> float: ...

    def matmul_peak(self, dtype: torch.dtype) -> float:
        """FLOP/s."""

    def copy_peak(self) -> float:
        """Bytes/s read plus written."""


class CudaTimer:
    """Times on the current stream of the current GPU."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise SystemExit("--device cuda: PyTorch sees no GPU")
        size = max(FLUSH_BYTES, 2 * torch.cuda.get_device_properties().L2_cache_size)
        self.flush = torch.empty(size, dtype=torch.uint8, device="cuda")

    def measure(self, step: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        torch.cuda._sleep(BUSY_CYCLES)
        begin.record()
        step()
        end.record()
        return begin, end

    def seconds(self, handle: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
        begin, end = handle
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _best(self, step: Callable[[], Any], tries: int = 20) -> float:
        return min(self.seconds(self.measure(step)) for _ in range(tries))

    def matmul_peak(self, dtype: torch.dtype) -> float:
        size = 8192
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * size**3 / self._best(lambda: torch.mm(a, b, out=out))

    def copy_peak(self) -> float:
        source = torch.randint(255, (1 << 30,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return 2 * source.numel() / self._best(lambda: target.copy_(source))


class HostTimer:
    """The same on a CPU."""

    def measure(self, step: Callable[[], Any]) -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    def seconds(self, handle: float) -> float:
        return handle

    def matmul_peak(self, dtype: torch.dtype) -> float:
        return harness.matmul_peak(dtype, size=256, tries=3)

    def copy_peak(self) -> float:
        return harness.memory_peak(1 << 22, tries=3)


class Contender(Protocol):
    def forward(self) -> Any:
        """Returns what `backward` needs."""

    def backward(self, saved: Any) -> Any: ...


def steps(contenders: Mapping[str, Contender]) -> dict[str, Callable[[], Any]]:
    """'<pass>/<contender>' -> the step to time."""
    result: dict[str, Callable[[], Any]] = {}
    for name, contender in contenders.items():
        saved = contender.forward()
        result[f"forward/{name}"] = contender.forward
        result[f"backward/{name}"] = lambda c=contender, s=saved: c.backward(s)
        result[f"both/{name}"] = lambda c=contender: c.backward(c.forward())
    return result


def interleave(
    timer: Timer, steps: Mapping[str, Callable[[], Any]], rounds: int, warmup: int
) -> dict[str, harness.Timing]:
    """Each step once a round, a round queued at a time; the first `warmup` rounds do not count."""
    timings = {name: harness.Timing() for name in steps}
    for number in range(warmup + rounds):
        handles = {name: timer.measure(step) for name, step in steps.items()}
        for name, handle in handles.items():
            seconds = timer.seconds(handle)
            if number >= warmup:
                timings[name].rounds.append(seconds)
    return timings
