"""Which parameters decay."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["decay_groups"]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: with `weight_decay`, and without.

    BERT's parameters with one dimension are exactly its biases and LayerNorm weights, which are
    not decayed, and to which `FusedLAMB` then applies no trust ratio.

    Args:
        model: whose parameters that need a gradient are split.
        weight_decay: of the first group.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
