"""Checks that the tests of several operators share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def results_of(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    dout: Tensor,
    precision: torch.dtype | None = None,
) -> list[Tensor]:
    """The function's first result and the gradients of its inputs.

    With a `precision` of float64 all inputs are given in it; otherwise activations (bf16, fp16)
    and parameters (fp32) go in as they are.
    """
    leaves = []
    for x in inputs:
        if x is None:
            leaves.append(None)
            continue
        wide = precision if precision == torch.float64 else x.dtype
        leaves.append(x.detach().to(wide, copy=True).requires_grad_())
    out = function(*leaves)
    first = out[0] if isinstance(out, tuple) else out
    first.backward(dout.to(first.dtype))
    return [first.detach(), *(x.grad for x in leaves if x is not None)]


def assert_same_bits_whatever_the_threads(run: Callable[[], Sequence[Tensor]]) -> None:
    """Runs with 1, 2 and 3 threads."""
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
