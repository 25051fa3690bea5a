"""Dropout keys for one forward pass.

Every operator with dropout takes a (seed, offset) pair on the data's device. Drawing the pairs of
all layers at once costs one small kernel instead of three a layer, and a layer that is computed
again (gradient checkpointing) gets the same pair and so the same mask, with no generator state to
save and restore.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["RngKeys", "draw_rng_keys"]

RngKeys = Sequence[Tensor | None]


def draw_rng_keys(count: int, device: torch.device) -> Tensor:
    """`count` pairs (seed, offset), int64 [count, 2], from the device's default generator."""
    return torch.randint(2**63 - 1, (count, 2), dtype=torch.int64, device=device)
