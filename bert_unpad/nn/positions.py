"""Where each token stands in its sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from bert_unpad.batch import VarlenBatch


def sequence_positions(batch: VarlenBatch) -> Tensor:
    """The index of each token in its sequence, int64 [T], on the batch's device.

    `batch.position_ids` of a batch made from a mask are columns of the padded layout instead.
    """
    tokens = torch.arange(batch.total, device=batch.device, dtype=batch.cu_seqlens.dtype)
    sequence = torch.searchsorted(batch.cu_seqlens[1:], tokens, right=True)
    return (tokens - batch.cu_seqlens[sequence]).long()
