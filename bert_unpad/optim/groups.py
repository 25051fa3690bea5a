"""Splits a model's parameters into groups: with weight decay and without, or for Muon."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import Parameter


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the parameters that need a gradient into those with weight decay and those without.

    BERT's parameters with one dimension are exactly its biases and LayerNorm weights. They get no
    weight decay, and `FusedLAMB` applies no trust ratio to them.

    A parameter that holds several matrices one above the other, as `nn` keeps queries, keys and
    values, is in a group with `stacked`: the number of rows of each. Optimizers of this package
    that treat a matrix as a whole (LAMB's trust ratio, for one) then treat each of them so; others
    ignore it.

    Args:
        model: the model to optimize.
        weight_decay: decay rate of parameters with two dimensions or more.

    Returns:
        Parameter groups for an optimizer, none of them empty.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        *_by_rows(model, [p for p in parameters if p.dim() > 1], {"weight_decay": weight_decay}),
        *_by_rows(model, [p for p in parameters if p.dim() <= 1], {"weight_decay": 0.0}),
    ]


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the parameters that need a gradient into matrices for `Muon` and all others.

    Matrices are the weights of the linear layers of the encoder: of all submodules of a module that
    is called `encoder`. Embeddings and heads are matrices too, but Jordan et al. leave these to
    Adam. Groups have `stacked` as in `decay_groups`, so queries, keys and values are three
    matrices, and the two halves of a GLU are two.

    Args:
        model: the model to optimize.
        weight_decay: decay rate of all but biases and LayerNorm weights.

    Returns:
        Parameter groups for `Muon`, none of them empty.

    Raises:
        ValueError: the model has no linear layer in a module that is called `encoder`.
    """
    matrices = {
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "encoder" in name.split(".")
    }
    if not matrices:
        raise ValueError("model: expected linear layers in a module called encoder, got none")
    found = []
    for group in decay_groups(model, weight_decay):
        for use_muon in (True, False):
            chosen = [p for p in group["params"] if (p in matrices) == use_muon]
            if chosen:
                found.append(group | {"params": chosen, "use_muon": use_muon})
    return found


def _by_rows(
    model: nn.Module, parameters: list[Parameter], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Groups of parameters that hold one matrix, and of those that hold several alike."""
    rows_of = {
        p: module.stacked_rows
        for module in model.modules()
        for p in module.parameters(recurse=False)
        if len(getattr(module, "stacked_rows", ())) > 1
    }
    groups: dict[tuple[int, ...], dict[str, Any]] = {}
    for p in parameters:
        rows = rows_of.get(p, ())
        stacked = {"stacked": rows} if rows else {}
        groups.setdefault(rows, {"params": []} | options | stacked)["params"].append(p)
    return [groups[rows] for rows in sorted(groups)]
