"""Buckets of parameters of which each rank updates one part.

The parameters of a bucket lie one after the other in one tensor, which every rank cuts into equal
parts. A rank's part may begin and end within a parameter. Gradients lie in a tensor of the same
layout, so a reduce-scatter gives each rank the gradient of its part, and an all-gather gives all
ranks the updated parameters, without copies.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

# Elements. Parameters and parts begin at multiples of it: at 16 bytes, as kernels and NCCL like it.
_ALIGNMENT = 8


def plan_buckets(
    parameters: Sequence[nn.Parameter], first_bytes: int, other_bytes: int
) -> list[list[nn.Parameter]]:
    """Fills buckets in the order given, as DDP does; a bucket has one dtype and device.

    Args:
        parameters: in the order in which their gradients get ready.
        first_bytes: size at which the first bucket is full.
        other_bytes: that of the others.
    """
    full: list[list[nn.Parameter]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        bucket = open_buckets.setdefault(key, [])
        bucket.append(parameter)
        if sum(p.nbytes for p in bucket) >= (other_bytes if full else first_bytes):
            full.append(open_buckets.pop(key))
    return full + list(open_buckets.values())


class Bucket:
    """Some parameters, their gradients, and this rank's part of both.

    Args:
        parameters: contiguous, of one dtype and device. From now on they are views of `weights`.
        rank: whose part is updated here.
        ranks: number of parts.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int, ranks: int) -> None:
        self.parameters = list(parameters)
        self._offsets: list[int] = []
        size = 0
        for parameter in parameters:
            self._offsets.append(size)
            size += _round_up(parameter.numel(), _ALIGNMENT)
        self.numel = sum(p.numel() for p in parameters)
        """Elements of all parameters; the tensors have a few more."""
        part = _round_up(max(-(-size // ranks), 1), _ALIGNMENT)
        like = parameters[0].detach()
        self.weights = like.new_zeros(part * ranks)
        """[ranks * part]: all parameters, each from its offset on."""
        self.gradient = like.new_zeros(part * ranks)
        """This rank's gradients, in the same places. The rest is zero."""
        self.shard = like.new_zeros(part)
        """[part]: the average over the ranks of this rank's part of `gradient`."""
        self.part = slice(rank * part, (rank + 1) * part)
        """This rank's part of `weights`."""
        self._scratch: Tensor | None = None
        used = torch.zeros(part * ranks, dtype=torch.bool)
        for parameter, view in zip(parameters, self.views(self.weights), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        for view in self._flat_views(used):
            view.fill_(True)
        self._gaps = (~used).nonzero().flatten().to(like.device)

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """Each parameter's elements of a tensor that is laid out as `weights`, in its shape."""
        for view, parameter in zip(self._flat_views(flat), self.parameters, strict=True):
            yield view.view(parameter.shape)

    def spans(self) -> Iterator[tuple[int, int]]:
        """First and last (exclusive) of each parameter's elements that are in this rank's part."""
        for parameter, offset in zip(self.parameters, self._offsets, strict=True):
            size = parameter.numel()
            yield (
                min(max(self.part.start - offset, 0), size),
                min(max(self.part.stop - offset, 0), size),
            )

    def shares(self, part: Tensor) -> Iterator[Tensor]:
        """Each parameter's elements of a tensor [part] that is laid out as this rank's part."""
        for offset, (first, last) in zip(self._offsets, self.spans(), strict=True):
            start = max(offset + first - self.part.start, 0)
            yield part[start : start + last - first]

    def scratch_like(self, wire: Tensor) -> Tensor | None:
        """Memory for an exchange, which a CPU needs: new pages cost it more than the exchange."""
        if wire.is_cuda:
            return None
        if self._scratch is None or self._scratch.dtype != wire.dtype:
            self._scratch = torch.empty_like(wire)
        return self._scratch

    def clear_gaps(self) -> None:
        """Zeroes what of `gradient` belongs to no parameter."""
        self.gradient.index_fill_(0, self._gaps, 0)

    def _flat_views(self, flat: Tensor) -> Iterator[Tensor]:
        for parameter, offset in zip(self.parameters, self._offsets, strict=True):
            yield flat[offset : offset + parameter.numel()]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
