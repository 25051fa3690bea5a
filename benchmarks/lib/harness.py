"""What all benchmarks share: interleaved timing, machine peaks, and the JSON that they write.

Every figure is a ratio against a peer measured in the same run. Contenders take turns round by
round, so that a slow phase of the machine hits all of them; the median over rounds is reported.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import bert_unpad
from benchmarks.lib import device as gpu
from benchmarks.lib.report import commit
from bert_unpad import _C, ops
from bert_unpad._files import write_text
from bert_unpad._malloc import keep_freed_memory
from bert_unpad.data.store.cache import default_cache_dir
from bert_unpad.ops import matmul

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass
class Timing:
    """Seconds of one contender, a value a round."""

    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def interleave(
    contenders: Mapping[str, Callable[[], None]],
    rounds: int,
    warmup: int = 1,
    on_time: Callable[[str, float], None] | None = None,
) -> dict[str, Timing]:
    """Times each contender once a round; the first `warmup` rounds do not count."""
    timings = {name: Timing() for name in contenders}
    for number in range(warmup + rounds):
        for name, step in contenders.items():
            start = time.perf_counter()
            step()
            seconds = time.perf_counter() - start
            if number >= warmup:
                timings[name].rounds.append(seconds)
            if on_time:
                on_time(name, seconds)
    return timings


@dataclass(frozen=True)
class Memory:
    """Bytes of one contender."""

    state: int  # what stays between steps: weights and the optimizer's state
    step: int  # what the peak of a step adds: gradients, activations, temporaries

    @property
    def peak(self) -> int:
        return self.state + self.step


def memory_of(
    optimizer: torch.optim.Optimizer, first: Callable[[], None], step: Callable[[], None]
) -> Memory:
    """The memory of the one contender of this process (Linux).

    `first` is a small step that makes the optimizer's state and loads what is loaded lazily; `step`
    is the one to measure. Both begin without gradients. A process holds one contender only: what an
    earlier one leaves behind, in objects or in the heap's gaps, would be counted in a later one.
    """
    first()
    optimizer.zero_grad(set_to_none=True)
    before = reset_peak()
    step()
    return Memory(state_bytes(optimizer), process_bytes("VmHWM") - before)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What stays between steps: parameters and the optimizer's state."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    for values in optimizer.state.values():
        tensors += [v for v in values.values() if isinstance(v, torch.Tensor)]
    return sum(t.untyped_storage().nbytes() for t in tensors)


def process_bytes(key: str) -> int:
    """A memory figure of this process: VmRSS is what is resident now, VmHWM its peak (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def reset_peak() -> int:
    """Gives freed memory back, resets the peak, and returns what is resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return process_bytes("VmRSS")


def matmul_peak(dtype: torch.dtype, size: int = 2048, tries: int = 9) -> float:
    """FLOP/s of a matrix product, PyTorch's or our linear layers', at its best of `tries`."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    times = []
    for multiply in (torch.matmul, matmul.product):
        for _ in range(tries):
            start = time.perf_counter()
            multiply(a, b)
            times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def matmul_peaks() -> dict[str, float]:
    """FLOP/s of a matrix product by dtype."""
    return {
        str(dtype).removeprefix("torch."): matmul_peak(dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }


def memory_peak(bytes_moved: int = 256 << 20, tries: int = 9) -> float:
    """Bytes/s read plus written by PyTorch's copy of a buffer that no cache holds."""
    source = torch.zeros(bytes_moved // 8)
    target = torch.zeros_like(source)
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return bytes_moved / min(times)


def time_algorithms() -> None:
    """Lets cuBLASLt's algorithms be timed, with choices in the file that the trainer keeps."""
    ops.time_algorithms(path=default_cache_dir() / "cublaslt_algorithms.txt")


def gpu_folder() -> str:
    """Where results of the first GPU lie."""
    return gpu.folder(torch.cuda.get_device_name())


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    found = {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": _C.cpu_isa(),
        "pytorch": torch.__version__,
        "pytorch_isa": torch.backends.cpu.get_cpu_capability(),
        "bert_unpad": bert_unpad.__version__,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties()
        found |= {
            "gpu": properties.name,
            "gpu_sms": properties.multi_processor_count,
            "gpu_memory": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def fix_allocator(wish: str) -> str:
    """Sets the allocator that all contenders share and names it. `wish`: heap | default."""
    if wish == "default":
        return f"glibc {platform.libc_ver()[1]}, default"
    if not keep_freed_memory():
        raise SystemExit("--allocator heap needs glibc on Linux")
    return f"glibc {platform.libc_ver()[1]}, bert_unpad._malloc.keep_freed_memory()"


def command() -> str:
    """The command line that started this benchmark, as one types it in the checkout's root."""
    name = Path(sys.argv[0]).stem
    return shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])


def add_name(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds `--name`: the name that `save` gets, e.g. to keep the figures of a second machine."""
    said = f"file to write, without .json (default: {default})"
    parser.add_argument("--name", default=default, help=said)


def save(name: str, device: str, command: str, payload: dict[str, Any]) -> Path:
    """Writes benchmarks/results/<device>/<name>.json, to a temporary name first."""
    folder = RESULTS / device
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    report = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        **payload,
    }
    write_text(path, json.dumps(report, indent=1) + "\n")
    return path
