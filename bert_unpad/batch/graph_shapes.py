"""Batches whose sizes take few values, for CUDA graphs: padding at the end of the packed buffer.

A captured graph replays with the sizes it was captured with: tokens, sequences, masked tokens, rows
of the last layer, and the bounds on sequences' lengths that attention's launch grids follow from.
`pad_to` brings a batch to given sizes by adding a few sequences of token 0 after the real ones.
They own all added tokens and rows, and none of their tokens has a label. So no real token sees
them, real tokens keep the coordinates that dropout masks are functions of, and everything that they
add to a gradient is a zero. `Buckets` chooses the sizes.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bert_unpad.batch.inputs import IGNORE, PackedInputs, QueryRows
from bert_unpad.batch.varlen import VarlenBatch

__all__ = ["Bucket", "Buckets", "pad_to"]

# Token counts are rounded up to multiples of the larger of the two: tiles of matrix products have
# 128 rows, so less gains nothing; and a 64th of the largest batch adds 0.8 % of that on average, at
# the price of at most 64 graphs (a balanced sampler's steps fall into two or three).
_TILE = 128
_STEPS = 64


@dataclass(frozen=True)
class Bucket:
    """Sizes that a batch is padded to."""

    tokens: int
    """T; more than the batch has."""
    sequences: int
    """B, empty and added ones included; more than the batch has."""
    masked: int
    """M."""
    first_tokens: int
    """N, first tokens that the next-sentence loss reads."""
    max_seqlen: int
    """Bound on the length of a sequence."""
    max_query_rows: int
    """Bound on the rows of a sequence that the last layer computes."""

    @property
    def query_rows(self) -> int:
        """Q, rows that the last layer computes: room for all masked and all first tokens."""
        return self.masked + self.first_tokens


class Buckets:
    """Chooses a bucket for a batch: a function of its sizes alone.

    Args:
        sequences: the most sequences of a batch. Batches with more take buckets of their own.
        max_seqlen: the longest that a sequence can be, in tokens.
        masked_share: share of a sequence's tokens that are predicted, rounded, at least one a
            sequence. Batches with more take buckets of their own.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, sequences: int, max_seqlen: int, masked_share: float) -> None:
        for name, value in (("sequences", sequences), ("max_seqlen", max_seqlen)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if not 0 <= masked_share <= 1:
            raise ValueError(f"masked_share must be in [0, 1], got {masked_share}")
        self.sequences = sequences
        self.max_seqlen = max_seqlen
        self.masked_share = masked_share
        self.step = max(_TILE, _round_up(sequences * max_seqlen // _STEPS, _TILE))
        self._rows = min(1 + max(1, math.ceil(masked_share * max_seqlen)), max_seqlen)

    def choose(self, inputs: PackedInputs) -> Bucket:
        """The bucket of a batch.

        Raises:
            ValueError: it has a longer sequence than `max_seqlen`.
        """
        batch, rows = inputs.batch, inputs.query_rows
        if batch.seqlen > self.max_seqlen:
            raise ValueError(
                f"a sequence may have at most max_seqlen = {self.max_seqlen} tokens, "
                f"got a batch of length {batch.seqlen}"
            )
        # One token at least is padding, for the added rows of the last layer to be read from.
        tokens = _round_up(batch.total + 1, self.step)
        # Rounding gives a sequence half a token more than its share, or a whole one.
        sequences = self.sequences
        while sequences < batch.batch_size:
            sequences *= 2
        masked = _round_up(math.ceil(self.masked_share * tokens) + sequences, 8)
        while masked < inputs.num_masked:
            masked *= 2
        most = self._rows if rows.max_seqlen <= self._rows else self.max_seqlen
        # What is added at most, where a batch has as many sequences as it may.
        added_rows = math.ceil(self.masked_share * self.step) + 2 * sequences
        added = max(-(-self.step // self.max_seqlen), -(-added_rows // self._rows))
        missing_rows = masked + sequences - rows.positions.shape[0]
        while added * self.max_seqlen < tokens - batch.total or added * most < missing_rows:
            added *= 2
        return Bucket(
            tokens=tokens,
            sequences=sequences + added,
            masked=masked,
            first_tokens=sequences,
            max_seqlen=self.max_seqlen,
            max_query_rows=most,
        )

    def pad(self, inputs: PackedInputs) -> PackedInputs:
        """The batch, padded to its bucket; see `pad_to`."""
        return pad_to(inputs, self.choose(inputs))


def pad_to(inputs: PackedInputs, bucket: Bucket) -> PackedInputs:
    """The same batch with the sizes of a bucket, on the host.

    The model's losses and gradients are those of the batch, to rounding. A matrix library chooses a
    product's routine, and so the order of its sums, by the number of rows, each on each processor
    in its own way. Our operators compute a real row bit for bit alike, but for attention's backward
    pass on a GPU, which takes one of two kernels by the sizes. Of batches padded to the same bucket
    what the added tokens are changes no bit.

    Args:
        inputs: on the CPU.
        bucket: as `Buckets.choose` makes it.

    Raises:
        ValueError: the inputs are not on the CPU, or do not fit.
    """
    batch, rows = inputs.batch, inputs.query_rows
    if inputs.device.type != "cpu":
        raise ValueError(f"inputs must be on the CPU, got {inputs.device}; move the result")
    added = bucket.sequences - batch.batch_size
    tokens = bucket.tokens - batch.total
    query_rows = bucket.query_rows - rows.positions.shape[0]
    fits = {
        "tokens": 1 <= tokens <= added * bucket.max_seqlen,
        "masked": inputs.num_masked <= bucket.masked,
        "first_tokens": rows.cls_rows.shape[0] <= bucket.first_tokens,
        "max_seqlen": batch.seqlen <= bucket.max_seqlen,
        "max_query_rows": rows.max_seqlen <= bucket.max_query_rows
        and query_rows <= added * bucket.max_query_rows,
    }
    for name, fit in fits.items():
        if not fit:
            raise ValueError(f"bucket.{name}: a batch of {batch.total} tokens in "
                             f"{batch.batch_size} sequences does not fit {bucket}")  # fmt: skip
    return PackedInputs(
        batch=_pad_batch(batch, bucket, _shares(tokens, added)),
        input_ids=_fill(inputs.input_ids, bucket.tokens, 0),
        token_type_ids=_fill(inputs.token_type_ids, bucket.tokens, 0),
        masked_positions=_fill(inputs.masked_positions, bucket.masked, batch.total),
        masked_labels=_fill(inputs.masked_labels, bucket.masked, IGNORE),
        next_sentence_labels=_fill(inputs.next_sentence_labels, bucket.sequences, IGNORE),
        query_rows=_pad_rows(rows, batch, bucket, _shares(query_rows, added)),
    )


def _pad_batch(batch: VarlenBatch, bucket: Bucket, lengths: np.ndarray) -> VarlenBatch:
    places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    first = np.arange(batch.batch_size, bucket.sequences) * bucket.max_seqlen
    # Of the real tokens: from rows of batch.seqlen columns to rows of bucket.max_seqlen.
    sequence, column = np.divmod(batch.indices.numpy(), max(batch.seqlen, 1))
    padded = VarlenBatch._make(
        np.concatenate([batch.lengths.numpy().astype(np.int64), lengths]),
        bucket.max_seqlen,
        np.concatenate([sequence * bucket.max_seqlen + column, np.repeat(first, lengths) + places]),
        np.concatenate([batch.position_ids.numpy(), places]),
        batch.device,
    )
    return dataclasses.replace(padded, max_seqlen=bucket.max_seqlen)


def _pad_rows(rows: QueryRows, batch: VarlenBatch, bucket: Bucket, shares: np.ndarray) -> QueryRows:
    count = rows.positions.shape[0]
    total = int(shares.sum())
    # Spread over the added tokens. Where there are more rows than tokens some are read twice, which
    # is right only because their gradients are zero: see `gather_rows`.
    positions = batch.total + np.arange(total) * (bucket.tokens - batch.total) // max(total, 1)
    cu_seqlens = rows.cu_seqlens.numpy()
    return QueryRows(
        positions=torch.cat([rows.positions, torch.from_numpy(positions)]),
        cu_seqlens=torch.from_numpy(
            np.concatenate([cu_seqlens, cu_seqlens[-1] + np.cumsum(shares)]).astype(np.int32)
        ),
        max_seqlen=bucket.max_query_rows,
        mlm_rows=_fill(rows.mlm_rows, bucket.masked, count),
        cls_rows=_fill(rows.cls_rows, bucket.first_tokens, count),
        cls_positions=_fill(rows.cls_positions, bucket.first_tokens, batch.total),
        cls_sequences=_fill(rows.cls_sequences, bucket.first_tokens, batch.batch_size),
        cls_labels=_fill(rows.cls_labels, bucket.first_tokens, IGNORE),
    )


def _fill(values: Tensor, size: int, value: int) -> Tensor:
    return torch.cat([values, values.new_full((size - values.shape[0],), value)])


def _shares(total: int, parts: int) -> np.ndarray:
    """`total` in `parts` parts as equal as can be, the larger ones first; int64 [parts]."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
