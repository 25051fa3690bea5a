"""Makes the optimizer that the configuration names; which parameters decay."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert_unpad.pretrain.config import ConfigError, OptimizerConfig
from bert_unpad.pretrain.parallel import Way
from bert_unpad.pretrain.update.arguments import class_arguments
from bert_unpad.pretrain.update.kinds import find_kind
from bert_unpad.pretrain.update.state import local_optimizer, remember_groups

__all__ = ["build_optimizer", "leaves_out_on_device", "set_lr", "step_if"]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    way: Way | None = None,
    bucket_mb: float | None = None,
) -> torch.optim.Optimizer:
    """The optimizer over all parameters; biases and LayerNorm weights are not decayed.

    adamw and fused_adam: Loshchilov and Hutter (2019, arXiv:1711.05101). lamb: You et al. (2020,
    arXiv:1904.00962), lans: Zheng et al. (2020, arXiv:2006.13484); without their
    own bound on the gradient, which `clip` sets.

    Args:
        model: on its device.
        config: says which.
        way: how the ranks share an update; None: this rank keeps all of the state.
        bucket_mb: size of the optimizer's buckets in MiB, if it has any; None: its own.

    Raises:
        ConfigError: there is no such optimizer, or it does not take the options.
    """
    kind = find_kind(config.name)
    arguments = class_arguments(kind, config)
    groups = kind.groups(model, arguments.get("weight_decay", 0.0))
    if "weight_decay" not in arguments:  # the class has none, or its own default
        for some in groups:
            some.pop("weight_decay")
    try:
        if way is None:
            made = kind.optimizer(groups, **arguments)
        else:
            made = way.make_optimizer(kind.optimizer, model, groups, bucket_mb, **arguments)
    except Exception as error:  # whatever the class raises
        raise ConfigError(
            "optimizer.name",
            f"expected one that can be made with parameter groups and {arguments}, got "
            f"{config.name}: {type(error).__name__}: {error}",
        ) from error
    remember_groups(made)
    return made


def leaves_out_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it leaves an update out by `found_inf`, as PyTorch's fused optimizers do.

    For any other, the host must know before each update whether the gradient is finite.
    """
    return getattr(local_optimizer(optimizer), "_step_supports_amp_scaling", False)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def step_if(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Makes an update unless the gradient is not finite; then weights and states stay as they are.

    Optimizers with PyTorch's `found_inf` (its fused ones) leave the update out on the device;
    others make the host wait for `finite`.
    """
    if leaves_out_on_device(optimizer):
        local_optimizer(optimizer).found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(finite):
        optimizer.step()
