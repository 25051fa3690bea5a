"""The (seed, offset) pair that an operator's dropout mask is a pure function of."""

import torch
from torch import Tensor


def draw(p: float, rng: Tensor | None, device: torch.device) -> Tensor | None:
    """`rng` itself, or a pair drawn from PyTorch's default generator of `device` where p > 0."""
    if p == 0.0:
        return None
    if rng is not None:
        return rng
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
