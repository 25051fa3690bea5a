"""Makes the optimizer that the configuration names; which parameters decay."""

from __future__ import annotations

import torch
from torch import nn

from bert_unpad.optim import FusedAdam, FusedLAMB, decay_groups
from bert_unpad.pretrain.config import OptimizerConfig

__all__ = ["build_optimizer", "set_lr"]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over all parameters; biases and LayerNorm weights are not decayed.

    adamw and fused_adam: Loshchilov and Hutter (2019, arXiv:1711.05101). lamb: You et al. (2020,
    arXiv:1904.00962), lans: Zheng et al. (2020, arXiv:2006.13484); without a bound on the gradient
    of their own, which `clip` sets.
    """
    groups = decay_groups(model, config.weight_decay)
    options = {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps}
    if config.name == "adamw":
        return torch.optim.AdamW(groups, **options, fused=True)
    if config.name == "fused_adam":
        return FusedAdam(groups, **options)
    return FusedLAMB(groups, **options, max_grad_norm=None, nesterov=config.name == "lans")


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr
