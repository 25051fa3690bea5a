"""Optimizers that a user might have written, which runs name by their import path."""

from typing import Any

import torch


class Mixed(torch.optim.Optimizer):
    """Signed momentum whose state is of all kinds that a checkpoint can hold.

    Counts and an average are in the parameter groups, and of each parameter a momentum in float64,
    a list of tensors, one of them in int8, a dictionary, numbers, and None.
    """

    updates_by = "parameters"

    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.0, beta: float = 0.9
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float64)
                    state["lists"] = [torch.zeros_like(p, dtype=torch.int8), [torch.zeros(())]]
                    state["more"] = {"nothing": None, "share": 0.5, "pair": (1, 2.5), "text": "x"}
                    state["number"] = 0
                state["number"] += 1
                state["more"]["share"] = (state["more"]["share"] + 1.0 / state["number"]) / 2
                state["momentum"].lerp_(p.grad.double(), 1 - group["beta"])
                state["lists"][0] = state["momentum"].sign().to(torch.int8)
                state["lists"][1][0] = p.grad.abs().mean().cpu()
                size = state["more"]["share"] * (1 + float(state["lists"][1][0])) / group["count"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(state["lists"][0], alpha=group["lr"] * size)


class Keeper(torch.optim.SGD):
    """Keeps an object that cannot be loaded without running code."""

    def step(self, closure: None = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["object"] = self.__class__


class Global(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: None = None) -> None:
        super().step()
        self.state["steps"] = 1


class Mistaken(torch.optim.SGD):
    """Declares what nobody knows."""

    updates_by = "element"


class Swapped(torch.optim.SGD):
    """Trains other weights than it evaluates, as schedule-free optimizers do."""

    def eval(self) -> None:
        """Puts the weights to evaluate in place."""


class Anything(torch.optim.SGD):
    """Takes arguments that it does not know."""

    def __init__(self, params: Any, lr: float = 0.1, **others: Any) -> None:
        super().__init__(params, lr)
