"""Lists of tensors as one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of tensors of one dtype and device, one after the other."""
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def copy_flat_(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copies what `flatten` has made of tensors of the same shapes into these."""
    parts = flat.split([t.numel() for t in tensors])
    views = [part.view_as(t) for t, part in zip(tensors, parts, strict=True)]
    with torch.no_grad():
        torch._foreach_copy_(list(tensors), views)
