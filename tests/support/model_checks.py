"""What the tests of kernels on the model of a block share (gpu_model/README.md)."""

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpu_model.block_model import POLICIES, Model, Site
from gpu_model.build import KERNELS, load

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in csrc/common/types.h
# What the model says where a barrier or a wait is missing.
NEEDED = (
    r"race: |was never written|not waited for|never waited for|no fence_shared|no wgmma_fence"
    r"|no fence\.proxy|no wgmma\.fence|no wgmma\.wait_group"
)


def load_kernels(name: str, size_function: str, params: type[ctypes.Structure]) -> Model:
    """The library of gpu_model/<name>.cpp, compiled if need be. Its `size_function` says how
    long the struct is that `params` mirrors."""
    kernels = Model(load(KERNELS / f"{name}.cpp"))
    size = getattr(kernels.library, size_function)
    size.restype = ctypes.c_int64
    assert size() == ctypes.sizeof(params)
    return kernels


class Buffers:
    """Tensors that kernels may touch, and their addresses."""

    def __init__(self, kernels: Model) -> None:
        self.kernels = kernels
        self.alive: list[Tensor] = []
        kernels.clear()

    def read(self, x: Tensor | None) -> int | None:
        if x is None:
            return None
        self.alive.append(self.kernels.register(x, writable=False))
        return x.data_ptr()

    def write(self, x: Tensor | None) -> int | None:
        if x is None:
            return None
        # Every element has to be written: NaN would show.
        self.alive.append(self.kernels.register(x.fill_(torch.nan)))
        return x.data_ptr()

    @contextmanager
    def tickets(self, count: int) -> Iterator[int]:
        """The address of counters for a kernel, which has to leave them as it gets them: zero."""
        counters = self.kernels.register(torch.zeros(count, dtype=torch.int32))
        yield counters.data_ptr()
        assert not counters.any()


def assert_every_site_is_needed(
    model: Model,
    run: Callable[[], object],
    *,
    policies: Iterable[str] = POLICIES,
    seeds: Iterable[int] = (1,),
    but: Iterable[str] = (),
) -> list[Site]:
    """`run`, which is right, is an error without any one of the barriers and waits that it passes,
    `but` those of these kinds. Returns these."""
    model.configure()
    model.forget_sites()
    run()
    sites = [site for site in model.sites() if site.kind not in but]
    for site in sites:
        for policy in policies:
            for seed in seeds:
                model.configure(policy, seed)
                error = "no error"
                with model.without(site):
                    try:
                        run()
                    except RuntimeError as raised:
                        error = str(raised)
                assert re.search(NEEDED, error), f"without {site}: {error}"
    model.configure()
    return sites
