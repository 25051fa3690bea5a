"""MLPerf's BERT examples in TFRecord files, read at random through an index.

A file is a sequence of records: number of bytes, uint64; its checksum; the bytes; their checksum
(masked CRC-32C, uint32, little-endian). A record is an `Example` with the features

    input_ids, segment_ids [S]                      padded
    input_mask [S]                                  1 = real; without it, all but padding is real
    masked_lm_positions, masked_lm_ids [P]          padded
    masked_lm_weights [P]                           1.0 = real; without it, position 0 is padding
    next_sentence_labels [1]

of Google's `create_pretraining_data.py`. All checksums are compared once, when a file is indexed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.readers import Setting, find_files
from bert_unpad.data.readers.ranges import FileRanges
from bert_unpad.data.readers.tf_example import Lists, integers, read_lists
from bert_unpad.data.readers.tfrecord_index import by_all_or_each, record_index
from bert_unpad.data.store.dataset import count_targets
from bert_unpad.data.store.example_batch import ExampleBatch, Masks, ragged_places
from bert_unpad.data.store.finished import finished_batch
from bert_unpad.data.store.manifest import DamagedDataError
from bert_unpad.data.store.mapped import check_mapped


def open_split(path: Path, setting: Setting) -> TfRecordDataset:
    """See `bert_unpad.data.readers.open_split`."""
    return TfRecordDataset(path, setting)


class TfRecordDataset:
    """An `ExampleDataset` with masks in TFRecord files.

    Args:
        path: a file or a folder of files.
        setting: what is to be known besides.

    Raises:
        DamagedDataError: a file is wrong; the message names it. Reading may raise it too.
    """

    has_masks = True

    def __init__(self, path: Path, setting: Setting) -> None:
        self._arguments = path, setting
        self.vocab_size = setting.vocab_size
        self.unmaskable_ids = setting.unmaskable_ids
        self.max_seq_length = setting.max_seq_length
        self.files = find_files(path, "tfrecord", setting.without)
        self._ranges = FileRanges(self.files)
        self._counts, columns = record_index(self.files, setting)
        self._begins, self._sizes = columns["begins"], columns["sizes"]
        self.lengths, self._masked = columns["lengths"], columns["masked"]
        self._ends = np.cumsum(self._counts)
        if len(self) and self.lengths.max() > setting.max_seq_length:
            at = int(self.lengths.argmax())
            raise DamagedDataError(
                f"{self._name(at)}: expected at most {setting.max_seq_length} tokens "
                f"(data.max_seq_length), got {self.lengths[at]}"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def _name(self, example: int) -> str:
        file = int(np.searchsorted(self._ends, example, side="right"))
        record = example - int(self._ends[file] - self._counts[file])
        return f"{self.files[file]}: record {record}"

    def batch(self, indices: NDArray[np.integer]) -> ExampleBatch:
        """See `ExampleDataset`."""
        indices = np.asarray(indices, np.int64)
        check_mapped(self._begins, self._sizes, self.lengths, self._masked)
        files = np.searchsorted(self._ends, indices, side="right")
        sizes = self._sizes[indices].astype(np.int64)
        records = self._ranges.read(files, self._begins[indices], sizes)

        return by_all_or_each(self._make, lambda at: self._name(int(indices[at])), indices, records)

    def _make(self, indices: NDArray[np.int64], data: Sequence[bytes]) -> ExampleBatch:
        records = [read_lists(record) for record in data]
        lengths = self.lengths[indices].astype(np.int64)
        masked = self._masked[indices].astype(np.int64)
        labels, counts = integers(records, b"next_sentence_labels")
        if (counts != 1).any():
            raise ValueError("next_sentence_labels: expected one label")
        return finished_batch(
            indices,
            lengths,
            _first(records, b"input_ids", lengths),
            _first(records, b"segment_ids", lengths),
            Masks(
                masked,
                _first(records, b"masked_lm_positions", masked),
                _first(records, b"masked_lm_ids", masked),
            ),
            labels,
            self.vocab_size,
        )

    def target_counts(self) -> NDArray[np.int64]:
        """See `ExampleDataset`; counts masked tokens and reads all examples."""
        return count_targets(self)

    def __reduce__(self) -> tuple[type, tuple]:
        # Pickled by its files: handles cannot travel, and the index is in the cache.
        return TfRecordDataset, self._arguments


def _first(records: Sequence[Lists], name: bytes, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns so many first numbers of a list of each record."""
    values, counts = integers(records, name)
    if (counts < wanted).any():
        raise ValueError(f"{name.decode()}: expected {wanted.max()} numbers, got {counts.min()}")
    return values[ragged_places(np.cumsum(counts) - counts, wanted)]
