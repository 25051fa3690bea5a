"""Megatron's indexed data sets, which NeMo Curator and datatrove write too: NAME.bin and NAME.idx.

NAME.bin has the ids of all sequences, one after another. NAME.idx has, little-endian:

    "MMIDIDX", two bytes 0; version, uint64, which is 1; type of the ids, uint8
    number of sequences S, uint64; number of document borders D, uint64
    ids of each sequence, int32 [S]; byte where each begins, int64 [S]
    sequence with which each document begins, and S, int64 [D]
    a mode of each sequence, int8 [S], in multimodal data sets only

Format: `megatron/core/datasets/indexed_dataset.py` of Megatron-LM. The index is memory-mapped.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.formats import Setting
from bert_unpad.data.formats.tokens import Sequences, cut_sequences, in_blocks
from bert_unpad.data.store.example_batch import ExampleBatch
from bert_unpad.data.store.manifest import DamagedDataError
from bert_unpad.data.store.mapped import map_file

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}  # 6 and 7 are floating point


def examples(path: Path, setting: Setting) -> Iterator[ExampleBatch]:
    """Reads the examples of a data set.

    Examples are made of documents; with the option `unit=sequence`, of the sequences in them.
    """
    whole = setting.options.get("unit", "document") == "document"
    ids = path.with_suffix(".bin")
    return cut_sequences(ids, _sequences(path, ids, whole), setting)


def _sequences(index: Path, ids: Path, whole: bool) -> Iterator[Sequences]:
    dtype, lengths = _read_index(index, ids, whole)
    with ids.open("rb") as file:
        for some in in_blocks(lengths):
            sizes = lengths[some]
            count = int(sizes.sum())
            found = np.fromfile(file, dtype, count)
            if len(found) != count:
                raise DamagedDataError(f"{ids} has become shorter while it was read")
            yield found, sizes


def _read_index(index: Path, ids: Path, whole: bool) -> tuple[np.dtype, NDArray[np.int64]]:
    """Returns the type of the ids, and the length of each sequence or document, int64 [S]."""

    def fail(message: str) -> DamagedDataError:
        return DamagedDataError(f"{index}: {message}")

    if not ids.is_file():
        raise fail(f"expected its ids in {ids}, which does not exist")
    size = index.stat().st_size
    data = map_file(index, np.dtype(np.uint8), size)
    if size < _HEAD.size or bytes(data[:9]) != _MAGIC:
        raise fail("expected an index of Megatron, which begins with MMIDIDX")
    _, version, code, count, borders = _HEAD.unpack(bytes(data[: _HEAD.size]))
    if version != 1 or code not in _DTYPES:
        raise fail(
            f"expected version 1 and ids of an integer type ({', '.join(map(str, _DTYPES))}), got "
            f"version {version} and type {code}"
        )
    expected = _HEAD.size + 12 * count + 8 * borders
    if size not in (expected, expected + count):
        raise fail(
            f"expected {expected:,} bytes for {count:,} sequences and {borders:,} borders of "
            f"documents, got {size:,}"
        )

    dtype, at = np.dtype(f"<{_DTYPES[code]}"), _HEAD.size
    lengths = data[at : at + 4 * count].view("<i4").astype(np.int64)
    begins = data[at + 4 * count : at + 12 * count].view("<i8")
    documents = data[at + 12 * count : expected].view("<i8")
    if count and lengths.min() < 0:
        raise fail(f"expected lengths of 0 or more, got {lengths.min()}")
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if (begins != ends[:-1] * dtype.itemsize).any():
        raise fail("expected sequences one after another, got others")
    total = int(ends[-1]) * dtype.itemsize
    if ids.stat().st_size != total:
        raise DamagedDataError(
            f"{ids}: expected {total:,} bytes, as {index.name} says, got {ids.stat().st_size:,}: "
            "it is cut off, or the two files do not belong together"
        )
    if not whole:
        return dtype, lengths
    if (
        not borders
        or documents[0] != 0
        or documents[-1] != count
        or (documents[1:] < documents[:-1]).any()
    ):
        raise fail(f"expected borders of documents that rise from 0 to {count}")
    return dtype, np.diff(ends[documents])
