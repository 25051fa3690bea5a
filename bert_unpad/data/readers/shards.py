"""Shards that this package has written; see `bert_unpad.data.store.shards`."""

from __future__ import annotations

from pathlib import Path

from bert_unpad.data.readers import Setting
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.store.shards import ShardDataset


def open_split(path: Path, setting: Setting) -> ShardDataset:
    """See `bert_unpad.data.readers.open_split`."""
    dataset = ShardDataset(path, setting.verify, sizes=setting.check)
    if setting.check:
        check_longest(dataset, path, setting.max_seq_length)
    return dataset


def check_longest(dataset: ExampleDataset, path: Path, max_seq_length: int) -> None:
    """Raises a ValueError if an example is longer than `max_seq_length`."""
    if len(dataset) and dataset.lengths.max() > max_seq_length:
        raise ValueError(
            f"max_seq_length: expected at least {dataset.lengths.max()}, the longest example of "
            f"{path}, got {max_seq_length}"
        )
