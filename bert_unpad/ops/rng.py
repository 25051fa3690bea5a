"""Draws the (seed, offset) pair that determines an operator's dropout mask."""

import torch
from torch import Tensor


def draw(p: float, rng: Tensor | None, device: torch.device) -> Tensor | None:
    """Returns `rng`, or draws a pair from the device's default generator; None if p is 0."""
    if p == 0.0:
        return None
    if rng is not None:
        return rng
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
