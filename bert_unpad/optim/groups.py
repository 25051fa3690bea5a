"""Splits a model's parameters into those with weight decay and those without."""

from __future__ import annotations

from typing import Any

from torch import nn


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the parameters that need a gradient into a group with weight decay and one without.

    BERT's parameters with one dimension are exactly its biases and LayerNorm weights. They get no
    weight decay, and `FusedLAMB` applies no trust ratio to them.

    Args:
        model: the model to optimize.
        weight_decay: decay rate of the first group.

    Returns:
        Two parameter groups for an optimizer.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
