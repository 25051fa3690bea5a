"""The index of TFRecord files: every record's place, checksum and number of tokens, read once."""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bert_unpad._crc32c import masked_crc32c_of
from bert_unpad.data.readers import Setting
from bert_unpad.data.readers.cached import cached, cached_each, load_array, save_arrays
from bert_unpad.data.readers.tf_example import Lists, floats, integers, read_lists
from bert_unpad.data.store.manifest import DamagedDataError
from bert_unpad.data.store.shards import MAX_LENGTH

_BLOCK = 1024  # records at a time
_MAX_RECORD = 2**20  # bytes; the longest example has 65,535 tokens
_MAX_PADDED = 2**23  # bytes whose checksums are computed side by side
_COLUMNS = {"begins": np.int64, "sizes": np.int32, "lengths": np.uint16, "masked": np.uint16}

Columns = dict[str, NDArray]
Made = TypeVar("Made")


def by_all_or_each(
    make: Callable[..., Made], name: Callable[[int], str], *columns: Sequence[Any] | NDArray
) -> Made:
    """Calls a function once with all records; if that fails, finds the record to name in the error.

    Args:
        make: called with the columns.
        name: returns the name of a record by its number.
        columns: of equal length, one entry a record.

    Raises:
        DamagedDataError: `make` has raised a ValueError.
    """
    try:
        return make(*columns)
    except ValueError:
        for at in range(len(columns[0])):
            try:
                make(*(column[at : at + 1] for column in columns))
            except ValueError as error:
                raise DamagedDataError(f"{name(at)}: {error}") from error
        raise


def record_index(files: Sequence[Path], setting: Setting) -> tuple[NDArray[np.int64], Columns]:
    """Returns the number of records of each file, and the index of all records, file after file.

    The index has where each record begins, its bytes, its real tokens and its masked tokens. It is
    made once, kept in the cache, and memory-mapped.

    Raises:
        DamagedDataError: a file is damaged or no TFRecord file of examples; the message names it.
    """

    # First file by file, so that processes share the work and an interrupted run continues.
    entries = [
        (
            *(setting.cache_dir, "tfrecord-file-1", [file], [setting.pad_id]),
            functools.partial(_write_index, file, setting.pad_id),
            _load_columns,
        )
        for file in files
    ]

    def write(folder: Path) -> None:
        parts = cached_each(entries, "indexing", setting.progress)
        columns = {name: np.concatenate([part[name] for part in parts]) for name in _COLUMNS}
        counts = np.array([len(part["begins"]) for part in parts], np.int64)
        save_arrays(folder, counts=counts, **columns)

    def load(folder: Path) -> tuple[NDArray[np.int64], Columns]:
        columns = _load_columns(folder, mapped=True)
        counts = load_array(folder, "counts", np.int64)
        if len(counts) != len(files) or counts.sum() != len(columns["begins"]):
            raise ValueError("it does not fit the files")
        return counts, columns

    return cached(setting.cache_dir, "tfrecord-1", files, [setting.pad_id], write, load)


def _load_columns(folder: Path, mapped: bool = False) -> Columns:
    columns = {name: load_array(folder, name, kind, mapped) for name, kind in _COLUMNS.items()}
    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError("columns of several lengths")
    return columns


def _write_index(path: Path, pad_id: int | None, folder: Path) -> None:
    save_arrays(folder, **_index_file(path, pad_id))


def _index_file(path: Path, pad_id: int | None) -> Columns:
    """Checks and measures all records of a file.

    Raises:
        DamagedDataError: it is damaged, or a record is no example; the message names it.
    """
    parts: list[Columns] = [{name: np.empty(0, kind) for name, kind in _COLUMNS.items()}]
    size, at, count = path.stat().st_size, 0, 0
    if size:  # an empty file cannot be mapped
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            data.madvise(mmap.MADV_SEQUENTIAL)
            while at < size:
                begins, sizes, at = _block(path, data, at, count)
                parts.append(_columns(path, data, begins, sizes, count, pad_id))
                count += len(begins)
    return {name: np.concatenate([part[name] for part in parts]) for name in _COLUMNS}


def _columns(
    path: Path, data: mmap.mmap, begins: list[int], sizes: list[int], first: int, pad_id: int | None
) -> Columns:
    """Measures records; `first` is the number of the first one."""
    lengths, masked = by_all_or_each(
        functools.partial(_measure, pad_id=pad_id),
        lambda at: f"{path}: record {first + at}",
        [data[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)],
    )
    columns = zip(_COLUMNS.items(), (begins, sizes, lengths, masked), strict=True)
    return {name: np.asarray(column).astype(kind) for (name, kind), column in columns}


def _block(path: Path, data: mmap.mmap, at: int, number: int) -> tuple[list[int], list[int], int]:
    """Finds the next records of a file and compares their checksums.

    Returns:
        Where they begin, their sizes in bytes, and where the last one ends.
    """

    def fail(record: int, message: str) -> DamagedDataError:
        return DamagedDataError(f"{path}: record {number + record}: {message}")

    begins: list[int] = []
    sizes, heads, crcs = [], [], []
    broken = None
    while at < len(data) and len(begins) < _BLOCK:
        if len(data) - at < 12:
            broken = "expected a whole record, but the file is cut off"
            break
        heads.append(data[at : at + 8])
        length, crc = struct.unpack_from("<QI", data, at)
        crcs.append(crc)
        if length > min(_MAX_RECORD, len(data) - at - 16):
            broken = (
                f"expected at most {_MAX_RECORD:,} bytes, within the {len(data):,} of the file, "
                f"got {length:,}: it is cut off, or no TFRecord file of examples"
            )
            break
        begins.append(at + 12)
        sizes.append(length)
        at += length + 16
    # Before the size is believed: a wrong one looks like a file that is cut off.
    wrong = np.flatnonzero(masked_crc32c_of(heads) != np.array(crcs, np.uint32))
    if len(wrong):
        compressed = data[:2] == b"\x1f\x8b"
        raise fail(
            int(wrong[0]),
            "expected an uncompressed file, got gzip; decompress it"
            if compressed
            else "the checksum of its size is wrong: the file is damaged, or no TFRecord file",
        )
    crcs = [struct.unpack_from("<I", data, b + n)[0] for b, n in zip(begins, sizes, strict=True)]
    step = max(_MAX_PADDED // max([*sizes, 1]), 1)
    for first in range(0, len(begins), step):
        some = slice(first, first + step)
        records = [data[b : b + n] for b, n in zip(begins[some], sizes[some], strict=True)]
        wrong = np.flatnonzero(masked_crc32c_of(records) != np.array(crcs[some], np.uint32))
        if len(wrong):
            raise fail(first + int(wrong[0]), "its checksum is wrong: the file is damaged")
    if broken is not None:
        raise fail(len(begins), broken)
    return begins, sizes, at


def _measure(
    data: Sequence[bytes], pad_id: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the numbers of real tokens and of masked tokens of each record."""
    records = [read_lists(record) for record in data]
    lengths = _real(records, b"input_mask", lambda each: _mask(each, pad_id))
    masked = _real(records, b"masked_lm_weights", _weights)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= MAX_LENGTH:
        raise ValueError(
            f"input_mask: expected 1 to {MAX_LENGTH:,} tokens, got {lengths.min()} to "
            f"{lengths.max()}"
        )
    return lengths, np.minimum(masked, MAX_LENGTH)


Flags = tuple[NDArray[np.bool_], NDArray[np.int64]]


def _mask(records: Sequence[Lists], pad_id: int | None) -> Flags:
    """Says which tokens are real, and how many numbers each record has."""
    if b"input_mask" in records[0] or pad_id is None:
        values, counts = integers(records, b"input_mask")
        if not np.isin(values, (0, 1)).all():
            raise ValueError("input_mask: expected 0 or 1")
        return values == 1, counts
    values, counts = integers(records, b"input_ids")
    return values != pad_id, counts


def _weights(records: Sequence[Lists]) -> Flags:
    """Says which masked tokens are real, and how many numbers each record has."""
    if b"masked_lm_weights" in records[0]:
        weights, counts = floats(records, b"masked_lm_weights")
        if not np.isin(weights, (0, 1)).all():
            raise ValueError("masked_lm_weights: expected 0 or 1")
        return weights == 1, counts
    values, counts = integers(records, b"masked_lm_positions")
    return values != 0, counts


def _real(
    records: Sequence[Lists], name: bytes, flags_of: Callable[[Sequence[Lists]], Flags]
) -> NDArray[np.int64]:
    """Counts what is real in each record; `name` is the feature that may be missing."""
    found = np.zeros(len(records), np.int64)
    there = np.array([name in lists for lists in records])
    for which in (there, ~there):
        if not which.any():
            continue
        flags, counts = flags_of([records[i] for i in np.flatnonzero(which).tolist()])
        owner = np.repeat(np.arange(len(counts)), counts)
        if (np.diff(flags.astype(np.int8))[np.diff(owner) == 0] > 0).any():
            raise ValueError(f"{name.decode()}: expected padding at the end")
        found[which] = np.bincount(owner[flags], minlength=len(counts))
    return found
