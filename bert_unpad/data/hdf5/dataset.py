"""Examples in HDF5 files, read on demand.

Only the lengths are in memory. A file is opened when one of its examples is read. A bounded number
of files stay open; the least recently used one is closed to open another. So thousands of files do
not exceed a process's limit of open files (1,024 by default, shared with sockets and libraries).
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.hdf5.checks import open_file
from bert_unpad.data.hdf5.index import length_index
from bert_unpad.data.hdf5.layout import layout_of, read_examples
from bert_unpad.data.readers.ranges import may_keep_open
from bert_unpad.data.store.dataset import count_targets
from bert_unpad.data.store.example_batch import ExampleBatch, Masks
from bert_unpad.data.store.mapped import check_mapped


class Hdf5Dataset:
    """Examples with masks in HDF5 files of MLPerf's layouts; `bert_unpad.data.hdf5` shows them.

    Args:
        files: files of any layout.
        vocab_size, unmaskable_ids: attributes of the tokenizer that made the examples.
        max_seq_length: longest allowed example, in tokens.
        cache_dir: folder that keeps the index of lengths.
        max_open: largest number of open files.
        progress: whether indexing shows a bar; None shows it if stderr is a terminal.

    Attributes:
        lengths: uint16 [N], tokens of each example, in the order of the files.
        files, vocab_size, unmaskable_ids, max_seq_length: as given.
        has_masks: True.

    Raises:
        DamagedDataError: a file is missing, truncated or wrong; the message names it and what was
            expected. Reading may raise it too.
        ValueError: `max_open` is less than 1.
    """

    has_masks = True

    def __init__(
        self,
        files: Sequence[str | Path],
        *,
        vocab_size: int,
        unmaskable_ids: tuple[int, ...],
        max_seq_length: int,
        cache_dir: str | Path,
        max_open: int = 64,
        progress: bool | None = None,
    ) -> None:
        if max_open < 1:
            raise ValueError(f"max_open: expected 1 or more, got {max_open}")
        self.files = [Path(file) for file in files]
        self.vocab_size = vocab_size
        self.unmaskable_ids = unmaskable_ids
        self.max_seq_length = max_seq_length
        self._cache_dir = Path(cache_dir)
        self._max_open = max_open
        self.lengths, self._rows, self._begins = length_index(
            self.files, max_seq_length, self._cache_dir, progress
        )
        self._open: OrderedDict[int, h5py.File] = OrderedDict()
        may_keep_open(self, max_open)
        # Training and evaluation read in different threads, and one must not close a file while the
        # other reads. HDF5 itself runs only one thread at a time anyway.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: NDArray[np.integer]) -> ExampleBatch:
        """See `ExampleDataset`. An example may occur more than once."""
        indices = np.asarray(indices, np.int64)
        if not len(indices):
            none = np.empty(0, np.int64)
            return ExampleBatch(none, none, none, none, none, Masks(none, none, none))
        check_mapped(self.lengths, self._rows)
        # HDF5 needs ascending rows without repetition; `places` restores the order given.
        wanted, places = np.unique(indices, return_inverse=True)
        owners = np.searchsorted(self._begins, wanted, side="right") - 1
        parts = []
        with self._lock:
            for number in np.unique(owners):
                some = wanted[owners == number]
                begin, end = self._begins[number : number + 2]
                rows = self._rows[some]
                part = read_examples(
                    self._file(int(number)),
                    rows.astype(np.int64),
                    some - begin - np.searchsorted(self._rows[begin:end], rows),
                    self.lengths[some].astype(np.int64),
                    self.vocab_size,
                )
                parts.append(dataclasses.replace(part, ids=some))
        return ExampleBatch.concatenate(parts)[places]

    def target_counts(self) -> NDArray[np.int64]:
        """See `ExampleDataset`; counts masked tokens and reads all examples."""
        return count_targets(self)

    def close(self) -> None:
        """Closes all files; reading later opens them again."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _file(self, number: int) -> h5py.File:
        file = self._open.pop(number, None)
        if file is None:
            while len(self._open) >= may_keep_open(self, self._max_open):
                self._open.popitem(last=False)[1].close()
            file = open_file(self.files[number])
            try:
                layout_of(file)  # the index may be from the cache, and older than the file
            except BaseException:
                file.close()
                raise
        self._open[number] = file
        return file

    def __reduce__(self) -> tuple[Callable[..., Hdf5Dataset], tuple[dict[str, Any]]]:
        # Pickled by its files: handles cannot travel, and the index is in the cache.
        return _open_again, (
            {
                "files": self.files,
                "vocab_size": self.vocab_size,
                "unmaskable_ids": self.unmaskable_ids,
                "max_seq_length": self.max_seq_length,
                "cache_dir": self._cache_dir,
                "max_open": self._max_open,
            },
        )


def _open_again(arguments: dict[str, Any]) -> Hdf5Dataset:
    return Hdf5Dataset(**arguments)
