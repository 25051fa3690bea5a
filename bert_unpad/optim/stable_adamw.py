"""FusedStableAdamW: AdamW with update clipping, for all parameters at once."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad.ops.optim import stable_adamw_
from bert_unpad.optim.parameter_lists import Update
from bert_unpad.optim.two_passes import TwoPassOptimizer


class FusedStableAdamW(TwoPassOptimizer):
    """StableAdamW (Wortsman et al., NeurIPS 2023, arXiv:2304.13013).

    AdamW whose learning rate is divided, for each parameter, by max(1, RMS). RMS^2 is the mean of
    g^2 / max(v, eps^2) over the parameter's elements, with v the second moment after this step's
    gradient g, corrected for its bias. So a parameter moves less where the second moment
    underestimates the gradient, as after a sudden change of the data. The state has the layout of
    `torch.optim.AdamW`.

    Args:
        params, lr, betas, eps, maximize, master_weights, skip_non_finite, norm_group: as in
            `FusedAdam`.
        weight_decay: decay rate, multiplied by the divided learning rate as the update is.
        max_grad_norm: bound on the norm of all gradients together; None: do not clip.

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
        maximize: bool = False,
        master_weights: bool = False,
        max_grad_norm: float | None = None,
        skip_non_finite: bool = False,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "master_weights": master_weights,
        }
        super().__init__(params, options, max_grad_norm, skip_non_finite, norm_group)

    def _update_whole(self, updates: Sequence[Update]) -> None:
        for group, parameters, common in updates:
            stable_adamw_(
                *parameters.arrays,
                parameters.tensors["step"],
                masters=parameters.tensors["master_param"],
                betas=tuple(group["betas"]),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                max_grad_norm=self.max_grad_norm or 0.0,
                maximize=group["maximize"],
                **common,
            )

    def _first_passes(self, updates: Sequence[Update]) -> list[tuple[Tensor, Tensor]]:
        return [
            torch.ops.bert_unpad.stable_adamw_moments_(
                *(*x.arrays, x.tensors["master_param"], x.tensors["step"]),
                *(common["lr"], common["grad_scale"], common["norm"], common["skipped"]),
                *(*group["betas"], group["eps"], group["weight_decay"]),
                *(self.max_grad_norm or 0.0, group["maximize"]),
            )
            for group, x, common in updates
        ]

    def _second_pass(self, update: Update, sums: Tensor, coefficients: Tensor) -> None:
        group, parameters, _ = update
        torch.ops.bert_unpad.stable_adamw_apply_(
            *(*parameters.arrays, parameters.tensors["master_param"], sums, coefficients),
            *(group["eps"], group["weight_decay"]),
        )
