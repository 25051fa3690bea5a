"""Several examples as columns, and their conversion to bytes for another process.

With columns instead of objects, selecting, sending and packing examples each take a few array
operations, independent of the number of examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert_unpad._text import gather
from bert_unpad.data.random_hash import splitmix64

# What travels of an example besides its tokens and masks. Their numbers do not: all ranks know
# them already.
_RECORD = np.dtype([("id", "<i8"), ("second_start", "<u2"), ("next_sentence_label", "<i2")])
_POSITION = np.dtype("<u2")  # of a mask within its example


@dataclass(frozen=True)
class Masks:
    """Masked tokens of B examples that come with the data instead of being drawn in every epoch.

    Attributes:
        counts: int64 [B], number of predictions of each example.
        positions: int64 [M], positions within the example, ascending in each.
        labels: int64 [M], the true ids at these positions.
    """

    counts: NDArray[np.int64]
    positions: NDArray[np.int64]
    labels: NDArray[np.int64]

    @classmethod
    def empty(cls) -> Masks:
        """Returns the masks of no examples."""
        none = np.empty(0, np.int64)
        return cls(none, none, none)

    @classmethod
    def concatenate(cls, parts: Sequence[Masks]) -> Masks:
        """Joins the masks of several parts, in order."""
        return cls(
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.positions for part in parts]),
            np.concatenate([part.labels for part in parts]),
        )

    def __getitem__(self, which: NDArray[np.integer]) -> Masks:
        """Returns the masks of some examples, in the order given."""
        counts = self.counts[which]
        places = ragged_places((np.cumsum(self.counts) - self.counts)[which], counts)
        return Masks(counts, self.positions[places], self.labels[places])

    def check(self, lengths: NDArray[np.integer], vocab_size: int) -> None:
        """Checks the masks against the examples' lengths [B].

        Raises:
            ValueError: sizes do not fit together, positions are not strictly ascending within an
                example or lie outside it, or a label is outside the vocabulary.
        """
        counts, positions, labels = self.counts, self.positions, self.labels
        if len(counts) != len(lengths) or not counts.sum() == len(positions) == len(labels):
            raise ValueError(
                "masks: expected a count for each example, and as many positions and labels as "
                f"these add up to; got {len(counts)} counts for {len(lengths)} examples with sum "
                f"{counts.sum()}, {len(positions)} positions, {len(labels)} labels"
            )
        if not len(positions):
            return
        owner = np.repeat(np.arange(len(counts)), counts)
        ascending = (np.diff(positions) > 0) | (np.diff(owner) > 0)
        if (positions < 0).any() or (positions >= lengths[owner]).any() or not ascending.all():
            raise ValueError("masked positions: expected them ascending and inside their example")
        if labels.min() < 0 or labels.max() >= vocab_size:
            raise ValueError(
                f"masked labels: expected ids of 0 to {vocab_size - 1}, got {labels.min()} to "
                f"{labels.max()}"
            )


@dataclass(frozen=True)
class ExampleBatch:
    """B examples with T tokens in all.

    Attributes:
        ids: int64 [B], unique in an epoch over all ranks; masks depend on them.
        lengths: int64 [B], number of tokens of each example.
        second_starts: int64 [B], index within the example where the second segment begins.
        next_sentence_labels: int64 [B], 0 = is next, 1 = random, -100 = none.
        tokens: integers [T], all examples end to end: true ids, or, with `masks`, the input of the
            model.
        masks: masks that come with the examples; None if masks are drawn.
    """

    ids: NDArray[np.integer]
    lengths: NDArray[np.int64]
    second_starts: NDArray[np.int64]
    next_sentence_labels: NDArray[np.int64]
    tokens: NDArray[np.integer]
    masks: Masks | None = None

    @classmethod
    def empty(cls, token_dtype: np.dtype, has_masks: bool = False) -> ExampleBatch:
        """Returns a batch without examples."""
        none = np.empty(0, np.int64)
        masks = Masks.empty() if has_masks else None
        return cls(none, none, none, none, np.empty(0, token_dtype), masks)

    @classmethod
    def concatenate(cls, batches: Sequence[ExampleBatch]) -> ExampleBatch:
        """Joins one or more batches, in order; either all or none have masks."""
        masks = [batch.masks for batch in batches if batch.masks is not None]
        return cls(
            np.concatenate([batch.ids for batch in batches]),
            np.concatenate([batch.lengths for batch in batches]),
            np.concatenate([batch.second_starts for batch in batches]),
            np.concatenate([batch.next_sentence_labels for batch in batches]),
            np.concatenate([batch.tokens for batch in batches]),
            Masks.concatenate(masks) if masks else None,
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, which: slice | NDArray[np.integer]) -> ExampleBatch:
        """Returns some examples, in the order given."""
        places = np.arange(len(self))[which]
        lengths = self.lengths[places]
        begins = (np.cumsum(self.lengths) - self.lengths)[places]
        return ExampleBatch(
            self.ids[places],
            lengths,
            self.second_starts[places],
            self.next_sentence_labels[places],
            gather([self.tokens], np.zeros(len(places), np.int64), begins, lengths),
            None if self.masks is None else self.masks[places],
        )

    def true_tokens(self) -> NDArray[np.int64]:
        """Returns the true tokens, with masks undone, int64 [T]."""
        tokens = self.tokens.astype(np.int64)
        if self.masks is not None:
            begins = np.cumsum(self.lengths) - self.lengths
            masks = self.masks
            tokens[np.repeat(begins, masks.counts) + masks.positions] = masks.labels
        return tokens

    def longest_first(self) -> ExampleBatch:
        """Sorts longest first, equal lengths by id, so that the order before has no influence."""
        return self[np.lexsort((self.ids, -self.lengths))]

    def checksum(self) -> np.uint64:
        """Returns a checksum that does not depend on the order of examples or their batches.

        It is the sum, modulo 2^64, of a hash of each token and each given mask with its position
        and the other columns of its example.
        """
        about = splitmix64(self.ids.astype(np.uint64)) ^ (
            self.second_starts.astype(np.uint64) << np.uint64(16)
        )
        about = splitmix64(about + self.next_sentence_labels.astype(np.uint64))
        begins = np.cumsum(self.lengths) - self.lengths
        places = np.arange(len(self.tokens)) - np.repeat(begins, self.lengths)
        total = _hash_sum(np.repeat(about, self.lengths), places, self.tokens)
        if self.masks is not None:
            owners = splitmix64(np.repeat(about, self.masks.counts))  # no hash of a token's
            total += _hash_sum(owners, self.masks.positions, self.masks.labels)
        return total[0]

    def to_bytes(self) -> NDArray[np.uint8]:
        """Converts everything to bytes, except lengths and numbers of given masks."""
        records = np.empty(len(self), _RECORD)
        records["id"] = self.ids
        records["second_start"] = self.second_starts
        records["next_sentence_label"] = self.next_sentence_labels
        columns = [records, self.tokens]
        if self.masks is not None:
            columns += [
                self.masks.labels.astype(self.tokens.dtype),
                self.masks.positions.astype(_POSITION),
            ]
        return np.concatenate([column.view(np.uint8) for column in columns])

    @classmethod
    def from_bytes(
        cls,
        data: NDArray[np.uint8],
        lengths: NDArray[np.int64],
        token_dtype: np.dtype,
        mask_counts: NDArray[np.int64] | None = None,
    ) -> ExampleBatch:
        """Restores a batch from the bytes of `to_bytes`.

        Args:
            data: result of `to_bytes`.
            lengths: int64 [B], lengths of the examples.
            token_dtype: dtype of the tokens.
            mask_counts: int64 [B], number of given masks of each example; None without masks.
        """
        counts = np.zeros(1, np.int64) if mask_counts is None else mask_counts
        masked = int(counts.sum())
        sizes = (
            (len(lengths), _RECORD),
            (int(lengths.sum()), token_dtype),
            (masked, token_dtype),
            (masked, _POSITION),
        )
        columns, begin = [], 0
        for size, dtype in sizes:
            end = begin + size * dtype.itemsize
            # A copy, because the column may begin at any byte, and the data be a part of more.
            columns.append(np.frombuffer(data[begin:end].tobytes(), dtype))
            begin = end
        records, tokens, labels, positions = columns
        return cls(
            records["id"].astype(np.int64),
            lengths,
            records["second_start"].astype(np.int64),
            records["next_sentence_label"].astype(np.int64),
            tokens,
            None
            if mask_counts is None
            else Masks(counts, positions.astype(np.int64), labels.astype(np.int64)),
        )

    @staticmethod
    def num_bytes(
        lengths: NDArray[np.int64],
        token_dtype: np.dtype,
        mask_counts: NDArray[np.int64] | None = None,
    ) -> NDArray[np.int64]:
        """Returns the bytes of each example in `to_bytes`; arguments as for `from_bytes`."""
        sizes = _RECORD.itemsize + lengths * token_dtype.itemsize
        if mask_counts is None:
            return sizes
        return sizes + mask_counts * (token_dtype.itemsize + _POSITION.itemsize)


def _hash_sum(
    owners: NDArray[np.uint64], places: NDArray[np.int64], tokens: NDArray[np.integer]
) -> NDArray[np.uint64]:
    """Returns the sum of the hashes of all (owner, position, token), uint64 [1]."""
    words = (places.astype(np.uint64) << np.uint64(32)) | tokens.astype(np.uint64)
    return splitmix64(owners + words).sum(dtype=np.uint64, keepdims=True)


def ragged_places(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the indices of spans in a buffer, one span after another.

    Args:
        begins: int64 [B], first index of each span.
        lengths: int64 [B], length of each span.

    Returns:
        Indices, int64 [sum of lengths].
    """
    starts = np.cumsum(lengths) - lengths
    return np.repeat(begins - starts, lengths) + np.arange(int(lengths.sum()))
