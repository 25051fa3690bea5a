"""Several examples side by side, and how they become bytes for another process and a packed batch.

Columns instead of objects: taking some examples, sending them and packing them are each a few array
operations, whatever the number of examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.splitmix import splitmix64

# What travels of an example besides its tokens. Its length does not: all ranks know it already.
_RECORD = np.dtype([("id", "<i8"), ("second_start", "<u2"), ("next_sentence_label", "<i2")])


@dataclass(frozen=True)
class ExampleBatch:
    """B examples of T tokens together.

    Attributes:
        ids: int64 [B], unique in an epoch over all ranks; masks depend on them.
        lengths: int64 [B], tokens of each.
        second_starts: int64 [B], index within the example where the second segment begins.
        next_sentence_labels: int64 [B], 0 = is next, 1 = random, -100 = none.
        tokens: integers [T], all examples end to end.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    second_starts: NDArray[np.int64]
    next_sentence_labels: NDArray[np.int64]
    tokens: NDArray[np.integer]

    @classmethod
    def empty(cls, token_dtype: np.dtype) -> ExampleBatch:
        """No examples."""
        none = np.empty(0, np.int64)
        return cls(none, none, none, none, np.empty(0, token_dtype))

    @classmethod
    def concatenate(cls, batches: Sequence[ExampleBatch]) -> ExampleBatch:
        """All examples of one or more batches, in order."""
        return cls(
            np.concatenate([batch.ids for batch in batches]),
            np.concatenate([batch.lengths for batch in batches]),
            np.concatenate([batch.second_starts for batch in batches]),
            np.concatenate([batch.next_sentence_labels for batch in batches]),
            np.concatenate([batch.tokens for batch in batches]),
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, which: slice | NDArray[np.integer]) -> ExampleBatch:
        """Some examples, in the order given."""
        places = np.arange(len(self))[which]
        lengths = self.lengths[places]
        begins = (np.cumsum(self.lengths) - self.lengths)[places]
        return ExampleBatch(
            self.ids[places],
            lengths,
            self.second_starts[places],
            self.next_sentence_labels[places],
            self.tokens[ragged_places(begins, lengths)],
        )

    def longest_first(self) -> ExampleBatch:
        """Longest first, equal lengths by id: an order that does not depend on where they were."""
        return self[np.lexsort((self.ids, -self.lengths))]

    def checksum(self) -> np.uint64:
        """A sum over the examples: the same however they are ordered, and split into batches.

        Modulo 2^64, of a hash of each token with its place and its example's other columns.
        """
        about = splitmix64(self.ids.astype(np.uint64)) ^ (
            self.second_starts.astype(np.uint64) << np.uint64(16)
        )
        about = splitmix64(about + self.next_sentence_labels.astype(np.uint64))
        begins = np.cumsum(self.lengths) - self.lengths
        places = np.arange(len(self.tokens)) - np.repeat(begins, self.lengths)
        words = (places.astype(np.uint64) << np.uint64(32)) | self.tokens.astype(np.uint64)
        return splitmix64(np.repeat(about, self.lengths) + words).sum(dtype=np.uint64)

    def to_bytes(self) -> NDArray[np.uint8]:
        """Everything but the lengths."""
        records = np.empty(len(self), _RECORD)
        records["id"] = self.ids
        records["second_start"] = self.second_starts
        records["next_sentence_label"] = self.next_sentence_labels
        return np.concatenate([records.view(np.uint8), self.tokens.view(np.uint8)])

    @classmethod
    def from_bytes(
        cls, data: NDArray[np.uint8], lengths: NDArray[np.int64], token_dtype: np.dtype
    ) -> ExampleBatch:
        """What `to_bytes` was called on.

        Args:
            data: its result.
            lengths: int64 [B].
            token_dtype: of the tokens.
        """
        end = len(lengths) * _RECORD.itemsize
        records = data[:end].view(_RECORD)
        return cls(
            records["id"].astype(np.int64),
            lengths,
            records["second_start"].astype(np.int64),
            records["next_sentence_label"].astype(np.int64),
            np.frombuffer(data[end:].tobytes(), token_dtype),
        )

    @staticmethod
    def num_bytes(lengths: NDArray[np.int64], token_dtype: np.dtype) -> NDArray[np.int64]:
        """Bytes that each of some examples takes in `to_bytes`."""
        return _RECORD.itemsize + lengths * token_dtype.itemsize


def ragged_places(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of spans in a buffer, one span after another.

    Args:
        begins: int64 [B], where each span begins.
        lengths: int64 [B].

    Returns:
        int64 [sum of lengths].
    """
    starts = np.cumsum(lengths) - lengths
    return np.repeat(begins - starts, lengths) + np.arange(int(lengths.sum()))
