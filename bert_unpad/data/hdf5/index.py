"""The lengths of all examples of many files, and their rows, computed once and cached.

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

Index = tuple[NDArray[np.uint16], NDArray[np.int32], NDArray[np.int64]]


def length_index(
    files: Sequence[Path], max_seq_length: int, cache_dir: Path, progress: bool | None = None
) -> Index:
    """Returns the lengths of all examples, file after file, memory-mapped from the cache.

    Many processes can call this at once: one makes the index, the others wait.

    Args:
        files: the files to index.
        max_seq_length: longest allowed example, in tokens.
        cache_dir: folder of the cached index.
        progress: whether to show a bar; None shows it if stderr is a terminal.

    Returns:
        Lengths, uint16 [N]; the row of its file that each example is in, int32 [N]; where the
        examples of each file begin, int64 [files + 1].

    Raises:
        DamagedDataError: a file is wrong; the message names it and what was expected.
    """
    # First file by file, so that processes share the work and an interrupted run continues.
    entries = [
        (
            *(cache_dir, "hdf5-file-1", [file], [max_seq_length]),
            functools.partial(_write_columns, file, max_seq_length),
            _load_columns,
        )
        for file in files
    ]

    def write(folder: Path) -> None:
        parts = cached_each(entries, "indexing", progress)
        lengths, rows = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        begins = np.cumsum([0, *(len(part) for part, _ in parts)], dtype=np.int64)
        save_arrays(folder, lengths=lengths, rows=rows, begins=begins)

    def load(folder: Path) -> Index:
        lengths, rows = _load_columns(folder, mapped=True)
        begins = load_array(folder, "begins", np.int64)
        if (
            len(begins) != len(files) + 1
            or (begins[0], begins[-1]) != (0, len(lengths))
            or (np.diff(begins) < 0).any()
        ):
            raise ValueError("it does not fit the files")
        return lengths, rows, begins

    return cached(cache_dir, "hdf5-2", files, [max_seq_length], write, load)


def _load_columns(
    folder: Path, mapped: bool = False
) -> tuple[NDArray[np.uint16], NDArray[np.int32]]:
    lengths = load_array(folder, "lengths", np.uint16, mapped)
    rows = load_array(folder, "rows", np.int32, mapped)
    if len(lengths) != len(rows):
        raise ValueError("columns of two lengths")
    return lengths, rows


def _write_columns(path: Path, max_seq_length: int, folder: Path) -> None:
    lengths, rows = index_file(path, max_seq_length)
    save_arrays(folder, lengths=lengths, rows=rows)
