"""What the tests of kernels on the model of a block share (gpu_model/README.md)."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable

import torch

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
