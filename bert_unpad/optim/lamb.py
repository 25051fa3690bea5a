"""FusedLAMB: LAMB and LANS in one pass over all parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad.ops.optim import lamb_, multi_tensor_l2norm
from bert_unpad.optim.base import FusedOptimizer, ParameterList


class FusedLAMB(FusedOptimizer):
    """LAMB (You et al., ICLR 2020) in MLPerf's variant for BERT, or LANS (Zheng et al., 2020).

    The gradient g is divided by max(1, |g| / max_grad_norm). The update of each parameter w,
    u = m / (sqrt(v) + eps) + weight_decay * w, is then scaled by lr * |w| / |u|. The state has the
    layout of `torch.optim.AdamW`.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction, maximize, master_weights,
        skip_non_finite, norm_group: as in `FusedAdam`.
        max_grad_norm: bound on the norm of all gradients together; None: do not clip.
        grad_averaging: the gradient enters the momentum times 1 - betas[0], else times 1.
        trust_ratio: scale updates by |w| / |u|; a parameter group may set it too.
        always_adapt: apply the ratio to parameters without weight decay too.
        nesterov: LANS, which divides each gradient by its own norm instead of clipping to
            `max_grad_norm`.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        trust_ratio: bool = True,
        always_adapt: bool = False,
        nesterov: bool = False,
        maximize: bool = False,
        master_weights: bool = False,
        max_grad_norm: float | None = 1.0,
        skip_non_finite: bool = False,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "trust_ratio": trust_ratio,
            "always_adapt": always_adapt,
            "nesterov": nesterov,
            "master_weights": master_weights,
        }
        super().__init__(params, options, max_grad_norm, skip_non_finite, norm_group)

    def _update(
        self, group: dict[str, Any], parameters: ParameterList, common: dict[str, Any]
    ) -> None:
        lists = parameters.tensors
        adapt = group["trust_ratio"] and (group["always_adapt"] or group["weight_decay"] != 0)
        own_norms = None
        if group["nesterov"]:
            squares = multi_tensor_l2norm(lists["grad"])[1].square()
            own_norms = parameters.sum_over_shards(squares).sqrt()
        tensors = (lists["param"], lists["grad"], lists["exp_avg"], lists["exp_avg_sq"])
        beta1, beta2 = group["betas"]
        eps, decay = group["eps"], group["weight_decay"]
        if not parameters.shards:
            lamb_(
                *(*tensors, lists["step"]),
                masters=lists["master_param"],
                grad_norms=own_norms,
                betas=(beta1, beta2),
                eps=eps,
                weight_decay=decay,
                max_grad_norm=self.max_grad_norm or 0.0,
                grad_averaging=group["grad_averaging"],
                bias_correction=group["bias_correction"],
                trust_ratio=adapt,
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                **common,
            )
            return
        op = torch.ops.bert_unpad
        sums, coefficients = op.lamb_moments_(
            *(*tensors, lists["master_param"], lists["step"], common["lr"], common["grad_scale"]),
            *(common["norm"], own_norms, common["skipped"], beta1, beta2, eps, decay),
            *(self.max_grad_norm or 0.0, group["grad_averaging"], group["bias_correction"]),
            *(group["nesterov"], group["maximize"]),
        )
        sums = parameters.sum_over_shards(sums)
        op.lamb_apply_(
            *(*tensors, lists["master_param"], sums, coefficients, beta1, eps),
            *(decay, adapt, group["nesterov"]),
        )
