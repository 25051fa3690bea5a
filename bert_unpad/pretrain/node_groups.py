"""Groups of ranks by machine, for what should stay within one."""

from __future__ import annotations

import torch.distributed as dist

from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.ranks import Ranks


def common_node_size(ranks: Ranks, key: str, wish: str, instead: str) -> int:
    """Processes on each machine, as many on all and neighbours in rank; every rank must call it.

    Args:
        ranks: the processes of the run, more than one.
        key: the setting that needs it.
        wish: its value.
        instead: a value that does not.

    Raises:
        ConfigError: machines have different numbers of processes, or take turns in their numbers.
    """
    places = [(0, 0)] * ranks.world_size
    mine = (ranks.node_size, ranks.local_rank)
    dist.all_gather_object(places, mine, group=ranks.checkpoint_group)
    sizes = sorted({size for size, _ in places})
    if len(sizes) > 1:
        raise ConfigError(
            key,
            f"expected {instead} with {sizes} processes on the machines, got {wish}, which needs "
            "as many on each",
        )
    if any(local_rank != rank % size for rank, (size, local_rank) in enumerate(places)):
        raise ConfigError(
            key,
            f"expected {instead} where the ranks of a machine are not neighbours, got {wish}; or "
            "number the ranks machine by machine",
        )
    return ranks.node_size


def node_group(ranks: Ranks, node_size: int) -> dist.ProcessGroup:
    """The ranks of this machine, which are neighbours; every rank must call it."""
    group, _ = dist.new_subgroups(group_size=node_size, timeout=ranks.timeout)
    return group
