"""DDP communication hooks of a run, what has to happen around them, and their state.

`Ddp` runs two empty passes before training, after which DDP's buckets no longer change. The
memory of a hook is kept per bucket, so it fits a resumed run too. PowerSGD counts these two passes
as iterations.

To add a hook: its name in `CommHookName`, a row in `HOOKS`, and what it does not go with in
`config/limits.py`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.utils._pytree import tree_map

from bert_unpad._choices import POWER_SGD_RANK
from bert_unpad._import_path import path_of, resolve
from bert_unpad.distributed import HierarchicalAllreduce, allreduce_hook
from bert_unpad.optim.one_bit import OneBitOptimizer
from bert_unpad.pretrain.config import CommConfig, ConfigError
from bert_unpad.pretrain.config.communication import CommHookName
from bert_unpad.pretrain.gradients.comm_hook import CommHook, all_agree, average_models
from bert_unpad.pretrain.gradients.optimizer_sync import OneBitSync
from bert_unpad.pretrain.node_groups import common_node_size
from bert_unpad.pretrain.ranks import Ranks

SETTLING_PASSES = 2
_MEMORY = ("error_dict", "p_memory_dict", "q_memory_dict")  # of PowerSGDState, by bucket


class Hierarchical(CommHook):
    """Averages within machines first, then between them, see `HierarchicalAllreduce`."""

    def __init__(self, config: CommConfig, ranks: Ranks, optimizer: Any) -> None:
        size = common_node_size(ranks, "comm.hook", config.hook, "allreduce")
        self.hook = allreduce_hook
        self.state = self.allreduce = HierarchicalAllreduce(size, ranks.timeout)


class PowerSGD(CommHook):
    """Low-rank compression: Vogels et al., "PowerSGD" (NeurIPS 2019), arXiv:1905.13727."""

    def __init__(self, config: CommConfig, ranks: Ranks, optimizer: Any) -> None:
        self.hook = powerSGD_hook
        self.state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=POWER_SGD_RANK,
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

        Q must be the same on all ranks and not zero: a matrix of zeros would stay zero. A CPU looks
        at the answer first, because the memory is as large as the gradient.
        """
        if self._device.type == "cpu" and bool(finite):
            return finite
        for error in self.state.error_dict.values():
            error.masked_fill_(~finite, 0.0)
        for index, q in self.state.q_memory_dict.items():
            fresh = torch.arange(q.numel(), dtype=q.dtype, device=q.device).cos_()
            self.state.q_memory_dict[index] = torch.where(finite, q, fresh)
        return finite

    def local_state(self) -> dict[str, Any]:
        memory = {key: tree_map(Tensor.cpu, getattr(self.state, key)) for key in _MEMORY}
        kind, keys, *rest = self.state.rng.get_state(legacy=True)
        return {**memory, "rng": (kind, torch.from_numpy(keys), *rest)}

    def load_local_state(self, state: dict[str, Any]) -> None:
        for key in _MEMORY:
            setattr(self.state, key, tree_map(lambda t: t.to(self._device), state[key]))
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

    def __init__(self, config: CommConfig, ranks: Ranks, optimizer: Any) -> None:
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


Entry = Callable[[CommConfig, Ranks, Any], CommHook] | str
"""A hook's class, or the import path of one that only its runs import."""

HOOKS: dict[CommHookName, Entry] = {
    "allreduce": lambda *_: CommHook(),
    "hierarchical": Hierarchical,
    "power_sgd": PowerSGD,
    "post_local_sgd": LocalSGD,
    "dream_ddp": "bert_unpad.experimental.dream_ddp.comm_hook.DreamDDP",
    "gradient_flow": "bert_unpad.experimental.gradient_flow.comm_hook.ChunkedSync",
    "auto": lambda *_: CommHook(),  # which it begins with; `Run.comm` has what it chooses
}
"""What makes each `comm.hook` of several ranks."""

OPTIMIZER_HOOKS: dict[str, Entry] = {
    path_of(OneBitOptimizer): OneBitSync,
    "bert_unpad.experimental.mt_dao.MTDAO": "bert_unpad.experimental.mt_dao.comm_hook.local_steps",
}
"""What makes the hooks of optimizers that communicate by themselves, by the path of their class."""


def build_comm_hook(
    config: CommConfig, ranks: Ranks, optimizer: torch.optim.Optimizer | None = None
) -> CommHook:
    """What `comm` in the configuration asks for; one rank exchanges nothing.

    Args:
        config: says what.
        ranks: the processes of the run.
        optimizer: what makes the updates; one that communicates by itself has a hook of its own.

    Raises:
        ConfigError: groups that do not fit the number of ranks, or a hook that does not fit the
            optimizer.
    """
    for kind in map(path_of, type(optimizer).__mro__):
        if kind in OPTIMIZER_HOOKS:
            return resolve(OPTIMIZER_HOOKS[kind])(config, ranks, optimizer)
    if ranks.world_size == 1:
        return CommHook()
    return resolve(HOOKS[config.hook])(config, ranks, optimizer)
