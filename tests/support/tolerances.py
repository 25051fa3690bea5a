"""How far apart two ways to compute the same numbers may be: by the dtype, and by magnitudes.

Which routine a matrix library takes, and so in which order it adds, depends on the processor and
on the shapes. So results of the same operations on equal shapes are the same bits, and are compared
as bits; those of other shapes, or of other operations, are equal to rounding, and compared by what
is here. No bound was measured on some machine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["STEP", "assert_same_gradients", "assert_same_values"]

# Of fp32 results of the tests' tiny models, relative: about 30 products of up to 96 terms follow
# one another in a step, of whose 3,000 roundings a random walk leaves 55 units. Twice that for two
# results that are both rounded, and twice more for what a LayerNorm or a softmax magnifies.
STEP = 256 * torch.finfo(torch.float32).eps

# How much larger one error of a computation may be than another of the same one, whose roundings
# fall otherwise. Of two normal numbers one is four times the other in a case of six; of the largest
# of 16, as few as a tensor here has, in one of fifty thousand, and the tolerance comes on top.
TWO_ERRORS = 4


def assert_same_values(
    got: Any, want: Any, tolerance: float = STEP, name: str = "", *, truth: Any = None
) -> None:
    """Tensors, or lists and dicts of such, each to `tolerance` of its largest entry.

    Or of 1, where all are smaller: a loss is what is left between logits. What is not
    floating-point must be equal.

    With `truth`, the same results in float64, `got` is compared to that, and may be off by
    TWO_ERRORS times the error of `want` as well: what a model's weights magnify is in both.
    """
    if isinstance(want, Mapping):
        assert got.keys() == want.keys(), name
        for key, value in want.items():
            at = None if truth is None else truth[key]
            assert_same_values(got[key], value, tolerance, f"{name}{key}: ", truth=at)
    elif isinstance(want, Sequence):
        assert len(got) == len(want), name
        for index, value in enumerate(want):
            at = None if truth is None else truth[index]
            assert_same_values(got[index], value, tolerance, f"{name}{index}: ", truth=at)
    else:
        exact = not want.is_floating_point() or want.numel() == 0
        limit = 0.0 if exact else tolerance * max(1.0, want.abs().max().item())
        if truth is not None and not exact:
            assert got.dtype == want.dtype, name
            limit += TWO_ERRORS * (want - truth).abs().max().item()
            got, want = got.double(), truth.double()
        torch.testing.assert_close(got, want, rtol=0.0, atol=limit, msg=lambda m: f"{name}{m}")


def assert_same_gradients(
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    tolerance: float = STEP,
    order: float = 2.0,
    truth: Mapping[str, Tensor] | None = None,
) -> None:
    """Gradients by the names of parameters: each to `tolerance` of its norm of that order (of its
    largest entry, with infinity).

    Some are sums that cancel, that of a key's bias altogether: what is left of them is the rounding
    of their terms. These are the terms of the gradient of the weight beside it too. So a bias is
    measured against the larger of the two norms (a tenth of the largest of all, where that weight
    is frozen or there is none), and nothing against less than 1 % of the largest. `truth` is as in
    assert_same_values.
    """
    assert got.keys() == want.keys()
    norms = {name: gradient.norm(order).item() for name, gradient in want.items()}
    largest = max(norms.values())
    for name, gradient in want.items():
        beside = 0.01 * largest
        if name.endswith("bias"):
            beside = max(beside, norms.get(name.removesuffix("bias") + "weight", 0.1 * largest))
        limit = tolerance * max(norms[name], beside)
        if truth is not None:
            limit += TWO_ERRORS * (gradient - truth[name]).norm(order).item()
            gradient = truth[name]
        error = (got[name] - gradient).norm(order).item()
        assert error <= limit, f"gradient of {name}: error {error:.1e} > {limit:.1e}"
