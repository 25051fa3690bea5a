"""What the forward pass of one encoder layer keeps for its backward pass, in bytes.

Counted by PyTorch's hooks on saved tensors, each storage once. Parameters do not count, nor what
the whole batch shares (masks, offsets, dropout keys). The layer's input counts, its output does
not: that is the next layer's input. Copies of weights in another dtype are counted by themselves,
since they do not grow with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


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
    parameters = list(module.parameters())
    shapes = {tuple(p.shape) for p in parameters if p.dim() > 1}
    uncounted = {_storage(t) for t in (*parameters, *shared)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in uncounted:
            kept.setdefault(_storage(tensor), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    if not output.requires_grad:
        raise ValueError("forward must return a tensor with an autograd graph")
    kept.pop(_storage(output), None)
    copies, activations = [], []
    for tensor in kept.values():
        shape = tuple(tensor.shape)
        (copies if shape in shapes or shape[::-1] in shapes else activations).append(tensor)
    activations.sort(key=lambda t: -t.untyped_storage().nbytes())
    return Saved(
        sum(t.untyped_storage().nbytes() for t in activations),
        sum(t.untyped_storage().nbytes() for t in copies),
        tuple(
            (
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                t.untyped_storage().nbytes(),
            )
            for t in activations
        ),
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
