"""Groups of ranks by machine, for what should stay within one."""

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
    # Not by `checkpoint_group`, on which a checkpoint may be saved at the same time.
    node_sizes, local_ranks = ranks.gather(ranks.node_size), ranks.gather(ranks.local_rank)
    sizes = sorted({int(size) for size in node_sizes})
    if len(sizes) > 1:
        raise ConfigError(
            key,
            f"expected {instead} with {sizes} processes on the machines, got {wish}, which needs "
            "as many on each",
        )
    if any(place != rank % sizes[0] for rank, place in enumerate(local_ranks)):
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
