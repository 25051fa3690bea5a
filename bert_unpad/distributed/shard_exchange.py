"""The two exchanges of a sharded update: reduce-scatter and all-gather, in the background.

gloo's reduce-scatter is an allreduce inside and so moves twice the bytes. On a CPU it is made of an
all-to-all instead, after which each rank adds up what it has got, in the order of the ranks and in
float32. NCCL adds up in the dtype on the wire.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# PyTorch 2.13 has renamed both, and warns of the old names.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_reduce_scatter(
    wire: Tensor, shard: Tensor, group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """Starts to add up `wire` over the ranks, of which each gets one part.

    Args:
        wire: [ranks * part] on each rank; must stay as it is until the end.
        shard: [part], gets this rank's part of the sum, in its own dtype.
        group: the ranks.

    Returns:
        A function that waits for the end: on a CPU the host does, on a GPU the current stream.
    """
    if not wire.is_cuda:
        received = torch.empty_like(wire)
        work = dist.all_to_all_single(received, wire, group=group, async_op=True)

        def add_up() -> None:
            work.wait()
            first, *others = received.view(-1, shard.numel()).unbind()
            total = first.float()
            for other in others:
                total += other
            shard.copy_(total)

        return add_up
    total = shard if wire.dtype == shard.dtype else torch.empty_like(shard, dtype=wire.dtype)
    work = reduce_scatter_flat(total, wire, group=group, async_op=True)

    def copy() -> None:
        work.wait()
        if total is not shard:
            shard.copy_(total)

    return copy


def start_all_gather(
    flat: Tensor, part: slice, group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """Starts to send this rank's `part` of `flat` [ranks * part] to the others, in place.

    Returns:
        A function that waits for the end: on a CPU the host does, on a GPU the current stream.
    """
    return all_gather_flat(flat, flat[part], group=group, async_op=True).wait
