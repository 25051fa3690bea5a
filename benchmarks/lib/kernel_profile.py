"""Where the device's time goes in a step: its kernels from torch.profiler, added up by family.

Kernels may run side by side, so families add up to more than the time in which the device was busy,
which is the union of all kernels. Idle is what a step takes without the profiler, less that.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.lib.kernel_families import FAMILIES, OTHER, family

__all__ = ["Kernel", "busy", "kernels_of", "record", "summarise"]

# Synchronisations have intervals of their own on a GPU's timeline, in which nothing is computed.
_WAITS = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait Event", "Event Record")
_SHOWN = 8  # names of the longest kernels of no family


class Kernel(NamedTuple):
    """One kernel or copy on the device."""

    name: str
    start: float
    """Seconds, from any moment."""
    end: float


def record(step: Callable[[], object], steps: int, device: torch.device) -> list[Kernel]:
    """The kernels of some steps; their warm-up is the caller's.

    On a CPU, where this is tried out, the operators that call no other.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        # As PyTorch does for its own CUDA graphs: CUPTI, once torn down, does not stand up again
        # where graphs are alive.
        os.environ["DISABLE_CUPTI_LAZY_REINIT"], os.environ["TEARDOWN_CUPTI"] = "1", "0"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    return kernels_of(profiler.events(), on_gpu)


def kernels_of(events: Iterable[Any], on_gpu: bool) -> list[Kernel]:
    """What ran on the device, of a profiler's events.

    Annotations (an optimizer's step, for one) span kernels on a GPU's timeline and are left out.
    """
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    found = []
    for event in events:
        if event.device_type != wanted or event.name.startswith(_WAITS):
            continue
        if event.is_user_annotation if on_gpu else event.cpu_children or "::" not in event.name:
            continue
        times = event.time_range  # microseconds
        found.append(Kernel(event.name, times.start / 1e6, times.end / 1e6))
    return found


def busy(kernels: Iterable[Kernel]) -> float:
    """Seconds in which at least one kernel ran."""
    total, until = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def summarise(kernels: Sequence[Kernel], steps: int, step_seconds: float) -> dict[str, Any]:
    """Milliseconds a step of each family, and idle time.

    Args:
        kernels: of `steps` steps.
        steps: that were profiled.
        step_seconds: of one step, measured without the profiler.

    Raises:
        ValueError: there are no kernels.
    """
    if not kernels:
        raise ValueError("the profiler saw no kernels on the device")
    seconds: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    unknown: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        kind = family(kernel.name)
        seconds[kind] += kernel.end - kernel.start
        launches[kind] += 1
        if kind == OTHER:
            unknown[kernel.name[:120]] += kernel.end - kernel.start
    total = sum(seconds.values())
    idle = max(0.0, step_seconds - busy(kernels) / steps)
    longest = sorted(unknown, key=unknown.__getitem__, reverse=True)[:_SHOWN]
    return {
        "families": {
            kind: {
                "ms": seconds[kind] / steps * 1e3,
                "share": seconds[kind] / total if total else 0.0,
                "launches": launches[kind] / steps,
            }
            for kind in FAMILIES
            if kind in seconds
        },
        "kernel_ms": total / steps * 1e3,
        "busy_ms": busy(kernels) / steps * 1e3,
        "idle_ms": idle * 1e3,
        "idle_share": idle / step_seconds,
        "longest_of_no_family": {name: unknown[name] / steps * 1e3 for name in longest},
    }
