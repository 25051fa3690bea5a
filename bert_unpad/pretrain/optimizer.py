"""Makes the optimizer: which parameters decay, and PyTorch's fused AdamW."""

from __future__ import annotations

import torch
from torch import nn

from bert_unpad.pretrain.config import OptimizerConfig

__all__ = ["build_optimizer", "set_lr"]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) over all parameters.

    BERT's parameters with one dimension are exactly its biases and LayerNorm weights, which are
    not decayed.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=tuple(config.betas), eps=config.eps, fused=True
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr
