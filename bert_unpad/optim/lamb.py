"""FusedLAMB: LAMB and LANS for all parameters at once."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad.ops.optim import lamb_, multi_tensor_l2norm
from bert_unpad.optim.parameter_lists import Update, sum_over_shards
from bert_unpad.optim.two_passes import TwoPassOptimizer


class FusedLAMB(TwoPassOptimizer):
    """LAMB (You et al., ICLR 2020) in MLPerf's variant for BERT, or LANS (Zheng et al., 2020).

    The gradient g is divided by max(1, |g| / max_grad_norm). The update of each parameter w,
    u = m / (sqrt(v) + eps) + weight_decay * w, is then scaled by lr * |w| / |u|. The state has the
    layout of `torch.optim.AdamW`.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction: as in `FusedAdam`.
        maximize, master_weights, skip_non_finite, norm_group: as in `FusedAdam`.
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

    def _own_norms(self, updates: Sequence[Update]) -> list[Tensor | None]:
        """The norm of each gradient, for LANS; in one allreduce over the shards."""
        lans = [update.parameters for update in updates if update.group["nesterov"]]
        squares = [multi_tensor_l2norm(x.tensors["grad"])[1].square() for x in lans]
        norms = iter(sum_over_shards(lans, squares))
        return [next(norms).sqrt() if u.group["nesterov"] else None for u in updates]

    def _update_whole(self, updates: Sequence[Update]) -> None:
        norms = self._own_norms(updates)
        for (group, parameters, common), own in zip(updates, norms, strict=True):
            lamb_(
                *parameters.arrays,
                parameters.tensors["step"],
                masters=parameters.tensors["master_param"],
                grad_norms=own,
                betas=tuple(group["betas"]),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                max_grad_norm=self.max_grad_norm or 0.0,
                grad_averaging=group["grad_averaging"],
                bias_correction=group["bias_correction"],
                trust_ratio=adapts(group),
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                **common,
            )

    def _first_passes(self, updates: Sequence[Update]) -> list[tuple[Tensor, Tensor]]:
        norms = self._own_norms(updates)
        return [
            torch.ops.bert_unpad.lamb_moments_(
                *(*x.arrays, x.tensors["master_param"], x.tensors["step"]),
                *(common["lr"], common["grad_scale"], common["norm"], own, common["skipped"]),
                *(*group["betas"], group["eps"], group["weight_decay"]),
                *(self.max_grad_norm or 0.0, group["grad_averaging"], group["bias_correction"]),
                *(group["nesterov"], group["maximize"]),
            )
            for (group, x, common), own in zip(updates, norms, strict=True)
        ]

    def _second_pass(self, update: Update, sums: Tensor, coefficients: Tensor) -> None:
        group, parameters, _ = update
        torch.ops.bert_unpad.lamb_apply_(
            *(*parameters.arrays, parameters.tensors["master_param"], sums, coefficients),
            *(group["betas"][0], group["eps"], group["weight_decay"]),
            *(adapts(group), group["nesterov"]),
        )


def adapts(group: dict[str, Any]) -> bool:
    """Whether updates of a group are scaled by the trust ratio."""
    wanted = group.get("trust_ratio", True)
    return wanted and (group["always_adapt"] or group["weight_decay"] != 0)
