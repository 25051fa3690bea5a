"""Updates by a frozen variance in float64, and tensors to run the operators on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.optim_reference import State, draw_state
from tests.support.seeds import derived

BETAS, EPS = (0.9, 0.99), 1e-6


@dataclass(frozen=True)
class FrozenRule:
    """One way to update."""

    lr: float | tuple[float, ...] = 0.01
    weight_decay: float = 0.1
    averaged: bool = False
    bias_correction: bool = True
    variance_step: int | None = None
    grad_scale: float = 0.5

    def lr_of(self, i: int) -> float:
        return self.lr[i] if isinstance(self.lr, tuple) else self.lr


def draw(
    sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, masters: bool, step: int = 4
) -> State:
    """A state in the middle of a run, in which every third variance is 0."""
    state = draw_state(sizes, dtype, masters=masters)
    generator = torch.Generator().manual_seed(derived(1))
    for i, param in enumerate(state.params):
        state.exp_avgs[i] = torch.randn(param.shape, generator=generator)
        variance = torch.rand(param.shape, generator=generator) + 0.01
        variance.view(-1)[::3] = 0.0
        state.exp_avg_sqs[i] = variance
        state.steps[i] = torch.tensor(float(step))
    return state


def frozen_adam(
    state: State, grads: Sequence[Tensor], rule: FrozenRule
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and momenta after a step, float64."""
    weights, momenta = [], []
    for i, grad in enumerate(grads):
        w = (state.masters or state.params)[i].double()
        v, g = state.exp_avg_sqs[i].double(), grad.double() * rule.grad_scale
        m = g if rule.averaged else BETAS[0] * state.exp_avgs[i].double() + (1 - BETAS[0]) * g
        m = torch.where(v > 0, m, 0.0)
        correct1 = correct2 = 1.0
        if rule.bias_correction:
            step = int(state.steps[i]) + 1
            correct1 = 1 - BETAS[0] ** step
            counted = step if rule.variance_step is None else rule.variance_step
            correct2 = 1 - BETAS[1] ** counted
        update = m / correct1 / ((v / correct2).sqrt() + EPS)
        update = torch.where(v > 0, update, 0.0)
        lr = rule.lr_of(i)
        weights.append(w - lr * rule.weight_decay * w - lr * update)
        momenta.append(m)
    return weights, momenta


def frozen_lamb(
    weight: Tensor, momentum: Tensor, before: Tensor, frozen: Tensor, fresh: Tensor, decay: float
) -> tuple[Tensor, Tensor]:
    """The sums of a tensor, float64 [3], and its fresh variance."""
    w, m, before, v, fresh = (x.double() for x in (weight, momentum, before, frozen, fresh))
    g = (m - BETAS[0] * before) / (1 - BETAS[0])
    fresh = BETAS[1] * fresh + (1 - BETAS[1]) * g * g
    update = torch.where(v > 0, m / (v.sqrt() + EPS), 0.0)
    ratio = torch.where(v > 0, (v.sqrt() + EPS) / (fresh.sqrt() + EPS), 0.0)
    largest = ratio.max() if ratio.numel() else ratio.sum()
    sums = [update.square().sum(), (update + decay * w).square().sum(), largest]
    return torch.stack(sums), fresh
