"""What the forward pass of one encoder layer keeps for its backward pass, in bytes.

Counted by PyTorch's hooks on saved tensors, each storage once. Parameters do not count, nor what
the whole batch shares (masks, offsets, dropout keys). The layer's input counts, its output does
not: that is the next layer's input. Copies of weights in another dtype are counted by themselves,
since they do not grow with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Saved:
    """What one layer keeps."""

    activations: int
    """Bytes that grow with the batch."""
    weight_copies: int
    """Bytes of cast weights."""
    tensors: tuple[tuple[str, tuple[int, ...], int], ...]
    """(dtype, shape, bytes of the storage) of each activation, largest first."""


def saved_by(
    forward: Callable[[], Tensor], module: nn.Module, shared: Iterable[Tensor] = ()
) -> Saved:
    """Runs a forward pass and counts what it keeps.

    Args:
        forward: returns a tensor with an autograd graph.
        module: whose parameters do not count.
        shared: further tensors that do not count.
    """
    parameters = {_storage(p) for p in module.parameters()}
    uncounted = parameters | {_storage(t) for t in shared}
    casts = _Casts(parameters)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in uncounted:
            kept.setdefault(_storage(tensor), tensor)
        return tensor

    with casts, saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    if not output.requires_grad:
        raise ValueError("forward must return a tensor with an autograd graph")
    kept.pop(_storage(output), None)
    copies = [kept.pop(storage) for storage in map(_storage, casts.made) if storage in kept]
    activations = sorted(kept.values(), key=_bytes, reverse=True)
    return Saved(
        sum(map(_bytes, activations)),
        sum(map(_bytes, copies)),
        tuple(
            (str(t.dtype).removeprefix("torch."), tuple(t.shape), _bytes(t)) for t in activations
        ),
    )


class _Casts(TorchDispatchMode):
    """Notes the casts of parameters."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self.made: list[Tensor] = []  # held, so that no other tensor gets their storage
        self._parameters = parameters

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and _storage(args[0]) in self._parameters:
            self.made.append(result)
        return result


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
