"""Training that communicates less, simulated: all ranks in one process, in plain PyTorch.

Each function is one paper's algorithm, step by step, in float64. The tests run the same steps on
real ranks and compare all weights.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.support.seeds import derived

__all__ = [
    "Simulated",
    "gradient_flow",
    "loss",
    "mt_dao",
    "net",
    "partial_sync",
    "weights",
]


def net() -> nn.Module:
    """Layers of unlike, odd sizes, float64; always the same weights."""
    torch.manual_seed(derived(3))
    layers = [nn.Linear(7, 12), nn.Linear(12, 5), nn.Linear(5, 9), nn.Linear(9, 3)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).double()


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of one rank's batch of one step."""
    draw = torch.Generator().manual_seed(derived(100 * rank + step))
    x = torch.randn(6, 7, generator=draw, dtype=torch.float64)
    x = x.to(next(model.parameters()).device)
    return (model(x) - x[:, :3] * (1 + rank)).square().mean()


def weights(model: nn.Module) -> Tensor:
    """All parameters in a row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


class Simulated:
    """The models and optimizers of all ranks."""

    def __init__(
        self, world_size: int, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> None:
        self.models = [net() for _ in range(world_size)]
        self.optimizers = [make_optimizer(model) for model in self.models]

    def backward(self, step: int) -> None:
        """Gives every rank its own gradient."""
        for rank, model in enumerate(self.models):
            model.zero_grad()
            loss(model, rank, step).backward()

    def average(self, names: Sequence[str], gradients: bool = False) -> None:
        """Averages some parameters over the ranks, or their gradients."""
        for name in names:
            owned = [model.get_parameter(name) for model in self.models]
            values = [p.grad if gradients else p.data for p in owned]
            mean = torch.stack(values).mean(0)
            for value in values:
                value.copy_(mean)

    def update(self) -> None:
        """Lets every rank's optimizer make its step."""
        for optimizer in self.optimizers:
            optimizer.step()


def partial_sync(
    ranks: Simulated,
    buckets: Sequence[Sequence[str]],
    schedule: Sequence[Sequence[int]],
    averaged: int,
    steps: int,
) -> list[list[Tensor]]:
    """DreamDDP: the weights after each step, of every rank.

    Args:
        ranks: at their start.
        buckets: names of the parameters of each layer.
        schedule: the layers to average, by step of a period.
        averaged: steps at the start that average gradients.
        steps: steps in all.
    """
    seen = []
    for step in range(steps):
        ranks.backward(step)
        if step < averaged:
            ranks.average([name for bucket in buckets for name in bucket], gradients=True)
        else:
            due = schedule[step % len(schedule)]
            ranks.average([name for bucket in due for name in buckets[bucket]])
        ranks.update()
        seen.append([weights(model) for model in ranks.models])
    return seen


def gradient_flow(
    ranks: Simulated,
    buckets: Sequence[Sequence[str]],
    counts: Callable[[int, int], int],
    chunk_size: int,
    momentum: float,
    steps: int,
) -> list[list[Tensor]]:
    """GradientFlow: the weights after each step, of every rank.

    Args:
        ranks: at their start.
        buckets: names of the parameters of each bucket.
        counts: chunks to send of so many, in a step: `counts(step, chunks)`.
        chunk_size: elements of a chunk.
        momentum: factor on what is kept.
        steps: steps in all.
    """
    world_size = len(ranks.models)
    kept: list[dict[int, list[Tensor]]] = [{} for _ in ranks.models]  # chunks of each bucket
    norms: dict[int, list[float]] = {}
    seen = []
    for step in range(steps):
        ranks.backward(step)
        for number, names in enumerate(buckets):
            owned = [[model.get_parameter(name) for name in names] for model in ranks.models]
            chunks = [
                list(torch.cat([p.grad.flatten() for p in parameters]).split(chunk_size))
                for parameters in owned
            ]
            for rank, own in enumerate(chunks):
                before = kept[rank].get(number, [torch.zeros_like(chunk) for chunk in own])
                chunks[rank] = [
                    chunk + momentum * old for chunk, old in zip(own, before, strict=True)
                ]
            total = len(chunks[0])
            order = sorted(range(total), key=lambda i: -norms.get(number, [0.0] * total)[i])
            sent = order[: counts(step, total)]
            norms[number] = [
                sum(float(own[i].abs().sum()) for own in chunks) / world_size for i in range(total)
            ]
            result = [torch.zeros_like(chunk) for chunk in chunks[0]]
            for i in sent:
                result[i] = sum(own[i] for own in chunks) / world_size
            for rank, own in enumerate(chunks):
                kept[rank][number] = [
                    torch.zeros_like(chunk) if i in sent else chunk for i, chunk in enumerate(own)
                ]
                parts = torch.cat(result).split([p.numel() for p in owned[rank]])
                for parameter, part in zip(owned[rank], parts, strict=True):
                    parameter.grad.copy_(part.view_as(parameter))
        ranks.update()
        seen.append([weights(model) for model in ranks.models])
    return seen


def mt_dao(
    world_size: int,
    steps: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    slow_weight: float,
    fast_beta: float,
    periods: tuple[int, int, int],
    start: int,
) -> list[list[Tensor]]:
    """MT-DAO: the weights after each step, of every rank.

    Args:
        world_size: ranks.
        steps: steps in all.
        periods: steps between averages of the parameters, the momenta and the second moment.
        start: steps at the start that average gradients.

    The others are those of the optimizer.
    """
    models = [net() for _ in range(world_size)]
    size = len(weights(models[0]))
    x, u, fast, v = (torch.zeros(world_size, size, dtype=torch.float64) for _ in range(4))
    x[:] = weights(models[0])
    seen = []
    for step in range(1, steps + 1):
        gradients = []
        for rank, model in enumerate(models):
            nn.utils.vector_to_parameters(x[rank].clone(), model.parameters())
            model.zero_grad()
            loss(model, rank, step - 1).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        g = torch.stack(gradients)
        if step <= start:
            g = g.mean(0).expand_as(g)
        u = betas[0] * u + (1 - betas[0]) * g
        fast = fast_beta * fast + (1 - fast_beta) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        direction = slow_weight * u / (1 - betas[0] ** step)
        direction += (1 - slow_weight) * fast / (1 - fast_beta**step)
        x = x - lr * weight_decay * x
        x = x - lr * direction / ((v / (1 - betas[1] ** step)).sqrt() + eps)
        done = step - start
        if done > 0:
            of_x, of_u, of_v = (done % period == 0 for period in periods)
            x = x.mean(0).expand_as(x) if of_x else x
            u, fast = ((m.mean(0).expand_as(m) if of_u else m) for m in (u, fast))
            v = v.mean(0).expand_as(v) if of_v else v
        seen.append([row.clone() for row in x])
    return seen
