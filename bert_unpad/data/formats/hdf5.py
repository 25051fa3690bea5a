"""Examples in HDF5 files, in the three layouts of MLPerf's BERT benchmark.

All hold finished examples: sentence pairs with next-sentence labels and masks.

    variable length                                 fixed length (S tokens, P predictions at most)
    input_ids            int16 of any length [N]    input_ids            int16 [N, S], padded
                                                    input_mask           int8 [N, S], 1 = real
    segment_ids          int8 of any length [N]     segment_ids          int8 [N, S]
    masked_lm_positions  int16 of any length [N]    masked_lm_positions  int16 [N, P], 0 = none
    masked_lm_ids        int16 of any length [N]    masked_lm_ids        int16 [N, P]
    next_sentence_labels int8 [N]                   next_sentence_labels int8 [N]

Packed files (create_packed_trainset.py of NVIDIA's submissions from 1.1 on) hold several examples a
row, one after another, and are read example by example. They have the datasets of variable length,
next_sentence_labels of variable length too, and

    packed_input_len, packed_masked_lm_len   int16 of any length [N]: tokens, masks of each example

with masked_lm_positions that count from the begin of the row.

HDF5 can keep the values of a dataset in another file: through a link, as raw data, or combined from
several files. With that, a data file could make an import read any other file, so all three are
errors before anything is opened. A dataset can also declare huge numbers of values that were never
written.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.formats import Setting
from bert_unpad.data.formats.finished import finished_batch, leading
from bert_unpad.data.store.example_batch import ExampleBatch, Masks
from bert_unpad.data.store.manifest import DamagedDataError
from bert_unpad.data.store.shards import MAX_LENGTH

Layout = Literal["variable", "fixed", "packed"]

_COLUMNS = (
    "input_ids",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)
_MARKS: dict[str, Layout] = {"input_mask": "fixed", "packed_input_len": "packed"}  # else variable
_MORE = {
    "variable": (),
    "fixed": ("input_mask",),
    "packed": ("packed_input_len", "packed_masked_lm_len"),
}
_BLOCK = 4096  # rows read at a time
_MAX_VALUES = 2**22  # of them in a column of one length, at most
_MAX_CHUNK = 2**28  # bytes; the whole of a chunk is in memory to read a row of it

# What h5py raises of a damaged file: it chooses one of these by the number of HDF5's error.
_DAMAGE = (OSError, RuntimeError, LookupError, ValueError, TypeError, MemoryError)


def examples(path: Path, setting: Setting) -> Iterator[ExampleBatch]:
    """Reads the examples of a file of any layout."""
    with _open_file(path) as file:
        layout = _layout_of(file)
        count, *width = file["input_ids"].shape
        block = min(_BLOCK, max(_MAX_VALUES // max(*width, 1), 1)) if width else _BLOCK
        for begin in range(0, count, block):
            columns = [
                _read_dataset(file, name, slice(begin, begin + block))
                for name in (*_COLUMNS, *_MORE[layout])
            ]
            try:
                if layout == "fixed":
                    yield _fixed(columns, setting)
                else:
                    yield _varying(begin, columns, setting)
            except ValueError as error:
                raise DamagedDataError(f"{path}: {error}") from error


def _layout_of(file: h5py.File) -> Layout:
    """Returns the layout of a file, after checking names, types and shapes."""

    def fail(message: str) -> DamagedDataError:
        return DamagedDataError(f"{file.filename}: {message}")

    marks = (layout for name, layout in _MARKS.items() if _has_dataset(file, name))
    layout: Layout = next(marks, "variable")
    names = (*_COLUMNS, *_MORE[layout])
    missing = [name for name in names if not _has_dataset(file, name)]
    if missing:
        raise fail(f"expected datasets {', '.join(names)}; there is no {', '.join(missing)}")
    columns = {name: _open_dataset(file, name) for name in names}
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


def _fixed(columns: Sequence[NDArray], setting: Setting) -> ExampleBatch:
    """Makes examples of padded rows."""
    ids, segments, positions, labels, following, mask = columns
    mask = mask != 0
    lengths = leading(mask)
    if (mask.sum(axis=1) != lengths).any():
        raise ValueError("expected padding at the end of input_mask")
    _check_lengths(lengths, setting)
    counts = leading(positions != 0)
    taken = np.arange(positions.shape[1]) < counts[:, None]
    masks = Masks(counts, positions[taken].astype(np.int64), labels[taken].astype(np.int64))
    return finished_batch(
        *(lengths, ids[mask], segments[mask], masks, following), setting.vocab_size
    )


def _varying(begin: int, columns: Sequence[NDArray], setting: Setting) -> ExampleBatch:
    """Makes examples of rows of any length, or of those of a packed file."""
    ids, segments, positions, labels, following, *packed = columns
    if packed:
        lengths, counts = (_flat(rows) for rows in packed)
        examples = _sizes(packed[0])  # of each row
        _check_sizes("packed_masked_lm_len", begin, packed[1], examples)
        _check_sizes("next_sentence_labels", begin, following, examples)
        following = _flat(following)
    else:
        lengths, counts = _sizes(ids), _sizes(positions)
        examples = np.ones(len(lengths), np.int64)
    _check_lengths(lengths, setting)
    if counts.min(initial=0) < 0:
        raise ValueError(f"packed_masked_lm_len: expected 0 or more, got {counts.min()}")
    tokens, masks = _row_sums(lengths, examples), _row_sums(counts, examples)
    _check_sizes("input_ids", begin, ids, tokens)
    _check_sizes("segment_ids", begin, segments, tokens)
    _check_sizes("masked_lm_positions", begin, positions, masks)
    _check_sizes("masked_lm_ids", begin, labels, masks)
    # Positions count from the begin of the row.
    rows = np.repeat(np.cumsum(tokens) - tokens, examples)
    begins = np.cumsum(lengths) - lengths - rows
    places = _flat(positions) - np.repeat(begins, counts)
    return finished_batch(
        *(lengths, _flat(ids), _flat(segments), Masks(counts, places, _flat(labels)), following),
        setting.vocab_size,
    )


def _check_lengths(lengths: NDArray[np.int64], setting: Setting) -> None:
    longest = min(setting.max_seq_length, MAX_LENGTH)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= longest:
        raise ValueError(
            f"expected examples of 1 to {longest} tokens (max_seq_length), got {lengths.min()} to "
            f"{lengths.max()}"
        )


def _check_sizes(name: str, begin: int, rows: NDArray, expected: NDArray[np.int64]) -> None:
    found = _sizes(rows)
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        at = wrong[0]
        raise ValueError(f"{name}[{begin + at}]: expected {expected[at]} values, got {found[at]}")


def _sizes(rows: NDArray) -> NDArray[np.int64]:
    return np.fromiter((len(row) for row in rows), np.int64, len(rows))


def _flat(rows: NDArray) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *rows], dtype=np.int64, casting="unsafe")


def _row_sums(values: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Adds up so many values for each row; a row may have none."""
    ends = np.cumsum(counts)
    sums = np.concatenate([[0], np.cumsum(values)])
    return sums[ends] - sums[ends - counts]


def _open_file(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except _DAMAGE as error:
        raise DamagedDataError(f"{path}: expected a complete HDF5 file ({error})") from error


def _has_dataset(file: h5py.File, name: str) -> bool:
    with _named(file, name):
        return bool(file.id.links.exists(name.encode()))


def _open_dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Opens a dataset at the top level of a file, but only one with all values in that file."""
    with _named(file, name):
        # h5py's own `in` and `get` would follow a link, and so open the file that it names.
        if file.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            raise _wrong(file, name, "expected a dataset of this file, got a link")
        data = file[name]
        if not isinstance(data, h5py.Dataset):
            raise _wrong(file, name, f"expected a dataset, got a {type(data).__name__.lower()}")
        if data.is_virtual or data.external:
            raise _wrong(file, name, "expected values in this file, got the name of another file")
        if data.shape is None:
            raise _wrong(file, name, "expected values, got none")
        if data.chunks is None:
            whole = data.id.get_storage_size() >= data.size * data.dtype.itemsize
        else:
            if math.prod(data.chunks) * data.dtype.itemsize > _MAX_CHUNK:
                raise _wrong(file, name, f"expected chunks of at most {_MAX_CHUNK:,} bytes")
            sizes = zip(data.shape, data.chunks, strict=True)
            whole = data.id.get_num_chunks() == math.prod(-(-size // part) for size, part in sizes)
        if not whole:
            raise _wrong(file, name, f"{data.shape} values are declared, but not all were written")
        return data


def _read_dataset(file: h5py.File, name: str, rows: slice) -> NDArray:
    with _named(file, name):
        return file[name][rows]


def _wrong(file: h5py.File, name: str, message: str) -> DamagedDataError:
    return DamagedDataError(f"{file.filename}: {name}: {message}")


@contextmanager
def _named(file: h5py.File, name: str) -> Iterator[None]:
    try:
        yield
    except DamagedDataError:
        raise
    except _DAMAGE as error:
        raise DamagedDataError(f"{file.filename}: {name} cannot be read ({error})") from error
