"""The trainer's comm hook of `optimizer.name` mt_dao."""

import torch
from torch import nn

from bert_unpad.experimental.mt_dao import MTDAO
from bert_unpad.pretrain.config import CommConfig
from bert_unpad.pretrain.gradients.comm_hook import CommHook, average_models
from bert_unpad.pretrain.gradients.optimizer_sync import OptimizerSync
from bert_unpad.pretrain.ranks import Ranks


class LocalSteps(OptimizerSync):
    """After the warm-up ranks differ, unless `synchronise` or the optimizer has just averaged."""

    def __init__(self, config: CommConfig, ranks: Ranks, optimizer: MTDAO) -> None:
        super().__init__(config, ranks, optimizer)
        optimizer.start = config.start

    def synchronise(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        if not self.averages_gradients:
            average_models(self._ranks, model, optimizer)


def local_steps(config: CommConfig, ranks: Ranks, optimizer: MTDAO) -> CommHook:
    """The hook of a run; one rank exchanges nothing."""
    return CommHook() if ranks.world_size == 1 else LocalSteps(config, ranks, optimizer)
