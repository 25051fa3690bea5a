"""One packed pretraining batch: token ids, labels, and the rows that the last layer computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bert_unpad.batch.tensor_fields import map_tensors, tensor_fields
from bert_unpad.batch.varlen import VarlenBatch

IGNORE = -100
"""The label of tokens and sequences that no loss counts."""


@dataclass(frozen=True, eq=False)
class QueryRows:
    """The rows that the last encoder layer computes: first tokens and masked tokens, Q in all.

    The pretraining loss reads nothing else of the last layer's output. So the layer computes
    queries, and everything after attention, for these rows only; keys and values for all tokens.
    N is the number of sequences that are not empty; only they have a first token.
    """

    positions: Tensor
    """int64 [Q], ascending: the row of the packed buffer that each query row reads."""
    cu_seqlens: Tensor
    """int32 [B + 1]: sequence b owns the query rows cu_seqlens[b] : cu_seqlens[b + 1]."""
    max_seqlen: int
    """The largest number of query rows of a sequence."""
    mlm_rows: Tensor
    """int64 [M]: the query row of each masked token."""
    cls_rows: Tensor
    """int64 [N]: the query row of each first token."""
    cls_positions: Tensor
    """int64 [N]: the row of the packed buffer of each first token."""
    cls_sequences: Tensor
    """int64 [N]: the index within the batch of the sequence that each first token starts."""
    cls_labels: Tensor
    """int64 [N]: the next-sentence label of the sequence that each first token starts."""

    @classmethod
    def build(
        cls, cu_seqlens: np.ndarray, masked_positions: np.ndarray, labels: Tensor
    ) -> QueryRows:
        """Derives the rows; cu_seqlens [B + 1] and masked_positions [M] are host copies."""
        starts = cu_seqlens[:-1].astype(np.int64)
        sequences = np.flatnonzero(np.diff(cu_seqlens))
        first = starts[sequences]
        both = np.sort(np.concatenate([first, masked_positions]), kind="stable")  # merges two runs
        positions = both[np.diff(both, prepend=-1) > 0]
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
        """Returns the same rows on `device`."""
        names = tensor_fields(self)
        return map_tensors(self, names, lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> QueryRows:
        """Returns the same rows in page-locked host memory."""
        return map_tensors(self, tensor_fields(self), Tensor.pin_memory)


@dataclass(frozen=True, eq=False)
class PackedInputs:
    """One packed pretraining batch: what the collator returns and `BertForPreTraining` takes.

    Make one with `build`, on the host; then `.pin_memory()` and `.to(device, non_blocking=True)`.
    """

    batch: VarlenBatch
    """How the sequences are packed."""
    input_ids: Tensor
    """int64 [T]: token ids, with masked tokens replaced."""
    token_type_ids: Tensor
    """int64 [T]: 0 in the first segment, 1 in the second."""
    masked_positions: Tensor
    """int64 [M], ascending: rows of the packed buffer whose token is to be predicted."""
    masked_labels: Tensor
    """int64 [M]: the original tokens at these rows; the loss ignores -100."""
    next_sentence_labels: Tensor
    """int64 [B]: 0 = the second segment follows the first, 1 = it is a random one (Hugging Face's
    convention), -100 = none."""
    query_rows: QueryRows
    """The rows that the last layer computes; `build` derives them."""

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

        Defaults of what is left out: token types of 0, no masked tokens, no next-sentence labels.

        Raises:
            TypeError: a tensor is not int64.
            ValueError: a tensor is not on the CPU or has the wrong shape; masked positions are not
                strictly ascending or lie outside 0 .. T - 1.
        """
        if token_type_ids is None:
            token_type_ids = torch.zeros(batch.total, dtype=torch.int64)
        if (masked_positions is None) != (masked_labels is None):
            raise ValueError("masked_positions and masked_labels: expected both or none, got one")
        if masked_positions is None or masked_labels is None:
            masked_positions = masked_labels = torch.empty(0, dtype=torch.int64)
        if next_sentence_labels is None:
            next_sentence_labels = torch.full((batch.batch_size,), IGNORE, dtype=torch.int64)

        if batch.device.type != "cpu":
            raise ValueError(f"batch: expected the CPU, got {batch.device}; move the result")
        masked = masked_positions.shape[0] if masked_positions.dim() else 0
        for name, tensor, size in (
            ("input_ids", input_ids, batch.total),
            ("token_type_ids", token_type_ids, batch.total),
            ("masked_positions", masked_positions, masked),
            ("masked_labels", masked_labels, masked),
            ("next_sentence_labels", next_sentence_labels, batch.batch_size),
        ):
            if tensor.dtype != torch.int64:
                raise TypeError(f"{name}: expected int64, got {tensor.dtype}")
            if tensor.device.type != "cpu":
                raise ValueError(f"{name}: expected the CPU, got {tensor.device}; move the result")
            if tuple(tensor.shape) != (size,):
                raise ValueError(f"{name}: expected shape [{size}], got {list(tensor.shape)}")
        positions = masked_positions.numpy()
        if masked and (positions[0] < 0 or positions[-1] >= batch.total):
            raise ValueError(
                f"masked_positions: expected rows in 0 .. {batch.total - 1}, "
                f"got {positions[0]} .. {positions[-1]}"
            )
        if (np.diff(positions) <= 0).any():
            raise ValueError("masked_positions: expected strictly ascending rows")
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
        """The device that holds the data."""
        return self.input_ids.device

    @property
    def num_masked(self) -> int:
        """The number of masked tokens M."""
        return self.masked_positions.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedInputs:
        """Returns the same inputs on `device`; the batch's host tensors stay on the host."""
        names = (*tensor_fields(self), "batch", "query_rows")
        return map_tensors(self, names, lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedInputs:
        """Returns the inputs in page-locked host memory; `torch.utils.data.DataLoader` calls it."""
        names = (*tensor_fields(self), "batch", "query_rows")
        return map_tensors(self, names, lambda part: part.pin_memory())
