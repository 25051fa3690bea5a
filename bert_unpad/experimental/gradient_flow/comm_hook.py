"""The trainer's comm hook `gradient_flow`."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bert_unpad.experimental.gradient_flow import GradientFlow, gradient_flow_hook
from bert_unpad.pretrain.config import CommConfig
from bert_unpad.pretrain.gradients.comm_hook import CommHook
from bert_unpad.pretrain.ranks import Ranks


class ChunkedSync(CommHook):
    """Sparse averages of the gradient's chunks, see `GradientFlow`."""

    def __init__(
        self, config: CommConfig, ranks: Ranks, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.hook = gradient_flow_hook
        self.state = GradientFlow(
            config.chunk_share, config.chunk_size, _momentum(optimizer) or 1.0, config.start
        )
        self._device = ranks.device

    def start(self, done: int) -> None:
        self.state.restart(done)

    def agree(self, finite: Tensor) -> Tensor:
        """Drops what is kept after a gradient that is not finite, which would stay in it."""
        finite = finite & self.state.finite
        self.state.forget_unless(finite)
        return finite

    def local_state(self) -> dict[str, Any]:
        return tree_map(Tensor.cpu, self.state.state_dict())

    def load_local_state(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(tree_map(lambda t: t.to(self._device), state))


def _momentum(optimizer: torch.optim.Optimizer | None) -> float:
    """The decay rate of an optimizer's momentum, 0 for none."""
    options = {} if optimizer is None else optimizer.param_groups[0]
    return options["betas"][0] if "betas" in options else options.get("momentum", 0.0)
