"""Adam and AdamW."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from bert_unpad.ops.optim import adam_
from bert_unpad.optim.base import Bucket, FusedOptimizer

__all__ = ["FusedAdam"]


class FusedAdam(FusedOptimizer):
    """AdamW (Loshchilov and Hutter, ICLR 2019), or Adam with L2, in one pass over all parameters.

    State dicts load from `torch.optim.AdamW` and into it. On a GPU steps and a tensor learning rate
    stay on the device, so a step can be captured in a CUDA graph.

    Args:
        params: parameters or groups: float32, bfloat16 or float16, contiguous; also DTensors.
        lr: learning rate; a tensor to change it between replays of a captured graph.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: see `decoupled_weight_decay`.
        decoupled_weight_decay: AdamW's decay; else it is added to the gradient.
        bias_correction: of the moments.
        maximize: ascend.
        master_weights: keep float32 weights of 16-bit parameters, in the state.
        max_grad_norm: gradients are divided by max(1, norm / this); None: never.
        skip_non_finite: leave a step out, and count it in `skipped_steps`, where a gradient is
            infinite or NaN. Costs a pass over the gradients, as `max_grad_norm` does, which implies
            it.
        norm_group: adds the squares of norms up over these processes too: for
            ZeroRedundancyOptimizer, whose ranks see some of the parameters each.
        amsgrad: must be False.

    Raises:
        ValueError: for a number out of range, naming it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled_weight_decay: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
        master_weights: bool = False,
        max_grad_norm: float | None = None,
        skip_non_finite: bool = False,
        norm_group: dist.ProcessGroup | None = None,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise ValueError("FusedAdam: amsgrad is not supported")
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
            "master_weights": master_weights,
        }
        super().__init__(params, options, max_grad_norm, skip_non_finite, norm_group)

    def _update(self, group: dict[str, Any], bucket: Bucket, common: dict[str, Any]) -> None:
        lists = bucket.lists
        adam_(
            *(lists["param"], lists["grad"], lists["exp_avg"], lists["exp_avg_sq"], lists["step"]),
            masters=lists["master_param"],
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            max_grad_norm=self.max_grad_norm or 0.0,
            decoupled=group["decoupled_weight_decay"],
            bias_correction=group["bias_correction"],
            maximize=group["maximize"],
            **common,
        )
