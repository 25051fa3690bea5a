"""Makes the optimizer that the configuration names, and its updates."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bert_unpad.nn import Encoder
from bert_unpad.ops.matmul import product_dtype
from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.pretrain.config import ConfigError, OptimizerConfig, PretrainConfig
from bert_unpad.pretrain.update.arguments import class_arguments
from bert_unpad.pretrain.update.kinds import find_kind
from bert_unpad.pretrain.update.state import local_optimizer, remember_groups


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    make: Callable[..., torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer over all parameters; biases and LayerNorm weights are not decayed.

    adamw and fused_adam: Loshchilov and Hutter (2019, arXiv:1711.05101). lamb: You et al. (2020,
    arXiv:1904.00962), lans: Zheng et al. (2020, arXiv:2006.13484); without their
    own bound on the gradient, which `clip` sets.

    Args:
        model: on its device.
        config: says which.
        make: from the class, parameter groups and options; by default this rank keeps all of the
            state.

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
        whole = kind.optimizer
        made = make(whole, groups, **arguments) if make else whole(groups, **arguments)
    except Exception as error:  # whatever the class raises
        raise ConfigError(
            "optimizer.name",
            f"expected one that can be made with parameter groups and {arguments}, got "
            f"{config.name}: {type(error).__name__}: {error}",
        ) from error
    known = {*inspect.signature(kind.optimizer).parameters, *local_optimizer(made).defaults}
    for name in set(arguments) - known:  # a class with **kwargs has taken it all the same
        raise ConfigError(
            "optimizer.arguments",
            f"expected arguments that {config.name} reads, got {name!r}, which it ignores",
        )
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


def round_weights_in_updates(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: PretrainConfig, device: torch.device
) -> None:
    """Lets the optimizer write the linear layers' weights as their products take them too, in 16 or
    8 bits, which saves every forward pass to round them: where it can, and nothing else changes
    weights."""
    if (
        config.precision == "fp32"
        or not (isinstance(optimizer, FusedOptimizer) and optimizer.rounds)
        or config.comm.models_differ
        or config.compile
    ):
        return
    weights = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    weights = {w for w in weights if w.requires_grad}
    encoders = [m for m in model.modules() if isinstance(m, Encoder)]
    in_8_bits = weights.intersection(w for encoder in encoders for w in encoder.fp8_weights)
    optimizer.keep_rounded(in_8_bits, torch.float8_e4m3fn)
    dtype = torch.float16 if config.precision == "fp16" else torch.bfloat16
    if product_dtype(torch.empty(0, dtype=dtype, device=device)) == dtype:
        optimizer.keep_rounded(weights - in_8_bits, dtype)
