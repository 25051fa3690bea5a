"""Comm hooks of optimizers that communicate by themselves."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bert_unpad.distributed import OptimizerAllreduce, allreduce_hook
from bert_unpad.optim.one_bit import OneBitOptimizer
from bert_unpad.pretrain.config import CommConfig, ConfigError
from bert_unpad.pretrain.gradients.comm_hook import CommHook, all_agree
from bert_unpad.pretrain.ranks import Ranks


class OptimizerSync(CommHook):
    """The comm hook of an optimizer that communicates by itself.

    Gradients are averaged when its next step takes averaged ones, and stay on their rank when it
    takes each rank's own. Whether a step is left out stays common to all.
    """

    def __init__(self, config: CommConfig, ranks: Ranks, optimizer: Any) -> None:
        if config.hook != "allreduce":
            raise ConfigError(
                "comm.hook",
                f"expected allreduce with an optimizer that communicates by itself, got "
                f"{config.hook}",
            )
        self.averages_gradients = True
        self.hook = allreduce_hook
        self.state = self.allreduce = OptimizerAllreduce(self)
        self._ranks, self._optimizer = ranks, optimizer

    @property
    def name(self) -> str:
        return type(self._optimizer).__name__

    def start(self, done: int) -> None:
        self.averages_gradients = self._optimizer.averages_gradients

    def agree(self, finite: Tensor) -> Tensor:
        return all_agree(self._ranks, finite)

    def after_update(self, parameters: Iterable[nn.Parameter]) -> None:
        self.averages_gradients = self._optimizer.averages_gradients


class OneBitSync(OptimizerSync):
    """After the warm-up of a one-bit optimizer each rank has errors of its own.

    Between two exchanges, if these are several updates apart, models and momenta differ too.
    """

    _optimizer: OneBitOptimizer

    def __init__(self, config: CommConfig, ranks: Ranks, optimizer: OneBitOptimizer) -> None:
        super().__init__(config, ranks, optimizer)
        optimizer.freeze_step = config.start

    def start(self, done: int) -> None:
        self._optimizer.updates = done
        super().start(done)

    def synchronise(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._optimizer.synchronise()

    def local_state(self) -> dict[str, Any] | None:
        state = self._optimizer.local_state()
        return state and {name: error.cpu() for name, error in state.items()}

    def load_local_state(self, state: dict[str, Any]) -> None:
        self._optimizer.load_local_state(state)
