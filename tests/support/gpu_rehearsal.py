"""A pytest plugin that runs the tests of tests/cuda on a CPU, to see whether they fit the code.

    python -m pytest -p tests.support.gpu_rehearsal tests/cuda

They are of streams, graphs and devices, which nothing else runs without a GPU; those of operators
are in tests/ops, for every backend.

Every "cuda" is the CPU, operators are the CPU's, there is one stream, NCCL is gloo, and to replay a
graph is to run again what was captured. While something is captured, whatever would wait for the
device is an error. One case of each test runs, but for those of ONLY_ON_A_GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Parts of names of tests of what a CPU has not, or does in another way: other devices, addresses,
# kernels that stop, cuBLASLt, captures by the trainer.
ONLY_ON_A_GPU = (
    *("test_conformance.py", "test_graph_buckets.py", "test_graphs.py::TestOnAGpu"),
    "test_energy.py",
    *("stop_the_kernel", "named", "refused", "bad_input"),
    *("waiting_is_found", "timed_algorithms", "captured_product"),
    *("captured_step", "whose_kernels", "pytorch_computes", "test_hf.py::test_compiles"),
    "large_sizes",  # takes a CPU too long
)
WAITS = {"item", "tolist", "cpu", "cuda", "nonzero", "__bool__", "__float__", "__int__"}


def _here(x: Any) -> Any:
    """The CPU in the place of a GPU."""
    if isinstance(x, torch.device):
        return torch.device("cpu") if x.type == "cuda" else x
    return "cpu" if isinstance(x, str) and x.partition(":")[0] == "cuda" else x


class OnCpu(TorchFunctionMode):
    capturing = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        wanted = [*args, *(kwargs or {}).values()]
        args, kwargs = [_here(x) for x in args], {k: _here(x) for k, x in (kwargs or {}).items()}
        moves = any(a is not b for a, b in zip(wanted, [*args, *kwargs.values()], strict=True))
        if OnCpu.capturing and (name in WAITS or (moves and name in ("to", "tensor"))):
            raise RuntimeError(f"{name}: waits for the device while a graph is captured")
        if name in ("cuda", "cpu"):
            return args[0].clone()  # as between two devices
        if name == "pin_memory":
            return args[0]
        return function(*args, **kwargs)


@contextmanager
def capturing() -> Iterator[None]:
    OnCpu.capturing = True
    try:
        yield
    finally:
        OnCpu.capturing = False


def capture(run: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Callable[[], None]]:
    """In the place of that of cuda_checks."""
    with capturing():
        captured = run()

    def replay() -> None:
        for old, new in zip(captured, run(), strict=True):
            old.copy_(new)

    return captured, replay


class Stream:
    """A stream or an event; there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def elapsed_time(self, end: Stream) -> float:
        return 1.0

    def is_capturing(self) -> bool:
        return OnCpu.capturing

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = synchronize = wait = wait_event = wait_stream = _nothing


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, device=_here(device))


class Autocast(torch.autocast):
    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(_here(device_type), *args, **kwargs)


@contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    yield


def _install() -> None:
    """Before tests are imported, which ask for the device then."""
    properties = SimpleNamespace(multi_processor_count=132)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *args: properties,
        "get_device_capability": lambda *args: (9, 0),
        "mem_get_info": lambda *args: (0, 0),
        "synchronize": lambda *args: None,
        "set_sync_debug_mode": lambda mode: None,
        "_sleep": lambda cycles: None,
        "current_stream": Stream,
        "is_current_stream_capturing": lambda: OnCpu.capturing,
        "stream": _on_stream,
        "Stream": Stream,
        "Event": Stream,
    }.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.current_stream = Stream  # optimizers ask it whether it is captured
    torch.Generator, torch.autocast = Generator, Autocast
    init = dist.init_process_group
    dist.init_process_group = lambda backend, **kwargs: init("gloo", **kwargs)

    from tests.support import cuda_checks

    cuda_checks.capture = capture


_install()


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with OnCpu():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One case of each test that can run here."""
    cases: dict[str, pytest.Item] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "gpu" not in marks or marks & {"slow", "large"}:
            continue
        if not any(part in item.nodeid for part in ONLY_ON_A_GPU):
            cases.setdefault(item.nodeid.partition("[")[0], item)
    items[:] = cases.values()
