"""OneBitLAMB: LAMB whose ranks exchange one bit a value once its variance is stable."""

from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad.ops.optim import frozen_lamb_sums_, multi_tensor_l2norm
from bert_unpad.optim.checks import check_number
from bert_unpad.optim.lamb import adapts
from bert_unpad.optim.one_bit import OneBitOptimizer, Scale, Segment
from bert_unpad.optim.parameter_lists import ParameterList, scalar

_ops = torch.ops.bert_unpad


class OneBitLAMB(OneBitOptimizer):
    """1-bit LAMB (Li et al., HiPC 2022, arXiv:2104.06069), as in its authors' implementation.

    For `freeze_step` steps it is LAMB on averaged gradients: the update of each tensor,
    u = m / (sqrt(v) + eps) + weight_decay * w, is scaled by lr * c with c = |w| / |u|, within
    `min_coeff` and `max_coeff`. A running average c' of c, with decay rate `coeff_beta`, is kept.

    Then v stays as it is, gradients are no longer averaged, and each step averages the momenta over
    the ranks, with one bit a value and error feedback (`distributed.OneBitAllreduce`). Before, the
    momentum of each tensor is multiplied by `scaling_coeff`, which gave all momenta one root mean
    square at the end of the warm-up. c becomes c' * r: from two momenta that follow each other the
    gradient is computed, which moves a second, fresh variance on, and r is the largest ratio of
    sqrt(v) + eps to that of the fresh one, weighed by the part of |u| that is not weight decay. r
    stays within `factor_min` and `factor_max`, and within `factor_threshold` of its last value.

    There is no bias correction. Parameters without weight decay have c = 1 unless `always_adapt`
    (as in `FusedLAMB`), and so are updated as in `OneBitAdam`. What `OneBitAdam` says about
    gradients, weights that had none, and one rank holds here too.

    `state_dict` has the names of `torch.optim.AdamW`, and `exp_avg_sq_fresh`, `lamb_coeff` (c'),
    `last_factor` (r), `scaling_coeff` and `variance_step`.

    Args:
        params, lr, betas, eps, weight_decay, freeze_step, master_weights, skip_non_finite, group:
            as in `OneBitAdam`.
        scale: as in `OneBitAdam`. All but "buffer" take the place of `scaling_coeff`.
        always_adapt: apply the ratio to parameters without weight decay too.
        min_coeff, max_coeff: bounds of c while gradients are averaged.
        coeff_beta: decay rate of the average of c; 1 / (1 - coeff_beta) should be at most
            `freeze_step`, because the average begins at 0.
        factor_min, factor_max: bounds of r.
        factor_threshold: largest relative change of r in a step.

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
        freeze_step: int = 1000,
        always_adapt: bool = False,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        coeff_beta: float = 0.9,
        factor_min: float = 0.5,
        factor_max: float = 4.0,
        factor_threshold: float = 0.1,
        master_weights: bool = False,
        skip_non_finite: bool = False,
        group: dist.ProcessGroup | None = None,
        scale: Scale = "buffer",
    ) -> None:
        for name, low, high in (
            ("min_coeff", min_coeff, max_coeff),
            ("factor_min", factor_min, factor_max),
        ):
            if not (isinstance(low, Real) and isinstance(high, Real) and 0 < low <= high):
                raise ValueError(f"{name}: expected a number > 0, at most {high!r}, got {low!r}")
        check_number("coeff_beta", coeff_beta, below=1)
        check_number("factor_threshold", factor_threshold, below=1)
        self.min_coeff, self.max_coeff, self.coeff_beta = min_coeff, max_coeff, coeff_beta
        self.factor_min, self.factor_max = factor_min, factor_max
        self.factor_threshold = factor_threshold
        self._scales: list[list[float]] = []  # scaling_coeff by segment, once it is known here
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options |= {"always_adapt": always_adapt, "master_weights": master_weights}
        super().__init__(params, options, freeze_step, skip_non_finite, group, scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of `torch.optim.AdamW`; see `FusedAdam`."""
        super().load_state_dict(state_dict)
        self._scales = []

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = super()._state_of(param, group)
        if "lamb_coeff" not in state:
            for name, value in (("variance_step", 0), ("lamb_coeff", 0)):
                state[name] = torch.full_like(state["step"], value)
            for name in ("last_factor", "scaling_coeff"):
                state[name] = torch.ones_like(state["step"])
            if adapts(group):
                state["exp_avg_sq_fresh"] = torch.zeros_like(state["exp_avg_sq"])
        return state

    def _update(
        self, group: dict[str, Any], parameters: ParameterList, common: dict[str, Any]
    ) -> None:
        lists, adapt, self._scales = parameters.tensors, adapts(group), []
        tensors = (lists["param"], lists["grad"], lists["exp_avg"], lists["exp_avg_sq"])
        (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
        sums, rows = _ops.lamb_moments_(
            *(*tensors, lists["master_param"], lists["step"], common["lr"], common["grad_scale"]),
            *(common["norm"], None, common["skipped"], beta1, beta2, eps, decay),
            *(0.0, True, False, False, False),
        )
        if adapt:
            coeff = (sums[:, 0] / sums[:, 1]).sqrt().clamp(self.min_coeff, self.max_coeff)
            known = (sums[:, 0] > 0) & (sums[:, 1] > 0)
            sums[:, 0] = torch.where(known, coeff.square() * sums[:, 1], sums[:, 0])
            # The average leaves out a coefficient of 1, as where a norm is 0, and a skipped step.
            known &= (coeff != 1) & (rows[:, 2] != 0)
            average = torch.stack(lists["lamb_coeff"])
            average = torch.where(known, average.lerp(coeff, 1 - self.coeff_beta), average)
            torch._foreach_copy_(lists["lamb_coeff"], list(average.unbind()))
        _ops.lamb_apply_(
            *(*tensors, lists["master_param"], sums, rows, beta1, eps, decay, adapt, False)
        )
        torch._foreach_copy_(lists["variance_step"], lists["step"])

    def _own_step(self) -> None:
        if not self._scales:
            self._begin()
        self._fill_with_momenta()
        by_tensor = self.scale == "buffer"
        for segment, scales in zip(self._segments, self._scales, strict=True):
            if by_tensor:
                torch._foreach_mul_(segment.views, scales)
        guard = self._average()
        for segment, scales in zip(self._segments, self._scales, strict=True):
            if by_tensor:
                torch._foreach_mul_(segment.views, [1 / scale for scale in scales])
            group = segment.group
            lr = scalar(group["lr"], guard.device)
            if adapts(group):
                lr = lr * self._coefficients(segment, guard)
            self._apply(segment, segment.views, lr, guard, weight_decay=group["weight_decay"])

    def _begin(self) -> None:
        """Prepares what the compressed steps need, in the first one after the warm-up.

        In later ones it only reads the scales, after a checkpoint was loaded. Waits for the device.
        """
        segments = self._segments
        first = self.state[segments[0].params[0]]
        if bool(first["variance_step"] == first["step"]):
            norms = [multi_tensor_l2norm(self._states(s, "exp_avg"))[1] for s in segments]
            counts = [[max(p.numel(), 1) for p in s.params] for s in segments]
            roots = [
                norm / norm.new_tensor(count).sqrt()
                for norm, count in zip(norms, counts, strict=True)
            ]
            mean = torch.cat(roots).mean()
            for segment, root in zip(segments, roots, strict=True):
                scales = torch.where(root > 0, mean / root, 1.0)
                torch._foreach_copy_(self._states(segment, "scaling_coeff"), list(scales.unbind()))
                torch._foreach_mul_(self._states(segment, "last_factor"), 0.0)
                torch._foreach_add_(self._states(segment, "last_factor"), 1.0)
                if adapts(segment.group):
                    fresh = self._states(segment, "exp_avg_sq_fresh")
                    torch._foreach_copy_(fresh, self._states(segment, "exp_avg_sq"))
        self._scales = [torch.stack(self._states(s, "scaling_coeff")).tolist() for s in segments]

    def _coefficients(self, segment: Segment, guard: Tensor) -> Tensor:
        """Moves the fresh variances and the factors on; c of each tensor, float32 [tensors]."""
        group, names = segment.group, ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
        sums = frozen_lamb_sums_(
            self._weights(segment),
            segment.views,
            *(self._states(segment, name) for name in names),
            norm=guard,
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        part = torch.where(sums[:, 1] > 0, (sums[:, 0] / sums[:, 1]).sqrt().clamp(max=1.0), 1.0)
        last = torch.stack(self._states(segment, "last_factor"))
        factor = (sums[:, 2] * part + (1.0 - part)).clamp(self.factor_min, self.factor_max)
        change = self.factor_threshold
        factor = torch.minimum(torch.maximum(factor, last * (1 - change)), last * (1 + change))
        factor = torch.where(guard.isfinite(), factor, last)
        torch._foreach_copy_(self._states(segment, "last_factor"), list(factor.unbind()))
        return torch.stack(self._states(segment, "lamb_coeff")) * factor
