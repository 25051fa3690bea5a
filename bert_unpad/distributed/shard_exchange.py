"""The two exchanges of a sharded update: reduce-scatter and all-gather, in the background.

On a GPU they are NCCL's. On a CPU messages from each rank to each other take the place of gloo's
collectives: its reduce-scatter is an allreduce inside and moves twice the bytes, its all-gather and
all-to-all copy everything once more, and broadcasts leave a slow link idle for a third of the time.
For a reduce-scatter each rank adds up what it has got, in the order of the ranks and in float32
(NCCL adds up in the dtype on the wire).
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad.distributed.collectives import all_gather_single, reduce_scatter_single


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
        own, sent = dist.get_rank(group), wire.view(-1, shard.numel()).unbind()
        room = torch.empty_like(wire) if received is None else received
        parts = list(room.view(-1, shard.numel()).unbind())
        wait = _start_messages(sent, parts, group)
        parts[own] = sent[own]

        def add_up() -> None:
            wait()
            _add_up(parts, shard)

        return add_up
    total = shard if wire.dtype == shard.dtype else torch.empty_like(shard, dtype=wire.dtype)
    work = reduce_scatter_single(total, wire, group=group, async_op=True)

    def copy() -> None:
        work.wait()
        if total is not shard:
            shard.copy_(total)

    return copy


def _start_messages(
    sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup | None
) -> Callable[[], None]:
    """Starts to send the tensor of each other rank to it, and to receive that rank's for this one.

    Returns:
        A function that waits until all have arrived, here and there.
    """
    rank, ranks = dist.get_rank(group), len(sent)
    works = []
    for distance in range(1, ranks):
        to, source = (rank + distance) % ranks, (rank - distance) % ranks
        # The other end sends when it knows that this one is ready, so not behind what goes there.
        works.append(dist.irecv(received[source], group=group, group_src=source))
        works.append(dist.isend(sent[to], group=group, group_dst=to))

    def wait() -> None:
        for work in works:
            if work is not None:
                work.wait()

    return wait


def _add_up(parts: Sequence[Tensor], out: Tensor) -> None:
    """Writes the sum of tensors, added up one after another in float32."""
    first, *others = parts
    wide = out.dtype == torch.float32
    total = out if wide else torch.empty_like(out, dtype=torch.float32)
    if others and first.dtype == torch.float32:
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
        return all_gather_single(flat, flat[part], group=group, async_op=True).wait
    pieces = flat.view(-1, part.stop - part.start).unbind()
    return _start_messages([flat[part]] * len(pieces), pieces, group)
