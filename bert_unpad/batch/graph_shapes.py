"""A small set of batch shapes for CUDA graphs, and the padding that brings a batch to one of them.

A captured graph replays with the sizes it was captured with: tokens, sequences, masked tokens, rows
of the last layer, and the bounds on sequence lengths that determine attention's launch grids.
`GraphShapes` chooses these sizes. `pad_to` then adds a few sequences of token 0 at the end of the
packed buffer. All added tokens and rows belong to them, and none of their tokens has a label. So no
real token attends to them, real tokens keep the coordinates that their dropout masks depend on, and
the added tokens contribute exactly zero to every gradient.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bert_unpad.batch.inputs import IGNORE, PackedInputs, QueryRows
from bert_unpad.batch.varlen import VarlenBatch

# Token counts are rounded up to a multiple of the larger of two numbers. Tiles of matrix products
# have 128 rows, so a finer step gains nothing. A 64th of the largest batch adds 0.8 % of that batch
# on average and allows at most 64 graphs; a balanced sampler's steps need two or three.
_TILE = 128
_STEPS = 64


@dataclass(frozen=True)
class GraphShape:
    """The sizes that a batch is padded to."""

    tokens: int
    """Number of tokens T; larger than the batch's."""
    sequences: int
    """Number of sequences B, including empty and added ones; larger than the batch's."""
    masked: int
    """Number of masked tokens M."""
    first_tokens: int
    """Number of first tokens N, which the next-sentence loss reads."""
    max_seqlen: int
    """Upper bound on the length of a sequence."""
    max_query_rows: int
    """Upper bound on the rows of a sequence that the last layer computes."""

    @property
    def query_rows(self) -> int:
        """Number of rows Q that the last layer computes: all masked and all first tokens."""
        return self.masked + self.first_tokens


class GraphShapes:
    """Chooses the shape of a batch, which depends only on the batch's sizes.

    Args:
        sequences: usual upper bound on the sequences of a batch. A batch with more gets a larger
            shape.
        max_seqlen: upper bound on the length of a sequence, in tokens.
        masked_share: usual share of a sequence's tokens that are predicted (rounded, at least one
            token per sequence). A batch with more masked tokens gets a larger shape.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, sequences: int, max_seqlen: int, masked_share: float) -> None:
        for name, value in (("sequences", sequences), ("max_seqlen", max_seqlen)):
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
        if not 0 <= masked_share <= 1:
            raise ValueError(f"masked_share: expected a share from 0 to 1, got {masked_share}")
        self.sequences = sequences
        self.max_seqlen = max_seqlen
        self.masked_share = masked_share
        self.step = max(_TILE, _round_up(sequences * max_seqlen // _STEPS, _TILE))
        self._rows = min(1 + max(1, math.ceil(masked_share * max_seqlen)), max_seqlen)

    def choose(self, inputs: PackedInputs) -> GraphShape:
        """Chooses the shape for a batch.

        Raises:
            ValueError: a sequence is longer than `max_seqlen`.
        """
        batch, rows = inputs.batch, inputs.query_rows
        if batch.seqlen > self.max_seqlen:
            raise ValueError(
                f"inputs: expected sequences of at most max_seqlen = {self.max_seqlen} tokens, "
                f"got a batch of length {batch.seqlen}"
            )
        # At least one token is padding: the added rows of the last layer read from it.
        tokens = _round_up(batch.total + 1, self.step)
        # Rounding up, and "at least one", add at most one masked token per sequence.
        sequences = self.sequences
        while sequences < batch.batch_size:
            sequences *= 2
        masked = _round_up(math.ceil(self.masked_share * tokens) + sequences, 8)
        while masked < inputs.num_masked:
            masked *= 2
        most = self._rows if rows.max_seqlen <= self._rows else self.max_seqlen
        # Enough added sequences for the most tokens and rows that a usual batch needs.
        added_rows = math.ceil(self.masked_share * self.step) + 2 * sequences
        added = max(-(-self.step // self.max_seqlen), -(-added_rows // self._rows))
        missing_rows = masked + sequences - rows.positions.shape[0]
        while added * self.max_seqlen < tokens - batch.total or added * most < missing_rows:
            added *= 2
        return GraphShape(
            tokens=tokens,
            sequences=sequences + added,
            masked=masked,
            first_tokens=sequences,
            max_seqlen=self.max_seqlen,
            max_query_rows=most,
        )

    def pad(self, inputs: PackedInputs) -> PackedInputs:
        """Pads a batch to the shape chosen for it; see `pad_to`."""
        return pad_to(inputs, self.choose(inputs))


def pad_to(inputs: PackedInputs, shape: GraphShape) -> PackedInputs:
    """Pads a batch to the given sizes, on the host.

    Losses and gradients equal those of the unpadded batch up to rounding: a matrix library chooses
    its routine, and with it the order of sums, by the number of rows. Our own operators give the
    same bits for a real row, except attention's backward pass on a GPU, which chooses between two
    kernels by size. Between batches padded to the same shape, the values of the added tokens change
    no bit.

    Args:
        inputs: a batch on the CPU.
        shape: the sizes to pad to; `GraphShapes.choose` finds them.

    Raises:
        ValueError: the inputs are not on the CPU, or do not fit.
    """
    batch, rows = inputs.batch, inputs.query_rows
    if inputs.device.type != "cpu":
        raise ValueError(
            f"inputs: expected a batch on the CPU, got {inputs.device}; move the result instead"
        )
    added = shape.sequences - batch.batch_size
    tokens = shape.tokens - batch.total
    query_rows = shape.query_rows - rows.positions.shape[0]
    fits = {
        "tokens": 1 <= tokens <= added * shape.max_seqlen,
        "masked": inputs.num_masked <= shape.masked,
        "first_tokens": rows.cls_rows.shape[0] <= shape.first_tokens,
        "max_seqlen": batch.seqlen <= shape.max_seqlen,
        "max_query_rows": rows.max_seqlen <= shape.max_query_rows
        and query_rows <= added * shape.max_query_rows,
    }
    for name, fit in fits.items():
        if not fit:
            raise ValueError(
                f"shape.{name}: expected room for the batch of {batch.total} tokens in "
                f"{batch.batch_size} sequences, got {shape}"
            )
    return PackedInputs(
        batch=_pad_batch(batch, shape, _shares(tokens, added)),
        input_ids=_fill(inputs.input_ids, shape.tokens, 0),
        token_type_ids=_fill(inputs.token_type_ids, shape.tokens, 0),
        masked_positions=_fill(inputs.masked_positions, shape.masked, batch.total),
        masked_labels=_fill(inputs.masked_labels, shape.masked, IGNORE),
        next_sentence_labels=_fill(inputs.next_sentence_labels, shape.sequences, IGNORE),
        query_rows=_pad_rows(rows, batch, shape, _shares(query_rows, added)),
    )


def _pad_batch(batch: VarlenBatch, shape: GraphShape, lengths: np.ndarray) -> VarlenBatch:
    places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    first = np.arange(batch.batch_size, shape.sequences) * shape.max_seqlen
    # Indices of real tokens move from rows of batch.seqlen columns to rows of shape.max_seqlen.
    sequence, column = np.divmod(batch.indices.numpy(), max(batch.seqlen, 1))
    padded = VarlenBatch._make(
        np.concatenate([batch.lengths.numpy().astype(np.int64), lengths]),
        shape.max_seqlen,
        np.concatenate([sequence * shape.max_seqlen + column, np.repeat(first, lengths) + places]),
        np.concatenate([batch.position_ids.numpy(), places]),
        batch.device,
    )
    return dataclasses.replace(padded, max_seqlen=shape.max_seqlen)


def _pad_rows(
    rows: QueryRows, batch: VarlenBatch, shape: GraphShape, shares: np.ndarray
) -> QueryRows:
    count = rows.positions.shape[0]
    total = int(shares.sum())
    # Spread the added rows over the added tokens. If there are more rows than tokens, some tokens
    # are read twice, which is right only because their gradients are zero: see `gather_rows`.
    positions = batch.total + np.arange(total) * (shape.tokens - batch.total) // max(total, 1)
    cu_seqlens = rows.cu_seqlens.numpy()
    return QueryRows(
        positions=torch.cat([rows.positions, torch.from_numpy(positions)]),
        cu_seqlens=torch.from_numpy(
            np.concatenate([cu_seqlens, cu_seqlens[-1] + np.cumsum(shares)]).astype(np.int32)
        ),
        max_seqlen=shape.max_query_rows,
        mlm_rows=_fill(rows.mlm_rows, shape.masked, count),
        cls_rows=_fill(rows.cls_rows, shape.first_tokens, count),
        cls_positions=_fill(rows.cls_positions, shape.first_tokens, batch.total),
        cls_sequences=_fill(rows.cls_sequences, shape.first_tokens, batch.batch_size),
        cls_labels=_fill(rows.cls_labels, shape.first_tokens, IGNORE),
    )


def _fill(values: Tensor, size: int, value: int) -> Tensor:
    return torch.cat([values, values.new_full((size - values.shape[0],), value)])


def _shares(total: int, parts: int) -> np.ndarray:
    """Splits `total` into parts as equal as possible, larger ones first; int64 [parts]."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
