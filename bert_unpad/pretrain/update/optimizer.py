"""Makes the optimizer that the configuration names; which parameters decay, who keeps its state."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_unpad.distributed import ShardedOptimizer
from bert_unpad.pretrain.config import ConfigError, OptimizerConfig
from bert_unpad.pretrain.node_groups import common_node_size, node_group
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.update.arguments import class_arguments
from bert_unpad.pretrain.update.kinds import find_kind
from bert_unpad.pretrain.update.state import local_optimizer, remember_groups

__all__ = ["build_optimizer", "leaves_out_on_device", "set_lr", "shard_group", "step_if"]


def shard_group(config: OptimizerConfig, ranks: Ranks) -> dist.ProcessGroup | None:
    """The ranks that share the optimizer's state out; None where each keeps all of it.

    Every rank must call it.

    Raises:
        ConfigError: machines have different numbers of processes, and each should shard.
    """
    if config.shard in ("none", "fsdp") or ranks.world_size == 1:
        return None
    if config.shard in ("world", "overlap"):
        return dist.group.WORLD
    size = common_node_size(ranks, "optimizer.shard", "node", "world or none")
    return None if size == 1 else node_group(ranks, size)


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    group: dist.ProcessGroup | None = None,
    bucket_mb: float | None = None,
) -> torch.optim.Optimizer:
    """The optimizer over all parameters; biases and LayerNorm weights are not decayed.

    adamw and fused_adam: Loshchilov and Hutter (2019, arXiv:1711.05101). lamb: You et al. (2020,
    arXiv:1904.00962), lans: Zheng et al. (2020, arXiv:2006.13484); without their
    own bound on the gradient, which `clip` sets.

    Args:
        model: on its device.
        config: says which.
        group: of ranks that keep the state of some parameters each, update these, and send them to
            the others (Rajbhandari et al., "ZeRO", 2020, arXiv:1910.02054, stage 1); None: all of
            it here. With `shard` overlap ranks keep parts of parameters, see `ShardedOptimizer`.
        bucket_mb: size of its buckets in MiB; None: its own.

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
        if group is None:
            made = kind.optimizer(groups, **arguments)
        elif config.shard == "overlap":
            made = ShardedOptimizer(
                *(model, groups, kind.optimizer, group), bucket_cap_mb=bucket_mb, **arguments
            )
        else:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # takes 0.6 s

            made = ZeroRedundancyOptimizer(groups, kind.optimizer, process_group=group, **arguments)
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
        local_optimizer(optimizer).found_inf = (~finite).float()
        optimizer.step()
    elif bool(finite):
        optimizer.step()
