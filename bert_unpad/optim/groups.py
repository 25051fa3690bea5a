"""Splits a model's parameters into groups: with weight decay and without, or for Muon."""

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
        Parameter groups for an optimizer. Which groups there are does not depend on what needs a
        gradient, so some may be empty.
    """
    parameters = list(model.parameters())
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
        Parameter groups for `Muon`; some may be empty, as those of `decay_groups`.

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
    others = [p for p in model.parameters() if p not in matrices]
    decays, plain = {"weight_decay": weight_decay}, {"weight_decay": 0.0, "use_muon": False}
    return [
        *_by_rows(
            model, [p for p in model.parameters() if p in matrices], decays | {"use_muon": True}
        ),
        *_by_rows(model, [p for p in others if p.dim() > 1], decays | {"use_muon": False}),
        *_by_rows(model, [p for p in others if p.dim() <= 1], plain),
    ]


def _by_rows(
    model: nn.Module, parameters: list[Parameter], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Groups of parameters that hold one matrix, and of those that hold several alike."""
    rows_of: dict[Parameter, tuple[int, ...]] = {
        p: rows
        for module in model.modules()
        for p in module.parameters(recurse=False)
        if len(rows := getattr(module, "stacked_rows", ())) > 1
    }
    groups: dict[tuple[int, ...], dict[str, Any]] = {(): {"params": []} | options}
    for p in parameters:
        rows = rows_of.get(p, ())
        group = groups.setdefault(rows, {"params": []} | options | {"stacked": rows})
        group["params"] += [p] if p.requires_grad else []
    return [groups[rows] for rows in sorted(groups)]
