"""MDS, the format of mosaicml-streaming, in which the data of ModernBERT and Ettin is published.

A folder has `index.json` and shards. The index says of each shard which columns it has and how
their values are encoded; a shard NAME.mds has, little-endian:

    number of samples S, uint32; byte where each begins and the last ends, uint32 [S + 1]
    a copy of its part of the index, as JSON
    samples: sizes of the values whose size is not fixed, uint32 each; values, column after column

A value of encoding `ndarray` begins with its type and its shape where the encoding leaves them
open. Format: `streaming/base/format/mds/` of mosaicml-streaming. Other columns are not decoded;
some encodings are pickles. A shard, which has some dozen megabytes, is in memory while it is read.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad._files import read_json_object
from bert_unpad._text import gather
from bert_unpad.data.formats import Setting
from bert_unpad.data.formats.compressed import ENDINGS, open_file
from bert_unpad.data.formats.tokens import Sequences, cut_sequences, in_blocks
from bert_unpad.data.store.example_batch import ExampleBatch
from bert_unpad.data.store.manifest import DamagedDataError, count_of

_INDEX = "index.json"
_NDARRAY = re.compile(r"ndarray(?::(u?int(?:8|16|32|64))(?::(\d+(?:,\d+)*))?)?")
_CODES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 32: "u4", 33: "i4", 64: "u8", 65: "i8"}


@dataclass(frozen=True)
class _Shard:
    name: Path
    """The file of the folder, perhaps compressed."""
    size: int
    """Bytes, decompressed."""
    samples: int
    encodings: dict[str, str]
    """Encodings of the columns, in their order in a sample."""
    sizes: list[int | None]
    """Bytes of a value of each column; None where they vary."""


def examples(path: Path, setting: Setting) -> Iterator[ExampleBatch]:
    """Reads the examples of a shard.

    The option `column` names the column; `dtype` is the type of ids in a column of bytes.
    """
    index = path.with_name(_INDEX)
    shard = _read_index(index, index.stat().st_mtime_ns)[path]
    column = setting.options.get("column", "input_ids")
    return cut_sequences(path, _sequences(shard, column, setting.options.get("dtype")), setting)


def files_of(index: Path) -> list[Path]:
    """Returns the shards that an `index.json` names.

    Raises:
        DamagedDataError: the index is damaged, or names files of other folders, or a shard is
            missing; the message names it.
    """
    shards = _read_index(index, index.stat().st_mtime_ns)
    for shard in shards:
        if not shard.is_file():
            raise DamagedDataError(f"{shard} does not exist; expected a shard of {_INDEX}")
        if shard.suffix not in (".mds", *ENDINGS):
            raise DamagedDataError(
                f"{shard}: expected a shard *.mds, perhaps compressed ({', '.join(ENDINGS)}); "
                "decompress it with mosaicml-streaming"
            )
    return list(shards)


@functools.lru_cache(maxsize=1)
def _read_index(path: Path, changed: int) -> dict[Path, _Shard]:
    """Reads an `index.json`, once for all of its shards while `changed`, its time, is the same."""
    try:
        index = read_json_object(path)
        if index.get("version") != 2 or not isinstance(index.get("shards"), list):
            raise ValueError(f"version 2 with shards, got version {index.get('version')!r}")
        shards = [_read_shard(path.parent, about) for about in index["shards"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedDataError(f"{path}: expected an index of MDS shards: {error}") from error
    return {shard.name: shard for shard in shards}


def _read_shard(folder: Path, about: dict[str, Any]) -> _Shard:
    if about["format"] != "mds" or about["version"] != 2:
        raise ValueError(f"format mds, version 2; got {about['format']!r}, {about['version']!r}")
    names, encodings, sizes = (
        list(about[f"column_{name}"]) for name in ("names", "encodings", "sizes")
    )
    if not len(names) == len(encodings) == len(sizes) == len(set(names)):
        raise ValueError("a name, an encoding and a size for each column")
    if not all(isinstance(text, str) for text in (*names, *encodings)):
        raise ValueError("names and encodings as text")
    raw, zipped = about["raw_data"], about["zip_data"]
    places = [folder / _base_name(data) for data in (raw, zipped) if data is not None]
    name = next((place for place in places if place.is_file()), places[0])
    return _Shard(
        name,
        count_of(raw, "bytes", 2**32),
        count_of(about, "samples", 2**30),
        dict(zip(names, encodings, strict=True)),
        [size and count_of({"size": size}, "size", 2**31) for size in sizes],
    )


def _base_name(data: dict[str, Any]) -> str:
    name = data["basename"]
    if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\\0]", name):
        raise ValueError(f"basename: the name of a file in this folder, got {name!r}")
    return name


def _sequences(shard: _Shard, column: str, dtype: str | None) -> Iterator[Sequences]:
    with open_file(shard.name) as file:
        data = np.frombuffer(file.read(shard.size + 1), np.uint8)  # a byte more tells
    if len(data) != shard.size:
        longer = " or more" * (len(data) > shard.size)
        raise DamagedDataError(
            f"{shard.name}: expected {shard.size:,} bytes, as {_INDEX} says, got "
            f"{len(data):,}{longer}"
        )
    try:
        kind, begins, lengths = _find_ids(data, shard, column, dtype)
    except ValueError as error:
        raise DamagedDataError(f"{shard.name}: expected {error}") from error
    for some in in_blocks(lengths):
        sizes = lengths[some] * kind.itemsize
        ids = gather([data], np.zeros(len(sizes), np.int64), begins[some], sizes)
        yield ids.view(kind), lengths[some]


def _find_ids(
    data: NDArray[np.uint8], shard: _Shard, column: str, dtype: str | None
) -> tuple[np.dtype, NDArray[np.int64], NDArray[np.int64]]:
    """Finds the ids of a shard's samples: their type, where they begin and how many they are."""
    begins, sizes = _values(data, shard, column)
    encoding = shard.encodings[column]
    if encoding == "bytes":
        if dtype is None:
            raise ValueError(f"the option dtype of the source, because {column} is bytes")
        kind = np.dtype(dtype).newbyteorder("<")
        lengths = sizes // kind.itemsize
    elif match := _NDARRAY.fullmatch(encoding):
        kind, begins, lengths, sizes = _arrays(data, begins, sizes, *match.groups())
        if dtype is not None and np.dtype(dtype) != kind:
            raise ValueError(f"ids of type {dtype} (the option dtype), got {kind}")
    else:
        raise ValueError(f"{column} of encoding ndarray or bytes, got {encoding}")
    if (lengths * kind.itemsize != sizes).any():
        raise ValueError(f"values of {column} that consist of ids of type {kind}")
    return kind, begins, lengths


def _values(
    data: NDArray[np.uint8], shard: _Shard, column: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns where the values of a column begin, and their sizes in bytes."""
    if column not in shard.encodings:
        columns = ", ".join(f"{name} ({kind})" for name, kind in shard.encodings.items())
        raise ValueError(
            f"a column {column} (the option column of the source names it), got {columns}"
        )
    count = shard.samples
    head = 4 * (count + 2)
    if len(data) < head or int(data[:4].view("<u4")[0]) != count:
        raise ValueError(f"{count} samples, as index.json says")
    offsets = data[4:head].view("<u4").astype(np.int64)
    starts, ends = offsets[:-1], offsets[1:]
    if offsets[0] < head or (starts > ends).any() or offsets[-1] != len(data):
        raise ValueError("samples one after another up to its end")
    varying = [size is None for size in shard.sizes]
    at = starts + 4 * sum(varying)
    if (at > ends).any():
        raise ValueError("sizes of all values in each sample")
    numbers = iter(range(len(varying)))
    for name, size in zip(shard.encodings, shard.sizes, strict=True):
        if size is None:
            sizes = _numbers(data, starts + 4 * next(numbers), 4)
        else:
            sizes = np.full(count, size, np.int64)
        if name == column:
            found = at, sizes
        at = at + sizes
    if (at != ends).any():
        raise ValueError("values that fill their samples")
    return found


def _arrays(
    data: NDArray[np.uint8],
    at: NDArray[np.int64],
    sizes: NDArray[np.int64],
    dtype: str | None,
    shape: str | None,
) -> tuple[np.dtype, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Reads the heads of values of encoding `ndarray`.

    Returns:
        Type of the ids; where they begin, how many they are, and their bytes, int64 [S] each.
    """
    ends = at + sizes
    if dtype is None:
        codes = np.unique(_inside(data, at, 1, ends))
        if len(codes) > 1 or not set(codes.tolist()) <= set(_CODES):
            raise ValueError(f"ids of one integer type, got {codes.tolist()}")
        dtype = _CODES[int(codes[0])] if len(codes) else "i8"
        at = at + 1
    if shape is None:
        heads = _inside(data, at, 1, ends)
        if (heads >> 2 != 1).any():
            raise ValueError("arrays of one dimension")
        widths, lengths = 1 << (heads & 3), np.zeros(len(at), np.int64)
        for width in np.unique(widths).tolist():
            here = widths == width
            lengths[here] = _inside(data, at[here] + 1, width, ends[here])
        at = at + 1 + widths
    else:
        product = math.prod(map(int, shape.split(",")))
        lengths = np.full(len(at), min(product, len(data) + 1), np.int64)  # more is refused below
    kind = np.dtype(dtype).newbyteorder("<")
    if ((lengths < 0) | (lengths > ends - at)).any():
        raise ValueError("arrays inside of their samples")
    return kind, at, lengths, ends - at


def _inside(
    data: NDArray[np.uint8], at: NDArray[np.int64], width: int, ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    if (at + width > ends).any():
        raise ValueError("arrays inside of their samples")
    return _numbers(data, at, width)


def _numbers(data: NDArray[np.uint8], at: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Reads an unsigned number of so many bytes at each place."""
    pieces = np.ascontiguousarray(data[at[:, None] + np.arange(width)])
    return pieces.view(f"<u{width}")[:, 0].astype(np.int64)
