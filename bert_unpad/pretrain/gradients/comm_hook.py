"""What every comm hook of a run has, and what several of them do."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.utils._pytree import tree_leaves

from bert_unpad.distributed.allreduce import Allreduce
from bert_unpad.pretrain.ranks import Ranks


class CommHook:
    """A hook with its state, and what has to happen around it; this base is DDP's own allreduce."""

    hook: Any = None
    state: Any = None
    allreduce: Allreduce | None = None
    """Sums over all ranks, where `hook` does nothing but that and divide."""
    one_bucket = False
    """Whether DDP must put all gradients into one bucket."""

    @property
    def name(self) -> str:
        """What `local_state` belongs to."""
        return type(self).__name__

    def start(self, done: int) -> None:
        """Called once before training, after the empty passes, with the updates made so far."""

    def agree(self, finite: Tensor) -> Tensor:
        """Whether all ranks may update: bool [], the same on all; once gradients are averaged."""
        return finite

    def after_update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Called after each update, while there still are gradients."""

    def synchronise(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Makes the model, and the optimizer's state if given, the same on all ranks."""

    def local_state(self) -> dict[str, Any] | None:
        """What a checkpoint must keep of this rank; None for nothing."""
        return None

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Continues from `local_state`."""


def all_agree(ranks: Ranks, finite: Tensor) -> Tensor:
    """Whether it is true on all ranks, bool []: where each has a gradient of its own."""
    return ranks.sum((~finite).float()) == 0


def average_models(ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Averages the model over the ranks, and the optimizer's state if given."""
    average_parameters(iter(model.parameters()), dist.group.WORLD)  # type: ignore[arg-type]
    for parameter in model.parameters():
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        for value in tree_leaves(dict(sorted(state.items()))):
            mine = isinstance(value, Tensor) and value.device == parameter.device
            if mine and value.is_floating_point():
                ranks.sum(value).div_(ranks.world_size)
