"""Where tokens stand in their sequences, and what that means for attention."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.batch import QueryRows, VarlenBatch
from bert_unpad.nn.config import EncoderConfig


def sequence_of_tokens(batch: VarlenBatch) -> Tensor:
    """The number of the sequence that each token belongs to, int64 [T], on the batch's device."""
    tokens = torch.arange(batch.total, device=batch.device, dtype=batch.cu_seqlens.dtype)
    return torch.searchsorted(batch.cu_seqlens[1:], tokens, right=True)


def sequence_positions(batch: VarlenBatch) -> Tensor:
    """The index of each token in its sequence, int64 [T], on the batch's device.

    `batch.position_ids` of a batch made from a mask are columns of the padded layout instead.
    """
    tokens = torch.arange(batch.total, device=batch.device)
    return tokens - batch.cu_seqlens[sequence_of_tokens(batch)]


class Rotary(NamedTuple):
    """How queries and keys are rotated."""

    theta: float
    """Base of the angles."""
    scale: float
    """Factor of the positions."""
    tokens: Tensor
    """int64 [T]: the position of each token."""
    rows: Tensor
    """int64 [Q]: the position of each row that the last layer computes."""


class AttentionPositions(NamedTuple):
    """What attention in one layer has to know of positions."""

    window: tuple[int, int] = (-1, -1)
    """How many tokens before and after its own a token sees; -1: all."""
    rotary: Rotary | None = None
    """None: queries and keys are not rotated."""
    rows: Tensor | None = None
    """int32 [Q]: the index in its sequence of each row that the last layer computes, where a window
    or a bias needs it."""

    bias: ops.PositionBias | None = None
    """What is added to the scores, where it is the same in all layers."""
    distances: tuple[Tensor, Tensor] | None = None
    """Embeddings of distances, [buckets, hidden], and buckets: what each layer makes a bias of."""


NO_POSITIONS = AttentionPositions()


def layer_positions(
    config: EncoderConfig,
    layers: Sequence[int],
    batch: VarlenBatch,
    rows: QueryRows | None,
    bias: ops.PositionBias | None = None,
    distances: tuple[Tensor, Tensor] | None = None,
) -> list[AttentionPositions]:
    """What attention has to know of positions, in each of the layers that run.

    Args:
        config: the model's configuration.
        layers: their numbers, from 0.
        batch: how the tokens are packed.
        rows: the rows that the last of them computes; None: all.
        bias, distances: see `AttentionPositions`.
    """
    windows = [config.window(layer) for layer in layers]
    if config.relative_positions == "none" and max(windows, default=-1) < 0:
        return [NO_POSITIONS] * len(windows)
    tokens = chosen = batch.position_ids
    index = None
    if rows is not None:
        chosen = tokens.index_select(0, rows.positions)
        index = sequence_positions(batch).index_select(0, rows.positions).int()
    found = []
    for window in windows:
        rotary = None
        if config.relative_positions == "rotary":
            theta = config.rotary_theta if window < 0 else config.local_theta
            rotary = Rotary(theta, 1.0 / config.rotary_factor, tokens, chosen)
        found.append(AttentionPositions((window, window), rotary, index, bias, distances))
    return found
