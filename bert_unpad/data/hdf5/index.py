"""The lengths of all examples of many files, computed once and cached.

Balancing an epoch needs every length, and reading them from thousands of files takes hours of one
core.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.hdf5.layout import index_file
from bert_unpad.data.readers.cached import cached, cached_each, load_array, save_arrays


def length_index(
    files: Sequence[Path], max_seq_length: int, cache_dir: Path, progress: bool | None = None
) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Returns the lengths of all examples, file after file, memory-mapped from the cache.

    Many processes can call this at once: one makes the index, the others wait.

    Args:
        files: the files to index.
        max_seq_length: longest allowed example, in tokens.
        cache_dir: folder of the cached index.
        progress: whether to show a bar; None shows it if stderr is a terminal.

    Returns:
        Lengths, uint16 [N], and where the examples of each file begin, int64 [files + 1].

    Raises:
        DamagedDataError: a file is wrong; the message names it and what was expected.
    """
    # First file by file, so that processes share the work and an interrupted run continues.
    entries = [
        (
            *(cache_dir, "hdf5-file-1", [file], [max_seq_length]),
            functools.partial(_write_lengths, file, max_seq_length),
            functools.partial(load_array, name="lengths", dtype=np.uint16, mapped=False),
        )
        for file in files
    ]

    def write(folder: Path) -> None:
        parts = cached_each(entries, "indexing", progress)
        begins = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
        save_arrays(folder, lengths=np.concatenate(parts), begins=begins)

    def load(folder: Path) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        lengths = load_array(folder, "lengths", np.uint16)
        begins = load_array(folder, "begins", np.int64)
        if (
            len(begins) != len(files) + 1
            or (begins[0], begins[-1]) != (0, len(lengths))
            or (np.diff(begins) < 0).any()
        ):
            raise ValueError("it does not fit the files")
        return lengths, begins

    return cached(cache_dir, "hdf5-2", files, [max_seq_length], write, load)


def _write_lengths(path: Path, max_seq_length: int, folder: Path) -> None:
    save_arrays(folder, lengths=index_file(path, max_seq_length))
