"""A rank of 1-bit Adam, 1-bit LAMB or 0/1 Adam on the parameters of `one_bit_ranks`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_unpad.experimental import ZeroOneAdam
from bert_unpad.optim import OneBitAdam, OneBitLAMB
from bert_unpad.optim.one_bit import OneBitOptimizer
from tests.support.one_bit_ranks import DECAYED, gradient, lr_of, start

__all__ = ["FREEZE", "OPTIMIZERS", "STEPS", "Run"]

FREEZE, STEPS = 5, 19
OPTIMIZERS: dict[str, Callable[..., OneBitOptimizer]] = {
    "onebit_adam": OneBitAdam,
    "onebit_lamb": OneBitLAMB,
    "zero_one_adam": ZeroOneAdam,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "onebit_adam": {},
    "onebit_lamb": {"coeff_beta": 0.6},
    "zero_one_adam": {"var_update_scaler": 2, "local_step_scaler": 4, "local_step_clipper": 4},
}


class Run:
    """One rank's parameters and optimizer, and its steps."""

    def __init__(
        self,
        kind: str,
        decay: float = 0.1,
        dtype: torch.dtype = torch.float32,
        freeze: int = FREEZE,
        **options: Any,
    ) -> None:
        self.params = [nn.Parameter(w.to(dtype)) for w in start()]
        groups = [
            {"params": self.params[:DECAYED], "weight_decay": decay},
            {"params": self.params[DECAYED:], "weight_decay": 0.0},
        ]
        options = {"betas": (0.9, 0.99), "eps": 1e-6, "freeze_step": freeze} | options
        self.optimizer = OPTIMIZERS[kind](groups, **OPTIONS[kind], **options)
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def step(
        self, step: int, bad: float | None = None, grads: list[Tensor] | None = None, draw: int = 0
    ) -> None:
        """A step with `grads`, by default those of `gradient`; `bad` is put into them."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr_of(step)
        if grads is None:
            grads = gradient([p.detach() for p in self.params], self.rank, step, draw)
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
            if bad is not None:
                param.grad.view(-1)[0] = bad
            if self.optimizer.averages_gradients and dist.is_initialized():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        self.optimizer.step()

    def everything(self) -> list[Tensor]:
        """Copies of all that a step may change."""
        found = [p.detach() for p in self.params]
        for param in self.params:
            found += [value for _, value in sorted(self.optimizer.state[param].items())]
        found += list((self.optimizer.local_state() or {}).values())
        return [tensor.clone() for tensor in found]

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.params]).float()
