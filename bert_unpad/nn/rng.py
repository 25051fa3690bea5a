"""Draws the dropout keys of one forward pass.

Every operator with dropout takes a key, a (seed, offset) pair on the data's device. Drawing the
keys of all layers at once takes one small kernel instead of three per layer. A layer that is
computed again (gradient checkpointing) gets the same keys, and so the same masks, without saving
and restoring generator state.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bert_unpad import ops

RngKeys = Sequence[Tensor | None]


def draw_rng_keys(count: int, device: torch.device) -> Tensor:
    """Draws `count` (seed, offset) pairs, int64 [count, 2], from the device's default generator."""
    return torch.randint(2**63 - 1, (count, 2), dtype=torch.int64, device=device)


def keyed_dropout(x: Tensor, dropout_p: float, rng: Tensor | None) -> Tensor:
    """dropout(x) with a mask that is a pure function of the key; for small tensors.

    It is the sum of an operator that would go on to normalise it, so it is wasteful.

    Args:
        x: [rows, width].
        dropout_p: probability in [0, 1) that an element is dropped.
        rng: the dropout key, int64 [2]; None draws one.
    """
    ones = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    total, _ = ops.dropout_add_layer_norm(
        x, torch.zeros_like(x), ones, None, dropout_p=dropout_p, rng=rng, return_sum=True
    )
    return total
