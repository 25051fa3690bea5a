"""What the fused optimizers share: their state, loading it, and lists of tensors for the operators.

State and groups use the names of `torch.optim.AdamW`, so that state dicts load in both directions.
Moments and master weights are always float32. `Optimizer.load_state_dict` would cast them to the
parameters' dtype, so `FusedOptimizer` loads them itself. Each rank updates its shard of a sharded
parameter (DTensor).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from bert_unpad.ops.optim import multi_tensor_l2norm


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor; other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Returns the process groups over which a DTensor is sharded."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(i) for i, p in enumerate(tensor.placements) if p.is_shard())


class ParameterList:
    """Parameters of one group that one call of an operator can update, with gradients and state.

    Args:
        shards: the process groups over which all of these parameters are sharded.
    """

    def __init__(self, shards: tuple[dist.ProcessGroup, ...]) -> None:
        self.shards = shards
        self.tensors: defaultdict[str, list[Tensor]] = defaultdict(list)

    def add(self, param: Tensor, grad: Tensor, state: dict[str, Tensor]) -> None:
        """Appends a parameter, its gradient and its state to the lists."""
        self.tensors["param"].append(local(param.detach()))
        self.tensors["grad"].append(grad)
        for name, tensor in state.items():
            self.tensors[name].append(local(tensor))

    def sum_over_shards(self, sums: Tensor) -> Tensor:
        """Adds up each shard's sums, in place."""
        for group in self.shards:
            dist.all_reduce(sums, group=group)
        return sums


class FusedOptimizer(torch.optim.Optimizer):
    """Base class of FusedAdam, FusedLAMB and Muon."""

    _step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf

    def __init__(
        self,
        params: Any,
        options: dict[str, Any],
        max_grad_norm: float | None,
        skip_non_finite: bool,
        norm_group: dist.ProcessGroup | None,
    ) -> None:
        """Takes the default options of a group; adds the other options of `torch.optim.AdamW`."""
        defaults = options | {
            "amsgrad": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
        }
        if not isinstance(defaults["lr"], Tensor) and not defaults["lr"] >= 0:
            raise ValueError(f"lr: expected 0 or more, got {defaults['lr']!r}")
        if not all(0 <= beta < 1 for beta in defaults["betas"]):
            raise ValueError(f"betas: expected numbers in [0, 1), got {defaults['betas']!r}")
        for key in ("eps", "weight_decay"):
            if not defaults[key] >= 0:
                raise ValueError(f"{key}: expected 0 or more, got {defaults[key]!r}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm: expected a number above 0 or None, got {max_grad_norm!r}"
            )
        self.max_grad_norm = max_grad_norm
        self.skip_non_finite = skip_non_finite
        self.norm_group = norm_group
        self._skipped: dict[torch.device, Tensor] = {}
        super().__init__(params, defaults)
        for group in self.param_groups:
            on_gpu = any(p.is_cuda for p in group["params"])
            group["capturable"] = on_gpu

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            if group.get("amsgrad"):
                raise ValueError("amsgrad: expected False in all parameter groups, got True")

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because a gradient was not finite. Waits for the device."""
        return sum(int(count) for count in self._skipped.values())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of `torch.optim.AdamW`.

        Raises:
            ValueError: the state uses amsgrad, or its parameter groups differ from these.
        """
        super().load_state_dict(state_dict)
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, param in zip(ids, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) or name == "step":
                    value = torch.as_tensor(value, dtype=torch.float32)
                    self.state[param][name] = value.to(param.device, copy=True)

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = self.state[param]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(
                    param.detach(), dtype=torch.float32, memory_format=torch.contiguous_format
                )
        if group["master_weights"] and param.dtype != torch.float32 and "master_param" not in state:
            state["master_param"] = param.detach().to(torch.float32, copy=True)
        return state

    def _parameter_lists(self, group: dict[str, Any]) -> list[ParameterList]:
        lists: dict[Any, ParameterList] = {}
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            if isinstance(param, DTensor) and param.grad.placements != param.placements:
                raise RuntimeError(
                    f"params: expected gradients placed like their parameter, {param.placements}, "
                    f"got {param.grad.placements}"
                )
            if not local(param.detach()).is_contiguous():
                raise RuntimeError("params: expected contiguous parameters")
            shards = shard_groups(param)
            state = self._state_of(param, group)
            grad = local(param.grad).contiguous()
            master = "master_param" in state
            key = (param.device, param.dtype, grad.dtype, master, shards)
            lists.setdefault(key, ParameterList(shards)).add(param, grad, state)
        return list(lists.values())

    def _global_norm(self, lists: Iterable[ParameterList]) -> Tensor | None:
        """Returns the norm of all gradients over all shards, float32 []."""
        total: Tensor | None = None
        for parameters in lists:
            square = multi_tensor_l2norm(parameters.tensors["grad"])[0].square()
            square = parameters.sum_over_shards(square)
            total = square if total is None else total + square.to(total.device)
        if self.norm_group is not None:
            if total is None:  # this rank has no parameters, but the others wait for it
                raise RuntimeError("norm_group: expected parameters with gradients on every rank")
            dist.all_reduce(total, group=self.norm_group)
        return None if total is None else total.sqrt()

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Updates all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradient again.

        Returns:
            The result of the closure; None without one.

        Raises:
            RuntimeError: a gradient is sparse, or does not match its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lists = [
            (group, parameters)
            for group in self.param_groups
            for parameters in self._parameter_lists(group)
        ]
        if not lists and self.norm_group is None:
            return loss
        scale = getattr(self, "grad_scale", None)
        found = getattr(self, "found_inf", None)
        needs_norm = self.max_grad_norm is not None or self.skip_non_finite
        norm = self._global_norm([parameters for _, parameters in lists]) if needs_norm else None
        if found is not None:
            norm = torch.where(
                found > 0, torch.inf, torch.zeros_like(found) if norm is None else norm
            )
        inverse = None if scale is None else scale.double().reciprocal().float()
        counted: set[torch.device] = set()
        for group, parameters in lists:
            device = parameters.tensors["param"][0].device
            if device not in self._skipped:
                self._skipped[device] = torch.zeros((), dtype=torch.int64, device=device)
            common = {
                "lr": scalar(group["lr"], device),
                "grad_scale": None if inverse is None else inverse.to(device),
                "norm": None if norm is None else norm.to(device),
                # Only the first call of a step counts it as skipped.
                "skipped": None if counted else self._skipped[device],
            }
            counted.add(device)
            self._update(group, parameters, common)
            torch.autograd.graph.increment_version(parameters.tensors["param"])
        return loss

    def _update(
        self, group: dict[str, Any], parameters: ParameterList, common: dict[str, Any]
    ) -> None:
        """Updates one list of parameters; `common` holds arguments that all operators take."""
        raise NotImplementedError


def scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """Returns a learning rate as float32 [] on the device, without waiting for the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float32).reshape(())
    return torch.full((), value, dtype=torch.float32, device=device)
