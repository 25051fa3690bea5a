"""Groups of ranks by machine, for what should stay within one."""

from __future__ import annotations

import torch.distributed as dist

from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.ranks import Ranks

__all__ = ["common_node_size", "node_group"]


def common_node_size(ranks: Ranks, key: str, wish: str, instead: str) -> int:
    """Processes on each machine, which must be the same number on all; every rank must call it.

    Args:
        ranks: the processes of the run, more than one.
        key: the setting that needs it.
        wish: its value.
        instead: a value that does not.

    Raises:
        ConfigError: machines have different numbers of processes.
    """
    sizes = [0] * ranks.world_size
    dist.all_gather_object(sizes, ranks.node_size, group=ranks.checkpoint_group)
    if len(set(sizes)) > 1:
        raise ConfigError(
            key,
            f"expected {instead} with {sorted(set(sizes))} processes on the machines, got {wish}, "
            "which needs as many on each",
        )
    return ranks.node_size


def node_group(ranks: Ranks, node_size: int) -> dist.ProcessGroup:
    """The ranks of this machine, which torchrun numbers consecutively; every rank must call it."""
    group, _ = dist.new_subgroups(group_size=node_size, timeout=ranks.timeout)
    return group
