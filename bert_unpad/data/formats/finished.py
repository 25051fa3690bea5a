"""Finished examples of MLPerf's BERT, with segments, masks and labels, to a checked batch."""

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.store.example_batch import ExampleBatch, Masks


def finished_batch(
    lengths: NDArray[np.int64],
    tokens: NDArray[np.integer],
    segments: NDArray[np.integer],
    masks: Masks,
    next_sentence_labels: NDArray[np.integer],
    vocab_size: int,
) -> ExampleBatch:
    """Makes a batch of B examples with T tokens in all.

    Args:
        lengths: int64 [B], lengths of the examples.
        tokens: integers [T], input of the model.
        segments: integers [T], 0s followed by 1s in each example.
        masks: masked tokens, in any order within an example.
        next_sentence_labels: integers [B], 0 or 1.
        vocab_size: number of token ids.

    Raises:
        ValueError: a value is out of range; the message begins with the name that MLPerf gives it.
    """
    masks = _ascending(masks)
    second_starts = _second_starts(segments, lengths)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(
            f"input_ids: expected ids of 0 to {vocab_size - 1} (the vocabulary), got "
            f"{tokens.min()} to {tokens.max()}"
        )
    labels = next_sentence_labels.astype(np.int64)
    if not np.isin(labels, (0, 1)).all():
        raise ValueError("next_sentence_labels: expected 0 or 1")
    masks.check(lengths, vocab_size)
    ids = np.arange(len(lengths))
    return ExampleBatch(ids, lengths, second_starts, labels, tokens.astype(np.int64), masks)


def leading(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Counts the flags of each row [B, P] that are set before the first one that is not."""
    return np.logical_and.accumulate(flags, axis=1).sum(axis=1, dtype=np.int64)


def _ascending(masks: Masks) -> Masks:
    """Makes masks with ascending positions in each example, as the packed batch needs them."""
    owner = np.repeat(np.arange(len(masks.counts)), masks.counts)
    order = np.lexsort((masks.positions, owner))
    return Masks(masks.counts, masks.positions[order], masks.labels[order])


def _second_starts(segments: NDArray[np.integer], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns where segment 1 begins in each example; segment ids must be zeros, then ones."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    segments = segments.astype(np.int64)  # differences of unsigned numbers would wrap around
    rises = np.diff(segments, prepend=segments[:1])
    inside = np.diff(owner, prepend=owner[:1]) == 0
    if not np.isin(segments, (0, 1)).all() or (rises[inside] < 0).any():
        raise ValueError("segment_ids: expected 0s followed by 1s")
    ones = np.bincount(owner[segments == 1], minlength=len(lengths))
    return lengths - ones
