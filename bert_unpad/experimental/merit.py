"""MERIT: Adam's update with a trust ratio for each element, of maxima instead of L2 norms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bert_unpad.optim.checks import check_options


class MERIT(torch.optim.Optimizer):
    """Luo et al., "MERIT: Maximum-normalized Element-wise Ratio for Language Model Large-batch
    Training" (ICML 2025), arXiv:2508.20577.

    With the moments m and v of Adam, not corrected for their bias, u = m / (sqrt(v) + eps) +
    weight_decay * w. LAMB scales u by |w| / |u|, L2 norms of the whole weight. Here the element in
    row i and column j is scaled by the greatest of three ratios: max|w| / max|u| over row i, over
    column j, and over the whole weight; by 1 where a row or column of either is zero. Each element
    is then clipped to -1 .. 1 and multiplied by lr. A parameter with one dimension has the last
    ratio only.

    Args:
        params: parameters or groups; dimensions after the first count as one.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decay rate, inside the ratios.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    updates_by = "parameters"  # for the trainer

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
    ) -> None:
        check_options(lr, betas, eps, weight_decay)
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient; see `FusedAdam`."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError("MERIT does not support sparse gradients")
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                first = state["exp_avg"].lerp_(p.grad, 1 - beta1)
                second = state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * p
                update.mul_(_trust_ratio(p, update)).clamp_(-1, 1)
                p.sub_(update, alpha=group["lr"])
        return loss


def _trust_ratio(weight: Tensor, update: Tensor) -> Tensor:
    """The factors of the elements of an update, of its shape or one that broadcasts to it."""
    if not weight.numel():
        return torch.ones_like(weight)
    weight, update = weight.abs(), update.abs()
    ratio, found = _ratio(weight.max(), update.max())
    if weight.dim() < 2:
        return torch.where(found, ratio, 1.0)
    rows = (weight.flatten(1), update.flatten(1))
    by_row, row_found = _ratio(*(x.amax(1, keepdim=True) for x in rows))
    by_column, column_found = _ratio(*(x.amax(0, keepdim=True) for x in rows))
    ratios = torch.where(
        row_found & column_found, torch.maximum(by_row, by_column).maximum(ratio), 1.0
    )
    return ratios.view_as(weight)


def _ratio(weight: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """The ratio of maxima, and whether both are above zero; where not, the ratio is anything."""
    return weight / update, (weight > 0) & (update > 0)
