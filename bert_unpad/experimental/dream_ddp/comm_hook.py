"""The trainer's comm hook `dream_ddp`."""

from typing import Any

import torch
from torch import Tensor, nn

from bert_unpad.experimental.dream_ddp import PartialSync, partial_sync_hook
from bert_unpad.pretrain.config import CommConfig
from bert_unpad.pretrain.gradients.comm_hook import CommHook, all_agree, average_models
from bert_unpad.pretrain.ranks import Ranks


class DreamDDP(CommHook):
    """Layer-wise averages of models that are updated locally, see `PartialSync`.

    Once the schedule is made, the ranks' models and optimizer states differ, except where
    `synchronise` has just made them the same. Whether a step is left out stays common to all.
    """

    def __init__(self, config: CommConfig, ranks: Ranks, optimizer: Any) -> None:
        self.hook = partial_sync_hook
        self.state = PartialSync(config.local_sgd_period, config.start)
        self._ranks = ranks

    def start(self, done: int) -> None:
        self.state.step = done

    def agree(self, finite: Tensor) -> Tensor:
        self.state.finish()
        return all_agree(self._ranks, finite)

    def synchronise(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        if self.state.schedule is not None:
            average_models(self._ranks, model, optimizer)

    def local_state(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_local_state(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)
