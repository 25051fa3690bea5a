"""Draws the dropout keys of one forward pass.

Every operator with dropout takes a key, a (seed, offset) pair on the data's device. Drawing the
keys of all layers at once takes one small kernel instead of three per layer. A layer that is
computed again (gradient checkpointing) gets the same keys, and so the same masks, without saving
and restoring generator state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RngKeys = Sequence[Tensor | None]


def draw_rng_keys(count: int, device: torch.device) -> Tensor:
    """Draws `count` (seed, offset) pairs, int64 [count, 2], from the device's default generator."""
    return torch.randint(2**63 - 1, (count, 2), dtype=torch.int64, device=device)
