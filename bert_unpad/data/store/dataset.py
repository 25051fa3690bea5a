"""The interface of a set of examples, independent of its file format."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.store.example_batch import ExampleBatch


class ExampleDataset(Protocol):
    """Examples by index.

    Attributes:
        lengths: uint16 [N], tokens of each example.
        vocab_size: number of ids.
        unmaskable_ids: ids that are never predicted.
        max_seq_length: longest allowed example, in tokens.
        has_masks: whether the examples come with masks.
    """

    lengths: NDArray[np.uint16]
    vocab_size: int
    unmaskable_ids: tuple[int, ...]
    max_seq_length: int
    has_masks: bool

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.integer]) -> ExampleBatch:
        """Returns the examples at indices [B], 0 to len - 1, in this order; ids are indices."""

    def target_counts(self) -> NDArray[np.int64]:
        """Counts how often each token is predicted, or, without masks, may be predicted.

        Returns:
            int64 [vocab_size]; 0 for ids in `unmaskable_ids`.
        """


class NoExamples:
    """An empty `ExampleDataset`, for data without held-out examples."""

    has_masks = pair_labels = False

    def __init__(self, like: ExampleDataset) -> None:
        self.lengths = np.empty(0, np.uint16)
        self.vocab_size = like.vocab_size
        self.unmaskable_ids = like.unmaskable_ids
        self.max_seq_length = like.max_seq_length

    def __len__(self) -> int:
        return 0

    def batch(self, indices: NDArray[np.integer]) -> ExampleBatch:
        """Returns an empty batch; `indices` must be empty."""
        if len(indices):
            raise IndexError(f"indices: expected none, got {len(indices)}")
        return ExampleBatch.empty(np.dtype(np.int64))

    def target_counts(self) -> NDArray[np.int64]:
        """Returns zeros."""
        return np.zeros(self.vocab_size, np.int64)
