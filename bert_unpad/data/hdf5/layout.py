"""The three layouts of a file: recognising them, checking a file's structure, reading examples.

Names, types and shapes are checked when a file is indexed, and the content of examples when they
are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.hdf5.checks import has_dataset, open_dataset, open_file, read_dataset
from bert_unpad.data.store.example_batch import ExampleBatch, Masks
from bert_unpad.data.store.finished import finished_batch, leading
from bert_unpad.data.store.manifest import DamagedDataError
from bert_unpad.data.store.shards import MAX_LENGTH

Layout = Literal["variable", "fixed", "packed"]

COLUMNS = (
    "input_ids",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
_MARKS: dict[str, Layout] = {"input_mask": "fixed", "packed_input_len": "packed"}  # else variable
_PACKED = ("packed_input_len", "packed_masked_lm_len")
_BLOCK = 4096  # rows read at a time while indexing: 2 MB of input_mask in the fixed layout
_MAX_VALUES = 2**22  # of them, at most


def layout_of(file: h5py.File) -> Layout:
    """Returns the layout of a file, after checking names, types and shapes.

    Raises:
        DamagedDataError: it has none of them; the message names the file and what was expected.
    """

    def fail(message: str) -> DamagedDataError:
        return DamagedDataError(f"{file.filename}: {message}")

    layout = _layout(file)
    more = {"variable": (), "fixed": ("input_mask",), "packed": _PACKED}[layout]
    names = (*COLUMNS, *more)
    missing = [name for name in names if not has_dataset(file, name)]
    if missing:
        raise fail(f"expected datasets {', '.join(names)}; there is no {', '.join(missing)}")
    columns = {name: open_dataset(file, name) for name in names}
    rows = columns["input_ids"].shape[:1]
    for name, data in columns.items():
        vlen = h5py.check_vlen_dtype(data.dtype)
        flat = name == "next_sentence_labels" and layout != "packed"
        wide = layout == "fixed" and not flat
        if data.shape[:1] != rows or data.ndim != (2 if wide else 1):
            shape = "[N, length]" if wide else "[N]"
            raise fail(f"{name}: expected shape {shape} with N = {list(rows)}, got {data.shape}")
        if (vlen is not None) != (not wide and not flat):
            kind = "of variable length" if vlen is None else "of one length"
            raise fail(f"{name}: expected integers {kind} (layout {layout}), got {data.dtype}")
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
        if layout == "fixed" and columns[first].shape != columns[second].shape:
            raise fail(
                f"{second}: expected the shape of {first}, {columns[first].shape}, got "
                f"{columns[second].shape}"
            )
    return layout


def _layout(file: h5py.File) -> Layout:
    return next((layout for name, layout in _MARKS.items() if has_dataset(file, name)), "variable")


def index_file(path: Path, max_seq_length: int) -> tuple[NDArray[np.uint16], NDArray[np.int32]]:
    """Reads the lengths of a file's examples, uint16 [N], and the row of each, int32 [N].

    Raises:
        DamagedDataError: the file is damaged, has an unknown layout, or has an example with no
            tokens or more than `max_seq_length`.
    """
    with open_file(path) as file:
        layout = layout_of(file)
        column = {"variable": "input_ids", "fixed": "input_mask", "packed": _PACKED[0]}[layout]
        count, *width = file[column].shape
        block = min(_BLOCK, max(_MAX_VALUES // max(*width, 1), 1)) if width else _BLOCK
        parts, counts = [np.empty(0, np.uint16)], [np.empty(0, np.int64)]
        for begin in range(0, count, block):
            rows = read_dataset(file, column, slice(begin, begin + block))
            if layout == "fixed":
                lengths = rows.sum(axis=1, dtype=np.int64)
            else:
                lengths = _sizes(rows) if layout == "variable" else np.concatenate(rows)
            longest = min(max_seq_length, MAX_LENGTH)
            if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= longest:
                raise DamagedDataError(
                    f"{path}: expected examples of 1 to {longest} tokens (data.max_seq_length), "
                    f"got {lengths.min()} to {lengths.max()}"
                )
            parts.append(lengths.astype(np.uint16))
            counts.append(_sizes(rows) if layout == "packed" else np.ones(len(rows), np.int64))
    owners = np.repeat(np.arange(count, dtype=np.int32), np.concatenate(counts))
    return np.concatenate(parts), owners


def read_examples(
    file: h5py.File,
    rows: NDArray[np.int64],
    places: NDArray[np.int64],
    lengths: NDArray[np.int64],
    vocab_size: int,
) -> ExampleBatch:
    """Reads examples of one file; their ids are the rows.

    Args:
        file: an open file that `layout_of` has checked.
        rows: int64 [B], ascending; only those of a packed file may occur more than once.
        places: int64 [B], places of the examples in their rows, 0 but in packed files.
        lengths: int64 [B], lengths of the examples from the index.
        vocab_size: number of ids.

    Raises:
        DamagedDataError: an example is wrong; the message names the file and what was expected.
    """
    layout = _layout(file)
    if layout == "packed":
        columns = _unpacked(file, rows, places)
    else:
        columns = [read_dataset(file, name, rows) for name in COLUMNS]
    ids, segments, positions, labels, next_sentence = columns
    if layout == "fixed":
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
        return finished_batch(
            *(rows, lengths, ids, segments, masks, np.asarray(next_sentence)), vocab_size
        )
    except ValueError as error:
        raise DamagedDataError(f"{file.filename}: {error}") from error


def _unpacked(file: h5py.File, rows: NDArray[np.int64], places: NDArray[np.int64]) -> list[Any]:
    """Reads examples of a packed file, as the columns of one of variable length."""
    wanted, owners = np.unique(rows, return_inverse=True)
    columns = [read_dataset(file, name, wanted) for name in (*COLUMNS, *_PACKED)]
    packs = []
    for row, *values in zip(wanted.tolist(), *columns, strict=True):
        try:
            packs.append(_examples_of(*values))
        except ValueError as error:
            raise DamagedDataError(f"{file.filename}: row {row}: {error}") from error
    examples = []
    for owner, place in zip(owners.tolist(), places.tolist(), strict=True):
        if place >= len(packs[owner]):
            raise DamagedDataError(
                f"{file.filename}: row {wanted[owner]}: expected more than {place} sequences, got "
                f"{len(packs[owner])}"
            )
        examples.append(packs[owner][place])
    return list(zip(*examples, strict=True))


def _examples_of(*values: NDArray) -> list[tuple]:
    """The examples of a pack, whose values are those of a row of `COLUMNS` and `_PACKED`."""
    ids, segments, positions, labels, next_sentence = values[:5]
    sizes, counts = (column.astype(np.int64) for column in values[5:])
    ends, masked = np.cumsum(sizes), np.cumsum(counts)
    tokens, masks = ends[-1:].sum(), masked[-1:].sum()
    expected = (len(sizes), tokens, tokens, masks, masks, len(sizes))
    names = (_PACKED[1], *COLUMNS)
    for name, column, size in zip(names, (counts, *values[:5]), expected, strict=True):
        if len(column) != size:
            raise ValueError(f"{name}: expected {size} values, got {len(column)}")
    parts = np.split(positions.astype(np.int64), masked[:-1])  # which count from the row's begin
    columns = (
        np.split(ids, ends[:-1]),
        np.split(segments, ends[:-1]),
        [part - begin for part, begin in zip(parts, ends - sizes, strict=False)],
        np.split(labels, masked[:-1]),
        next_sentence,
    )
    return list(zip(*columns, strict=False))  # a row may be empty, and then is one part


def _sizes(rows: NDArray | Sequence[NDArray]) -> NDArray[np.int64]:
    return np.fromiter((len(row) for row in rows), np.int64, len(rows))
