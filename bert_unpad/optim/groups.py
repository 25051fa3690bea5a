"""Splits a model's parameters into those with weight decay and those without, or for Muon."""

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


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the parameters that need a gradient into matrices for `Muon` and all others.

    Matrices are the weights of the linear layers of the encoder: of all submodules of a module that
    is called `encoder`. Embeddings and heads are matrices too, but Jordan et al. leave these to
    Adam. The queries', keys' and values' weights, which one parameter named `qkv.weight` holds one
    above the other, count as three matrices.

    Args:
        model: the model to optimize.
        weight_decay: decay rate of all but biases and LayerNorm weights.

    Returns:
        Parameter groups for `Muon`, none of them empty.
    """
    matrices = {
        weight: 3 if name.endswith("qkv") else 1
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "encoder" in name.split(".")
        for weight in [module.weight]
        if weight.requires_grad
    }
    groups = [
        {
            "params": [p for p, count in matrices.items() if count == stacked],
            "weight_decay": weight_decay,
            "stacked": stacked,
        }
        for stacked in (1, 3)
    ]
    for group in decay_groups(model, weight_decay):
        groups.append(group | {"params": [p for p in group["params"] if p not in matrices]})
    return [group for group in groups if group["params"]]
