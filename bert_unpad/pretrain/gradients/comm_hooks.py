"""DDP communication hooks of a run, what has to happen around them, and their state.

`replicate` runs two empty passes before training, after which DDP's buckets no longer change. The
memory of a hook is kept per bucket, so it fits a resumed run too. PowerSGD counts these two passes
as iterations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from bert_unpad.distributed import (
    GradientFlow,
    HierarchicalAllreduce,
    PartialSync,
    allreduce_hook,
    gradient_flow_hook,
    partial_sync_hook,
)
from bert_unpad.optim import MTDAO
from bert_unpad.optim.one_bit import OneBitOptimizer
from bert_unpad.pretrain.config import CommConfig, ConfigError
from bert_unpad.pretrain.gradients.comm_hook import CommHook, all_agree, average_models
from bert_unpad.pretrain.gradients.optimizer_sync import LocalSteps, OneBitSync
from bert_unpad.pretrain.node_groups import common_node_size
from bert_unpad.pretrain.ranks import Ranks

__all__ = [
    "SETTLING_PASSES",
    "ChunkedSync",
    "DreamDDP",
    "Hierarchical",
    "LocalSGD",
    "PowerSGD",
    "build_comm_hook",
]

SETTLING_PASSES = 2
_MEMORY = ("error_dict", "p_memory_dict", "q_memory_dict")  # of PowerSGDState, by bucket


class Hierarchical(CommHook):
    """Averages within machines first, then between them, see `HierarchicalAllreduce`."""

    def __init__(self, config: CommConfig, ranks: Ranks) -> None:
        size = common_node_size(ranks, "comm.hook", config.hook, "allreduce")
        self.hook = allreduce_hook
        self.state = self.allreduce = HierarchicalAllreduce(size, ranks.timeout)


class PowerSGD(CommHook):
    """Low-rank compression: Vogels et al., "PowerSGD" (NeurIPS 2019), arXiv:1905.13727."""

    def __init__(self, config: CommConfig, ranks: Ranks) -> None:
        self.hook = powerSGD_hook
        self.state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=config.power_sgd_rank,
            start_powerSGD_iter=config.start + SETTLING_PASSES,
        )
        # The hook starts its second collective when the first has ended. gloo calls back from
        # its own threads, so with several buckets ranks would start theirs in different orders.
        self.one_bucket = ranks.device.type == "cpu"
        self._device = ranks.device

    def start(self, done: int) -> None:
        self.state.iter = done + SETTLING_PASSES

    def agree(self, finite: Tensor) -> Tensor:
        """Resets the memory after a gradient that is not finite, which would stay in it.

        Q must be the same on all ranks and not zero: a matrix of zeros would stay zero.
        """
        for error in self.state.error_dict.values():
            error.masked_fill_(~finite, 0.0)
        for index, q in self.state.q_memory_dict.items():
            fresh = torch.arange(q.numel(), dtype=q.dtype, device=q.device).cos_()
            self.state.q_memory_dict[index] = torch.where(finite, q, fresh)
        return finite

    def local_state(self) -> dict[str, Any]:
        memory = {
            key: {index: t.cpu() for index, t in getattr(self.state, key).items()}
            for key in _MEMORY
        }
        kind, keys, *rest = self.state.rng.get_state(legacy=True)
        return {**memory, "rng": (kind, torch.from_numpy(keys), *rest)}

    def load_local_state(self, state: dict[str, Any]) -> None:
        for key in _MEMORY:
            memory = {index: t.to(self._device) for index, t in state[key].items()}
            setattr(self.state, key, memory)
        kind, keys, *rest = state["rng"]
        self.state.rng.set_state((kind, keys.numpy(), *rest))


class LocalAllreduce:
    """An allreduce over all ranks, or over a group as if the others had its gradients as well.

    PyTorch's post_localSGD_hook is the same for buckets that travel as they are.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.alone = False
        """Whether the group keeps to itself now."""
        self._group = group
        self._groups = dist.get_world_size() // dist.get_world_size(group)

    def __call__(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        group = self._group if self.alone else None
        sent = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        if not self.alone:
            return sent.then(lambda future: future.value()[0])
        return sent.then(lambda future: future.value()[0].mul_(self._groups))


class LocalSGD(CommHook):
    """Lin et al., "Don't use large mini-batches, use local SGD" (ICLR 2020), arXiv:1808.07217.

    From `start` on the ranks' models and optimizer states differ, except where `synchronise` has
    just made them the same. Whether a step is left out stays common to all.
    """

    def __init__(self, config: CommConfig, ranks: Ranks) -> None:
        size = config.local_sgd_group
        if size is None:
            size = common_node_size(ranks, "comm.local_sgd_group", "null", "a number")
        if ranks.world_size % size or size == ranks.world_size:
            raise ConfigError(
                "comm.local_sgd_group",
                f"expected a divisor of the {ranks.world_size} ranks that leaves several groups, "
                f"got {size}",
            )
        group, _ = dist.new_subgroups(group_size=size, timeout=ranks.timeout)
        self.hook = allreduce_hook
        self.state = self.allreduce = self._local = LocalAllreduce(group)
        self._ranks = ranks
        self._averager = PeriodicModelAverager(config.local_sgd_period, warmup_steps=config.start)

    @property
    def _apart(self) -> bool:
        return self._averager.step > self._averager.warmup_steps

    def start(self, done: int) -> None:
        self._averager.step = done
        self._local.alone = done >= self._averager.warmup_steps

    def agree(self, finite: Tensor) -> Tensor:
        return all_agree(self._ranks, finite)

    def after_update(self, parameters: Iterable[nn.Parameter]) -> None:
        self._averager.average_parameters(parameters)
        self._local.alone = self._averager.step >= self._averager.warmup_steps

    def synchronise(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        if self._apart:
            average_models(self._ranks, model, optimizer)


class DreamDDP(CommHook):
    """Layer-wise averages of models that are updated locally, see `PartialSync`.

    Once the schedule is made, the ranks' models and optimizer states differ, except where
    `synchronise` has just made them the same. Whether a step is left out stays common to all.
    """

    def __init__(self, config: CommConfig, ranks: Ranks) -> None:
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


class ChunkedSync(CommHook):
    """Sparse averages of the gradient's chunks, see `GradientFlow`."""

    def __init__(self, config: CommConfig, ranks: Ranks, momentum: float) -> None:
        self.hook = gradient_flow_hook
        self.state = GradientFlow(
            config.chunk_share, config.chunk_size, momentum or 1.0, config.start
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
        return _moved(self.state.state_dict(), torch.device("cpu"))

    def load_local_state(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(_moved(state, self._device))


def _moved(memory: dict[str, dict[int, Tensor]], device: torch.device) -> dict[str, Any]:
    """Tensors by name and bucket, on a device."""
    return {
        name: {index: tensor.to(device) for index, tensor in tensors.items()}
        for name, tensors in memory.items()
    }


def build_comm_hook(
    config: CommConfig, ranks: Ranks, optimizer: torch.optim.Optimizer | None = None
) -> CommHook:
    """What `comm` in the configuration asks for; one rank exchanges nothing.

    Args:
        config: says what.
        ranks: the processes of the run.
        optimizer: what makes the updates. gradient_flow asks for its momentum; one that
            communicates by itself has a hook of its own.

    Raises:
        ConfigError: groups that do not fit the number of ranks, or a hook that does not fit the
            optimizer.
    """
    if isinstance(optimizer, OneBitOptimizer):
        return OneBitSync(config, ranks, optimizer)
    if ranks.world_size == 1:
        return CommHook()
    if isinstance(optimizer, MTDAO):
        return LocalSteps(config, ranks, optimizer)
    if config.hook == "allreduce":
        return CommHook()
    if config.hook == "gradient_flow":
        return ChunkedSync(config, ranks, _momentum(optimizer))
    kinds = {
        "hierarchical": Hierarchical,
        "power_sgd": PowerSGD,
        "post_local_sgd": LocalSGD,
        "dream_ddp": DreamDDP,
    }
    return kinds[config.hook](config, ranks)


def _momentum(optimizer: torch.optim.Optimizer | None) -> float:
    """The decay rate of an optimizer's momentum, 0 for none."""
    options = {} if optimizer is None else optimizer.param_groups[0]
    return options["betas"][0] if "betas" in options else options.get("momentum", 0.0)
