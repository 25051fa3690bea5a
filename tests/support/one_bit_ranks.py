"""1-bit Adam, 1-bit LAMB and 0/1 Adam on several ranks, simulated in float64, in plain PyTorch.

Each is written as its paper has it, with one list of tensors a rank. A sign that rounding could
turn would make two right runs differ for good, so `Signs` says how near to 0 it has come.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support.seeds import derived

__all__ = ["SHAPES", "Signs", "Simulation", "gradient", "lr_of", "simulate_surely", "start"]

# Odd sizes; one parameter of a size that is no multiple of 4 in front of others.
SHAPES = [(7, 3), (12, 5), (9,), (4,), (2,)]
DECAYED = 2  # the first so many have weight decay
UNTRAINED = 3  # rows of the second that never have a gradient
PART = 128  # a rank's part of the buffer is a multiple of this


def start() -> list[Tensor]:
    """Weights at the beginning, float32."""
    generator = torch.Generator().manual_seed(derived(5))
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def gradient(weights: list[Tensor], rank: int, step: int, draw: int = 0) -> list[Tensor]:
    """A rank's gradient of a quadratic loss with noise, in the weights' dtype."""
    generator = torch.Generator().manual_seed(derived(10_000 * draw + 1000 * rank + step))
    grads = []
    for number, weight in enumerate(weights):
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        grad = weight - 0.5 * number + rank * 0.3 + noise.to(weight.dtype)
        if number == 1:
            grad[-UNTRAINED:] = 0.0
        grads.append(grad)
    return grads


def lr_of(step: int) -> float:
    """A learning rate that changes."""
    return 0.05 / (1 + 0.1 * step)


class Signs:
    """The compressed average: errors of all ranks, and how near a value has come to 0."""

    def __init__(self, ranks: int, numel: int) -> None:
        part = -(-numel // (ranks * PART)) * PART
        self.worker = torch.zeros(ranks, numel, dtype=torch.float64)
        self.server = [chunk.clone() for chunk in torch.zeros(numel).double().split(part)]
        self.nearest = 1.0

    def _compress(self, whole: Tensor) -> Tensor:
        scale = whole.square().mean().sqrt()
        near = whole.abs() / scale
        self.nearest = min(self.nearest, float(near[near > 0].min()))  # an exact 0 is one for all
        return torch.where(torch.signbit(whole), -scale, scale)

    def average(self, rows: Tensor) -> Tensor:
        """The average of [ranks, numel] as all ranks get it."""
        whole = rows + self.worker
        sent = torch.stack([self._compress(row) for row in whole])
        self.worker = whole - sent
        parts = []
        for number, mean in enumerate(sent.mean(0).split(len(self.server[0]))):
            whole = mean + self.server[number]
            parts.append(self._compress(whole))
            self.server[number] = whole - parts[-1]
        return torch.cat(parts)


@dataclass
class Simulation:
    """What an optimizer of all ranks is after some steps."""

    weights: list[list[Tensor]]
    """By rank."""
    momenta: list[list[Tensor]]
    variances: list[Tensor]
    signs: Signs
    history: list[list[Tensor]] = field(default_factory=list)
    """Weights of rank 0 after each step, flat."""


class _Ranks:
    def __init__(self, ranks: int, betas: tuple[float, float], eps: float, decay: float) -> None:
        self.x = [[w.double() for w in start()] for _ in range(ranks)]
        self.m = [[torch.zeros_like(w) for w in self.x[0]] for _ in range(ranks)]
        self.v = [torch.zeros_like(w) for w in self.x[0]]
        self.betas, self.eps, self.ranks = betas, eps, ranks
        self.decays = [decay if i < DECAYED else 0.0 for i in range(len(SHAPES))]
        self.order = sorted(range(len(SHAPES)), key=lambda i: self.v[i].numel() % 4 != 0)
        self.signs = Signs(ranks, sum(v.numel() for v in self.v))
        self.draw = 0

    def gradients(self, step: int) -> list[list[Tensor]]:
        return [gradient(self.x[r], r, step, self.draw) for r in range(self.ranks)]

    def mean(self, lists: list[list[Tensor]]) -> list[Tensor]:
        return [torch.stack(tensors).mean(0) for tensors in zip(*lists, strict=True)]

    def compressed(self, lists: list[list[Tensor]]) -> list[Tensor]:
        rows = [torch.cat([tensors[i].flatten() for i in self.order]) for tensors in lists]
        flat = self.signs.average(torch.stack(rows))
        sizes = [self.v[i].numel() for i in self.order]
        parts = dict(zip(self.order, flat.split(sizes), strict=True))
        # What never had a gradient has no momentum.
        return [torch.where(v > 0, parts[i].view(v.shape), 0.0) for i, v in enumerate(self.v)]

    def blend(self, old: list[Tensor], new: list[Tensor], beta: float) -> list[Tensor]:
        return [beta * a + (1 - beta) * b for a, b in zip(old, new, strict=True)]

    def set_all(self, name: str, tensors: list[Tensor]) -> None:
        setattr(self, name, [list(tensors) for _ in range(self.ranks)])

    def divided(self, m: Tensor, v: Tensor, correct1: float = 1.0, correct2: float = 1.0) -> Tensor:
        """The update by a momentum, 0 where there never was a gradient."""
        return torch.where(v > 0, m / correct1 / ((v / correct2).sqrt() + self.eps), 0.0)


class _OneBitAdam(_Ranks):
    def __init__(self, ranks: int, freeze: int, decay: float, correct: bool) -> None:
        super().__init__(ranks, (0.9, 0.99), 1e-6, decay)
        self.freeze, self.correct = freeze, correct

    def step(self, t: int) -> None:
        beta1, beta2 = self.betas
        grads = self.gradients(t)
        if t < self.freeze:
            mean = self.mean(grads)
            m = self.blend(self.m[0], mean, beta1)
            self.v = self.blend(self.v, [g * g for g in mean], beta2)
        else:
            m = self.compressed([self.blend(self.m[0], own, beta1) for own in grads])
        correct1 = 1 - beta1 ** (t + 1) if self.correct else 1.0
        correct2 = 1 - beta2 ** min(t + 1, self.freeze) if self.correct else 1.0
        lr, x = lr_of(t), []
        for i, w in enumerate(self.x[0]):
            update = self.divided(m[i], self.v[i], correct1, correct2) + self.decays[i] * w
            x.append(w - lr * update)
        self.set_all("m", m)
        self.set_all("x", x)


class _OneBitLAMB(_Ranks):
    COEFF, FACTOR, CHANGE, BETA = (0.01, 10.0), (0.5, 4.0), 0.1, 0.6

    def __init__(self, ranks: int, freeze: int, decay: float, correct: bool) -> None:
        super().__init__(ranks, (0.9, 0.99), 1e-6, decay)
        self.freeze = freeze
        self.average = [0.0] * len(self.v)
        self.factor = [1.0] * len(self.v)

    def step(self, t: int) -> None:
        beta1, beta2 = self.betas
        grads, lr = self.gradients(t), lr_of(t)
        if t < self.freeze:
            mean = self.mean(grads)
            m = self.blend(self.m[0], mean, beta1)
            self.v = self.blend(self.v, [g * g for g in mean], beta2)
            x = [w - lr * self._warm(i, w, m[i]) for i, w in enumerate(self.x[0])]
        else:
            if t == self.freeze:
                self.fresh = [v.clone() for v in self.v]
                roots = [old.square().mean().sqrt() for old in self.m[0]]
                self.scale = [sum(roots) / len(roots) / root for root in roots]
            rows = [self.blend(self.m[0], own, beta1) for own in grads]
            rows = [[a * c for a, c in zip(row, self.scale, strict=True)] for row in rows]
            m = [a / c for a, c in zip(self.compressed(rows), self.scale, strict=True)]
            x = [w - lr * self._compressed_update(i, w, m[i]) for i, w in enumerate(self.x[0])]
        self.set_all("m", m)
        self.set_all("x", x)

    def _warm(self, i: int, w: Tensor, m: Tensor) -> Tensor:
        update = m / (self.v[i].sqrt() + self.eps) + self.decays[i] * w
        if self.decays[i] == 0:
            return update
        coeff = float((w.norm() / update.norm()).clamp(*self.COEFF))
        if coeff != 1:
            self.average[i] = self.BETA * self.average[i] + (1 - self.BETA) * coeff
        return coeff * update

    def _compressed_update(self, i: int, w: Tensor, m: Tensor) -> Tensor:
        (beta1, beta2), v = self.betas, self.v[i]
        adam = self.divided(m, v)
        update = adam + self.decays[i] * w
        if self.decays[i] == 0:
            return update
        g = (m - beta1 * self.m[0][i]) / (1 - beta1)
        self.fresh[i] = beta2 * self.fresh[i] + (1 - beta2) * g * g
        ratio = (v.sqrt() + self.eps) / (self.fresh[i].sqrt() + self.eps)
        part = min(1.0, float(adam.norm() / update.norm()))
        factor = float(ratio[v > 0].max()) * part + 1 - part
        factor = min(max(factor, self.FACTOR[0]), self.FACTOR[1])
        last = self.factor[i]
        factor = min(max(factor, last * (1 - self.CHANGE)), last * (1 + self.CHANGE))
        self.factor[i] = factor
        return self.average[i] * factor * update


class _ZeroOneAdam(_Ranks):
    KAPPA, SCALER, CLIPPER = 2, 4, 4

    def __init__(self, ranks: int, freeze: int, decay: float, correct: bool) -> None:
        super().__init__(ranks, (0.9, 0.99), 1e-6, decay)
        self.freeze = freeze
        # T_v: the distance doubles after each KAPPA steps of it.
        self.variance_steps, step, number = set(), 0, 0
        while step < freeze:
            self.variance_steps.add(step)
            number += 1
            step += 2 ** ((number - 1) // self.KAPPA)
        self._begin_interval()

    def _begin_interval(self) -> None:
        self.anchor, self.rate, self.kept = [w.clone() for w in self.x[0]], 0.0, 1.0
        self.u = [[torch.zeros_like(w) for w in self.v] for _ in range(self.ranks)]

    def step(self, t: int) -> None:
        beta1, beta2 = self.betas
        grads, lr = self.gradients(t), lr_of(t)
        together = t in self.variance_steps
        if together:
            mean = self.mean(grads)
            grads = [mean] * self.ranks
            self.v = self.blend(self.v, [g * g for g in mean], beta2)
        self.rate += lr
        for rank in range(self.ranks):
            self.m[rank] = self.blend(self.m[rank], grads[rank], beta1)
            for i, w in enumerate(self.x[rank]):
                keep = 1 - lr * self.decays[i]
                self.x[rank][i] = keep * w - lr * self.divided(self.m[rank][i], self.v[i])
                self.u[rank][i] = keep * self.u[rank][i] + lr * self.m[rank][i]
        for i, w in enumerate(self.anchor):
            self.anchor[i] = (1 - lr * self.decays[i]) * w
        later = max(t - self.freeze, 0) // self.SCALER
        if (t + 1) % min(2**later, self.CLIPPER):
            return
        if not together:  # all ranks have the same else
            u = self.compressed(self.u)
            x = [w - self.divided(a, v) for w, a, v in zip(self.anchor, u, self.v, strict=True)]
            self.set_all("x", x)
            self.set_all("m", [a / self.rate for a in u])
        self._begin_interval()


KINDS: dict[str, Callable[..., _Ranks]] = {
    "onebit_adam": _OneBitAdam,
    "onebit_lamb": _OneBitLAMB,
    "zero_one_adam": _ZeroOneAdam,
}


def simulate_surely(*args: Any) -> tuple[int, Simulation]:
    """The first draw of noise with which no sign is one that rounding could turn, and its run."""
    for draw in range(100):  # one in ten is not
        found = simulate(*args, draw=draw)
        if found.signs.nearest > 1e-5:
            return draw, found
    raise AssertionError("100 draws with a value near to 0")


def simulate(
    kind: str,
    ranks: int,
    steps: int,
    freeze: int,
    decay: float,
    correct: bool = True,
    draw: int = 0,
) -> Simulation:
    """Runs `steps` steps of an optimizer from `start`."""
    run = KINDS[kind](ranks, freeze, decay, correct)
    run.draw = draw
    history = []
    for t in range(steps):
        run.step(t)
        history.append(torch.cat([w.flatten() for w in run.x[0]]))
    return Simulation(run.x, run.m, run.v, run.signs, history)
