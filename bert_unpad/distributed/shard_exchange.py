"""The two exchanges of a sharded update: reduce-scatter and all-gather, in the background.

On a GPU they are NCCL's. On a CPU gloo has other ways that are faster. Its reduce-scatter is an
allreduce inside and moves twice the bytes: an all-to-all takes its place, after which each rank
adds up what it has got, in the order of the ranks and in float32 (NCCL adds up in the dtype on the
wire). Its all-gather copies everything once more: a broadcast from each rank does not, and takes a
quarter of the time.
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
    wire: Tensor,
    shard: Tensor,
    group: dist.ProcessGroup | None,
    received: Tensor | None = None,
) -> Callable[[], None]:
    """Starts to add up `wire` over the ranks, of which each gets one part.

    Args:
        wire: [ranks * part] on each rank; must stay as it is until the end.
        shard: [part], gets this rank's part of the sum, in its own dtype.
        group: the ranks.
        received: scratch memory like `wire`, which a CPU needs; None makes some.

    Returns:
        A function that waits for the end: on a CPU the host does, on a GPU the current stream.
    """
    if not wire.is_cuda:
        parts = torch.empty_like(wire) if received is None else received
        work = dist.all_to_all_single(parts, wire, group=group, async_op=True)

        def add_up() -> None:
            work.wait()
            _add_up(parts.view(-1, shard.numel()), shard)

        return add_up
    total = shard if wire.dtype == shard.dtype else torch.empty_like(shard, dtype=wire.dtype)
    work = reduce_scatter_flat(total, wire, group=group, async_op=True)

    def copy() -> None:
        work.wait()
        if total is not shard:
            shard.copy_(total)

    return copy


def _add_up(parts: Tensor, out: Tensor) -> None:
    """Writes the sum of the rows, added up one after another in float32."""
    first, *others = parts.unbind()
    wide = out.dtype == torch.float32
    total = out if wide else torch.empty_like(out, dtype=torch.float32)
    if others and parts.dtype == torch.float32:
        torch.add(first, others.pop(0), out=total)
    else:
        total.copy_(first)
    for other in others:
        total += other
    if not wide:
        out.copy_(total)


def start_all_gather(
    flat: Tensor, part: slice, group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """Starts to send this rank's `part` of `flat` [ranks * part] to the others, in place.

    Returns:
        A function that waits for the end: on a CPU the host does, on a GPU the current stream.
    """
    if flat.is_cuda:
        return all_gather_flat(flat, flat[part], group=group, async_op=True).wait
    works = [
        dist.broadcast(piece, group=group, async_op=True, group_src=rank)
        for rank, piece in enumerate(flat.view(-1, part.stop - part.start))
    ]

    def wait() -> None:
        for work in works:
            work.wait()

    return wait
