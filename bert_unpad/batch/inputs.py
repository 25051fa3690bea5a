"""One packed pretraining batch: token ids, labels, and the rows that the last layer computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bert_unpad.batch._fields import map_tensors, tensor_fields
from bert_unpad.batch.varlen import VarlenBatch

__all__ = ["IGNORE", "PackedInputs", "QueryRows"]

IGNORE = -100
"""The label of what no loss counts."""


@dataclass(frozen=True, eq=False)
class QueryRows:
    """The rows that the last encoder layer computes: first tokens and masked tokens, Q in all.

    The pretraining loss reads nothing else of the last layer's output, so the layer takes queries
    (and everything after attention) for these rows alone, and keys and values for all tokens.
    N is the number of sequences that are not empty; only they have a first token.
    """

    positions: Tensor
    """int64 [Q], ascending: query row -> row of the packed buffer."""
    cu_seqlens: Tensor
    """int32 [B + 1]: sequence b owns the query rows cu_seqlens[b] : cu_seqlens[b + 1]."""
    max_seqlen: int
    """The most query rows of any one sequence."""
    mlm_rows: Tensor
    """int64 [M]: masked token -> query row."""
    cls_rows: Tensor
    """int64 [N]: sequence that is not empty -> query row of its first token."""
    cls_positions: Tensor
    """int64 [N]: the same -> row of the packed buffer."""
    cls_sequences: Tensor
    """int64 [N]: the same -> index within the batch."""
    cls_labels: Tensor
    """int64 [N]: next-sentence labels of the same."""

    @classmethod
    def build(
        cls, cu_seqlens: np.ndarray, masked_positions: np.ndarray, labels: Tensor
    ) -> QueryRows:
        """From the host copies of cu_seqlens [B + 1], masked_positions [M] and labels [B]."""
        starts = cu_seqlens[:-1].astype(np.int64)
        sequences = np.flatnonzero(np.diff(cu_seqlens))
        first = starts[sequences]
        positions = np.union1d(first, masked_positions)
        cu_rows = np.searchsorted(positions, cu_seqlens)
        return cls(
            positions=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(cu_rows.astype(np.int32)),
            max_seqlen=int(np.diff(cu_rows).max(initial=0)),
            mlm_rows=torch.from_numpy(np.searchsorted(positions, masked_positions)),
            cls_rows=torch.from_numpy(np.searchsorted(positions, first)),
            cls_positions=torch.from_numpy(first),
            cls_sequences=torch.from_numpy(sequences),
            cls_labels=labels[torch.from_numpy(sequences)],
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> QueryRows:
        """The same rows on `device`."""
        names = tensor_fields(self)
        return map_tensors(self, names, lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> QueryRows:
        """The same rows in page-locked host memory."""
        return map_tensors(self, tensor_fields(self), Tensor.pin_memory)


@dataclass(frozen=True, eq=False)
class PackedInputs:
    """One packed pretraining batch: what the collator returns and `BertForPreTraining` takes.

    Make one with `build`, on the host; then `.pin_memory()` and `.to(device, non_blocking=True)`.
    """

    batch: VarlenBatch
    input_ids: Tensor
    """int64 [T]."""
    token_type_ids: Tensor
    """int64 [T]."""
    masked_positions: Tensor
    """int64 [M], ascending: rows of the packed buffer whose token is to be predicted."""
    masked_labels: Tensor
    """int64 [M]: the tokens that were there; -100 is left out of the loss."""
    next_sentence_labels: Tensor
    """int64 [B]: 0 = the second segment follows the first, 1 = it is a random one (Hugging Face's
    convention), -100 = none."""
    query_rows: QueryRows
    """What the last layer computes; derived by `build`."""

    @classmethod
    def build(
        cls,
        batch: VarlenBatch,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        masked_positions: Tensor | None = None,
        masked_labels: Tensor | None = None,
        next_sentence_labels: Tensor | None = None,
    ) -> PackedInputs:
        """Checks host tensors and derives the rows of the last layer from them.

        What is left out is taken as: token types of 0, no masked tokens, no next-sentence labels.

        Raises:
            TypeError: a tensor is not int64.
            ValueError: a tensor is not on the CPU or has the wrong shape; masked positions are not
                strictly ascending or lie outside 0 .. T - 1.
        """
        if token_type_ids is None:
            token_type_ids = torch.zeros(batch.total, dtype=torch.int64)
        if (masked_positions is None) != (masked_labels is None):
            raise ValueError("masked_positions and masked_labels go together: give both or none")
        if masked_positions is None or masked_labels is None:
            masked_positions = masked_labels = torch.empty(0, dtype=torch.int64)
        if next_sentence_labels is None:
            next_sentence_labels = torch.full((batch.batch_size,), IGNORE, dtype=torch.int64)

        if batch.device.type != "cpu":
            raise ValueError(f"batch must be on the CPU, got {batch.device}; move the result")
        masked = masked_positions.shape[0] if masked_positions.dim() else 0
        for name, tensor, size in (
            ("input_ids", input_ids, batch.total),
            ("token_type_ids", token_type_ids, batch.total),
            ("masked_positions", masked_positions, masked),
            ("masked_labels", masked_labels, masked),
            ("next_sentence_labels", next_sentence_labels, batch.batch_size),
        ):
            if tensor.dtype != torch.int64:
                raise TypeError(f"{name} must be int64, got {tensor.dtype}")
            if tensor.device.type != "cpu":
                raise ValueError(f"{name} must be on the CPU, got {tensor.device}; move the result")
            if tuple(tensor.shape) != (size,):
                raise ValueError(f"{name} must have shape [{size}], got {list(tensor.shape)}")
        positions = masked_positions.numpy()
        if masked and (positions[0] < 0 or positions[-1] >= batch.total):
            raise ValueError(f"masked_positions must lie in 0 .. {batch.total - 1}")
        if (np.diff(positions) <= 0).any():
            raise ValueError("masked_positions must be strictly ascending")
        return cls(
            batch=batch,
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            masked_positions=masked_positions,
            masked_labels=masked_labels,
            next_sentence_labels=next_sentence_labels,
            query_rows=QueryRows.build(
                batch.cu_seqlens_host.numpy(), positions, next_sentence_labels
            ),
        )

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.input_ids.device

    @property
    def num_masked(self) -> int:
        """M, the number of masked tokens."""
        return self.masked_positions.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedInputs:
        """The same inputs on `device`; the batch's host tensors stay on the host."""
        names = (*tensor_fields(self), "batch", "query_rows")
        return map_tensors(self, names, lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedInputs:
        """The same inputs in page-locked host memory; `torch.utils.data.DataLoader` calls this."""
        names = (*tensor_fields(self), "batch", "query_rows")
        return map_tensors(self, names, lambda part: part.pin_memory())
