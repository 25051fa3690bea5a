"""16-bit and 8-bit copies of float32 weights, written by the optimizer that updates them.

A product of 16-bit activations with a float32 weight rounds the weight first: every forward pass
reads all of it and writes half as much. The optimizer has each new weight in a register anyway. For
a product in 8 bits a forward pass reads the weight twice; the optimizer does so once an update, for
all passes of it (`QuantizedWeight` of `bert_unpad/ops/fp8.py`). A copy counts as long as nothing
else has changed its weight, as far as PyTorch counts changes. It does not count writes through
`weight.data`, nor collectives such as `dist.broadcast` and `dist.all_reduce` on a weight: call
`torch.autograd.graph.increment_version` after one.
"""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# By weight. Not an attribute of it, which would be pickled with the weight.
_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()


class WeightCopy:
    """A copy of a weight in fewer bits, made by a subclass; `find_copy` finds it from now on.

    Args:
        weight: a float32 parameter.
    """

    def __init__(self, weight: Tensor) -> None:
        self.mark(weight)
        _copies[weight] = self

    def mark(self, weight: Tensor) -> None:
        """Says that the copy is that of the weight as it is now."""
        self._state = weight._version, weight.data_ptr()

    def fits(self, weight: Tensor) -> bool:
        """Whether the weight is still what it was at the last `mark`."""
        return self._state == (weight._version, weight.data_ptr())

    def renew(self, weight: Tensor) -> None:
        """Rounds again, to the same memory, if something else has changed the weight."""
        raise NotImplementedError


class RoundedWeight(WeightCopy):
    """A weight rounded to 16 bits.

    Args:
        weight: a float32 parameter.
        dtype: bfloat16 or float16.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.tensor = weight.detach().to(dtype)
        super().__init__(weight)

    def renew(self, weight: Tensor) -> None:
        if not self.fits(weight):
            self.tensor.copy_(weight.detach())
            self.mark(weight)


Copy = TypeVar("Copy", bound=WeightCopy)


def find_copy(weight: Tensor, kind: type[Copy]) -> Copy | None:
    """Returns a weight's copy if it is of this kind and up to date."""
    if torch.compiler.is_compiling():
        return None
    copy = _copies.get(weight)
    return copy if isinstance(copy, kind) and copy.fits(weight) else None


def copies_of(weights: Iterable[Tensor]) -> list[tuple[Tensor, WeightCopy]]:
    """Returns the weights that have a copy, each with it. CUDA graphs read the copies that were
    there when they were captured: who replays one keeps these, and calls `renew` before."""
    found = [(weight, _copies.get(weight)) for weight in weights]
    return [(weight, copy) for weight, copy in found if copy is not None]


def rounded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a weight in `dtype`: the copy that its optimizer keeps, if it is up to date."""
    if weight.dtype == dtype:
        return weight
    copy = find_copy(weight, RoundedWeight)
    return copy.tensor if copy is not None and copy.tensor.dtype == dtype else weight.to(dtype)
