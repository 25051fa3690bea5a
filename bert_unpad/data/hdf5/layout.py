"""The two layouts of a file: recognising them, checking a file's structure, and reading its rows.

Names, types and shapes are checked when a file is indexed, and the content of examples when they
are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.hdf5.checks import has_dataset, open_dataset, open_file, read_dataset
from bert_unpad.data.store.example_batch import ExampleBatch, Masks
from bert_unpad.data.store.finished import finished_batch, leading
from bert_unpad.data.store.manifest import DamagedDataError
from bert_unpad.data.store.shards import MAX_LENGTH

Layout = Literal["variable", "fixed"]

COLUMNS = (
    "input_ids",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
_BLOCK = 4096  # rows read at a time while indexing: 2 MB of input_mask in the fixed layout
_MAX_VALUES = 2**22  # of them, at most


def layout_of(file: h5py.File) -> Layout:
    """Returns the layout of a file, after checking names, types and shapes.

    Raises:
        DamagedDataError: it has neither layout; the message names the file and what was expected.
    """

    def fail(message: str) -> DamagedDataError:
        return DamagedDataError(f"{file.filename}: {message}")

    missing = [name for name in COLUMNS if not has_dataset(file, name)]
    if missing:
        raise fail(f"expected datasets {', '.join(COLUMNS)}; there is no {', '.join(missing)}")
    fixed = has_dataset(file, "input_mask")
    names = (*COLUMNS, "input_mask") if fixed else COLUMNS
    columns = {name: open_dataset(file, name) for name in names}
    rows = columns["input_ids"].shape[:1]
    for name, data in columns.items():
        vlen = h5py.check_vlen_dtype(data.dtype)
        flat = name == "next_sentence_labels"
        if data.shape[:1] != rows or data.ndim != (2 if fixed and not flat else 1):
            shape = "[N, length]" if fixed and not flat else "[N]"
            raise fail(f"{name}: expected shape {shape} with N = {list(rows)}, got {data.shape}")
        if (vlen is not None) != (not fixed and not flat):
            kind = "of one length (input_mask is there)" if fixed else "of variable length"
            raise fail(f"{name}: expected integers {kind}, got {data.dtype}")
        values = np.dtype(data.dtype if vlen is None else vlen)  # of strings, vlen is `str`
        if values.kind not in "iu":
            raise fail(f"{name}: expected integers, got {values}")
        if data.shape[1:] > (MAX_LENGTH,):
            raise fail(f"{name}: expected rows of at most {MAX_LENGTH:,}, got {data.shape}")
    for first, second in (
        ("input_ids", "segment_ids"),
        ("input_ids", "input_mask"),
        ("masked_lm_positions", "masked_lm_ids"),
    ):
        if fixed and columns[first].shape != columns[second].shape:
            raise fail(
                f"{second}: expected the shape of {first}, {columns[first].shape}, got "
                f"{columns[second].shape}"
            )
    return "fixed" if fixed else "variable"


def index_file(path: Path, max_seq_length: int) -> NDArray[np.uint16]:
    """Reads the lengths of a file's examples, uint16 [N].

    Raises:
        DamagedDataError: the file is damaged, has an unknown layout, or has an example with no
            tokens or more than `max_seq_length`.
    """
    with open_file(path) as file:
        fixed = layout_of(file) == "fixed"
        column = "input_mask" if fixed else "input_ids"
        count, *width = file[column].shape
        block = min(_BLOCK, max(_MAX_VALUES // max(*width, 1), 1)) if fixed else _BLOCK
        parts = [np.empty(0, np.uint16)]
        for begin in range(0, count, block):
            rows = read_dataset(file, column, slice(begin, begin + block))
            lengths = rows.sum(axis=1, dtype=np.int64) if fixed else _sizes(rows)
            longest = min(max_seq_length, MAX_LENGTH)
            if not 1 <= lengths.min() <= lengths.max() <= longest:
                raise DamagedDataError(
                    f"{path}: expected examples of 1 to {longest} tokens (data.max_seq_length), "
                    f"got {lengths.min()} to {lengths.max()}"
                )
            parts.append(lengths.astype(np.uint16))
    return np.concatenate(parts)


def read_rows(
    file: h5py.File, rows: NDArray[np.int64], lengths: NDArray[np.int64], vocab_size: int
) -> ExampleBatch:
    """Reads examples of one file; their ids are the rows.

    Args:
        file: an open file that `layout_of` has checked.
        rows: int64 [B], strictly ascending.
        lengths: int64 [B], lengths of the examples from the index.
        vocab_size: number of ids.

    Raises:
        DamagedDataError: an example is wrong; the message names the file and what was expected.
    """
    fixed = has_dataset(file, "input_mask")
    ids, segments, positions, labels = (read_dataset(file, name, rows) for name in COLUMNS[:4])
    next_sentence = read_dataset(file, COLUMNS[4], rows)
    if fixed:
        mask = read_dataset(file, "input_mask", rows) != 0
        counts = leading(positions != 0)
        begins = [row[:length] for row, length in zip(mask, lengths, strict=True)]
        if not all(row.all() for row in begins) or (mask.sum(axis=1) != lengths).any():
            raise DamagedDataError(f"{file.filename}: expected padding at the end of input_mask")
        ids, segments = ids[mask], segments[mask]
        taken = np.arange(positions.shape[1]) < counts[:, None]
        positions, labels = positions[taken], labels[taken]
    else:
        counts = _sizes(positions)
        for name, found, expected in (
            ("input_ids", _sizes(ids), lengths),
            ("segment_ids", _sizes(segments), lengths),
            ("masked_lm_ids", _sizes(labels), counts),
        ):
            wrong = np.flatnonzero(found != expected)
            if len(wrong):
                raise DamagedDataError(
                    f"{file.filename}: {name}[{rows[wrong[0]]}]: expected {expected[wrong[0]]} "
                    f"values, got {found[wrong[0]]}"
                )
        ids, segments, positions, labels = (
            np.concatenate([*column, np.empty(0, np.int16)])
            for column in (ids, segments, positions, labels)
        )
    masks = Masks(counts, positions.astype(np.int64), labels.astype(np.int64))
    try:
        return finished_batch(rows, lengths, ids, segments, masks, next_sentence, vocab_size)
    except ValueError as error:
        raise DamagedDataError(f"{file.filename}: {error}") from error


def _sizes(rows: Sequence[NDArray]) -> NDArray[np.int64]:
    return np.fromiter((len(row) for row in rows), np.int64, len(rows))
