"""LAMB as a careful user writes it in plain PyTorch: `torch._foreach_*` over lists of tensors.

The same passes over memory as `torch.optim.AdamW(foreach=True)` makes, with norms and trust ratios
behind them; no value is read back to the host.
"""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["ForeachLAMB"]


class ForeachLAMB(torch.optim.Optimizer):
    """You et al. (ICLR 2020), without a bound on the gradient; trust ratio where weights decay.

    Args:
        params: float32 parameters or groups, each with its `weight_decay`.
        lr, betas, eps: as of `bert_unpad.optim.FusedLAMB`.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Updates all parameters, which must have gradients."""
        self._steps += 1
        for group in self.param_groups:
            self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        weights, (beta1, beta2), decay = group["params"], group["betas"], group["weight_decay"]
        grads = [p.grad for p in weights]
        for p in weights:
            if not self.state[p]:
                self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        m, v = ([self.state[p][key] for p in weights] for key in "mv")
        torch._foreach_lerp_(m, grads, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
        # m / c1 / (sqrt(v / c2) + eps) = (m / (sqrt(v) + eps sqrt(c2))) sqrt(c2) / c1
        correct1, root2 = 1 - beta1**self._steps, math.sqrt(1 - beta2**self._steps)
        roots = torch._foreach_sqrt(v)
        torch._foreach_add_(roots, group["eps"] * root2)
        updates = torch._foreach_div(m, roots)
        torch._foreach_mul_(updates, root2 / correct1)
        if not decay:
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            return
        torch._foreach_add_(updates, weights, alpha=decay)
        a, b = (torch.stack(torch._foreach_norm(some)) for some in (weights, updates))
        ratios = torch.where((a > 0) & (b > 0), a / b, 1.0)
        torch._foreach_mul_(updates, list((-group["lr"] * ratios).unbind()))
        torch._foreach_add_(weights, updates)
