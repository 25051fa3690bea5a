"""What a test of an operator runs on: `backend`, a fixture of tests/ops.

| name | kernels | tensors are on |
|---|---|---|
| cpu | the CPU's | the CPU |
| block | the sources of the CUDA kernels, on the model of a block (gpu_model/README.md) | the CPU |
| ptx | what nvcc makes of these sources, in the interpreter of PTX | the CPU |
| cuda | the GPU's | the GPU |

On `block` and `ptx` a call of an operator runs what `on_the_model` names for it: the stand-in of
its CUDA binding, which allocates results and calls the launchers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_model.block_model import POLICIES, Model, compiled_for
from gpu_model.build import compiler
from gpu_model.ptx.compiler import nvcc

# The compute capability that `ptx` compiles for; nvcc makes the same PTX for 90a as long as no
# source asks for the architecture.
ARCH = "80"
_NO_COMPILER = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
BACKENDS = [
    pytest.param("cpu"),
    pytest.param("block", marks=[pytest.mark.gpu_model, _NO_COMPILER]),
    pytest.param(
        "ptx",
        marks=[
            pytest.mark.gpu_model,
            _NO_COMPILER,
            pytest.mark.skipif(nvcc() is None, reason="needs nvcc"),
        ],
    ),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]
GPU = pytest.mark.backends("block", "ptx", "cuda")
"""Kernels of a GPU, on whatever executes them."""

_operators: dict[str, tuple[Callable[[], Model], Callable[..., Any]]] = {}


def on_the_model(model: Callable[[], Model]) -> Callable[[Callable], Callable]:
    """Decorates the function that stands in for the CUDA binding of the operator of its name.

    Args:
        model: returns the library of the operator's kernels.
    """

    def decorate(function: Callable) -> Callable:
        _operators[function.__name__] = (model, function)
        return function

    return decorate


class OnTheModel(TorchDispatchMode):
    """Within it operators of `bert_unpad` run their CUDA kernels on the model of a block.

    Policy, seed, the number of multiprocessors, and whether compiled kernels' copies and products
    are late, are drawn, and may be set, as may the compute capability.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy = random.choice(POLICIES)
        self.seed = random.randrange(1000)
        self.timing = random.choice(("seeded", "late"))
        self.multiprocessors = random.choice((1, 2, 3))
        self.capability = (8, 0)
        self.enabled = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "bert_unpad" or not self.enabled:
            return function(*args, **(kwargs or {}))
        model, run = _operators[function._schema.name.partition("::")[2]]
        kernels = model()
        kernels.configure(self.policy, self.seed, timing=self.timing)
        kernels.set_device(self.capability, self.multiprocessors)
        return run(*args, **(kwargs or {}))


class Backend:
    """One of BACKENDS, for the time of a test.

    Attributes:
        name: as in BACKENDS.
        device: of the tensors that operators get.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = torch.device("cuda" if name == "cuda" else "cpu")
        self._model = OnTheModel() if name in ("block", "ptx") else None

    @contextmanager
    def active(self) -> Iterator[Backend]:
        """Within it operators run on this backend."""
        mode: AbstractContextManager = nullcontext() if self._model is None else self._model
        with compiled_for(ARCH if self.name == "ptx" else None), mode:
            yield self

    def put(self, value: Any) -> Any:
        """`value`, or its elements, on the device: tensors, and lists, tuples and dicts of them."""
        if isinstance(value, Tensor):
            return value.to(self.device)
        if isinstance(value, dict):
            return {key: self.put(element) for key, element in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.put, value))
        return value

    def on_cpu(self, run: Callable[..., Sequence[Tensor]], *args: Any) -> Sequence[Tensor]:
        """What the CPU's kernels give in `run(*args)`, put on the device; args are on the CPU."""
        if self._model is not None:
            self._model.enabled = False
        try:
            return self.put(run(*args))
        finally:
            if self._model is not None:
                self._model.enabled = True

    def assume(
        self, *, multiprocessors: int | None = None, capability: tuple[int, int] | None = None
    ) -> None:
        """Sets the size and the compute capability of the GPU where that is a model."""
        if self._model is not None:
            self._model.multiprocessors = multiprocessors or self._model.multiprocessors
            self._model.capability = capability or self._model.capability

    def schedules(self) -> Iterator[None]:
        """Yields within each of several orders in which threads or blocks may run.

        On a CPU with 1, 2 and 3 threads, on the models with each policy, as the seed says and late,
        on a GPU six times.
        """
        if self._model is not None:
            for policy in POLICIES:
                for self._model.seed, self._model.timing in enumerate(("seeded", "late")):
                    self._model.policy = policy
                    yield
        elif self.name == "cpu":
            before = torch.get_num_threads()
            try:
                for count in (1, 2, 3):
                    torch.set_num_threads(count)
                    yield
            finally:
                torch.set_num_threads(before)
        else:
            for _ in range(6):
                yield

    def schedules_and_sizes(self) -> Iterator[None]:
        """As `schedules`; the models are GPUs of 1 multiprocessor, 2, 3 and so on."""
        for multiprocessors, _ in enumerate(self.schedules(), 1):
            self.assume(multiprocessors=multiprocessors)
            yield

    def assert_same_bits(self, run: Callable[[], Sequence[Tensor]]) -> None:
        """`run` gives the same bits whatever the order in which threads and blocks run."""
        first, *others = [run() for _ in self.schedules()]
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert torch.equal(a, b)


def unaligned(x: Tensor, elements: int = 1) -> Tensor:
    """A contiguous copy, so many elements past an address that is a multiple of 16 bytes."""
    store = torch.empty(x.numel() + 64, dtype=x.dtype, device=x.device)
    begin = -store.data_ptr() % 16 // x.element_size() + elements
    return store[begin : begin + x.numel()].view(x.shape).copy_(x)
