"""MDS, the format of mosaicml-streaming, in which the data of ModernBERT and Ettin is published.

A folder has `index.json` and shards. The index says of each shard which columns it has and how
their values are encoded; a shard NAME.mds has, little-endian:

    number of samples S, uint32; byte where each begins and the last ends, uint32 [S + 1]
    a copy of its part of the index, as JSON
    samples: sizes of the values whose size is not fixed, uint32 each; values, column after column

A value of encoding `ndarray` begins with its type and its shape where the encoding leaves them
open. Format: `streaming/base/format/mds/` of mosaicml-streaming. Other columns are not decoded;
some encodings are pickles. A compressed shard is decompressed once, into the cache folder.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad._files import read_json_object
from bert_unpad.data.compressed import ENDINGS, open_file
from bert_unpad.data.readers import Setting, find_files
from bert_unpad.data.readers.cached import cached, cached_each, load_array, save_arrays
from bert_unpad.data.readers.tokens import TokenDataset, TokenFile
from bert_unpad.data.store.manifest import DamagedDataError, count_of

_RAW = "raw.mds"
_PIECE = 1 << 20  # bytes decompressed at a time
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


def open_split(path: Path, setting: Setting) -> TokenDataset:
    """See `bert_unpad.data.readers.open_split`.

    The option `column` names the column; `dtype` is the type of ids in a column of bytes.
    """
    return TokenDataset(functools.partial(_open_files, path, setting), setting)


def _open_files(path: Path, setting: Setting) -> list[TokenFile]:
    indexes = find_files(path, "mds", setting.without)
    shards = [shard for index in indexes for shard in _read_index(index)]
    column = setting.options.get("column", "input_ids")
    dtype = setting.options.get("dtype")
    raw = _decompressed(shards, setting)

    def write(folder: Path) -> None:
        parts = [_index(*pair, column, dtype) for pair in zip(raw, shards, strict=True)]
        dtypes, begins, lengths = zip(*parts, strict=True) if parts else ((), (), ())
        none = np.empty(0, np.int64)
        save_arrays(
            folder,
            dtypes=np.array([kind.str[1:] for kind in dtypes], "S2"),
            counts=np.array([len(part) for part in begins], np.int64),
            begins=np.concatenate([none, *begins]),
            lengths=np.concatenate([none, *lengths]),
        )

    def load(folder: Path) -> list[TokenFile]:
        dtypes = load_array(folder, "dtypes", np.dtype("S2"))
        counts, begins, lengths = (
            load_array(folder, name, np.int64) for name in ("counts", "begins", "lengths")
        )
        ends = np.cumsum(counts)
        if not len(counts) == len(dtypes) == len(shards) or not (
            ends[-1:].sum() == len(begins) == len(lengths)
        ):
            raise ValueError("it does not fit the files")
        return [
            TokenFile(
                file,
                shard.name,
                np.dtype(f"<{kind.decode()}"),
                begins[end - count : end],
                lengths[end - count : end],
            )
            for file, shard, kind, end, count in zip(
                raw, shards, dtypes.tolist(), ends.tolist(), counts.tolist(), strict=True
            )
        ]

    files = [*indexes, *raw]
    return cached(setting.cache_dir, "mds-1", files, [column, dtype], write, load)


def _read_index(path: Path) -> list[_Shard]:
    """Reads an `index.json`.

    Raises:
        DamagedDataError: it is damaged, or names files of other folders.
    """
    try:
        index = read_json_object(path)
        if index.get("version") != 2 or not isinstance(index.get("shards"), list):
            raise ValueError(f"version 2 with shards, got version {index.get('version')!r}")
        return [_read_shard(path.parent, about) for about in index["shards"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedDataError(f"{path}: expected an index of MDS shards: {error}") from error


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


def _decompressed(shards: Sequence[_Shard], setting: Setting) -> list[Path]:
    """Returns the paths of the shards' bytes as they are read."""
    for shard in shards:
        _check_file(shard)
    entries = [
        (
            *(setting.cache_dir, "mds-raw-1", [shard.name], [shard.size]),
            functools.partial(_decompress, shard),
            functools.partial(_load_raw, shard.size),
        )
        for shard in shards
        if shard.name.suffix != ".mds"
    ]
    made = iter(cached_each(entries, "decompressing", setting.progress))
    return [shard.name if shard.name.suffix == ".mds" else next(made) for shard in shards]


def _check_file(shard: _Shard) -> None:
    if not shard.name.is_file():
        raise DamagedDataError(f"{shard.name} does not exist; expected a shard of index.json")
    if shard.name.suffix == ".mds":
        found = shard.name.stat().st_size
        if found != shard.size:
            raise _wrong_size(shard, found)
    elif shard.name.suffix not in ENDINGS:
        raise DamagedDataError(
            f"{shard.name}: expected a shard *.mds, perhaps compressed ({', '.join(ENDINGS)}); "
            "decompress it with mosaicml-streaming"
        )


def _decompress(shard: _Shard, folder: Path) -> None:
    done = 0
    with open_file(shard.name) as file, (folder / _RAW).open("wb") as out:
        while done <= shard.size and (piece := file.read(_PIECE)):
            out.write(piece)
            done += len(piece)
    if done != shard.size:
        raise _wrong_size(shard, done)


def _load_raw(size: int, folder: Path) -> Path:
    if (folder / _RAW).stat().st_size != size:
        raise ValueError(f"{_RAW} is cut off")
    return folder / _RAW


def _wrong_size(shard: _Shard, found: int) -> DamagedDataError:
    return DamagedDataError(
        f"{shard.name}: expected {shard.size:,} bytes, as index.json says, got {found:,}"
    )


Index = tuple[np.dtype, NDArray[np.int64], NDArray[np.int64]]


def _index(path: Path, shard: _Shard, column: str, dtype: str | None) -> Index:
    """Finds the ids of a shard's samples: their type, and where they begin and how many they are.

    Raises:
        DamagedDataError: the shard is damaged, or has no such column; the message names it.
    """
    try:
        if not shard.size:  # which cannot be mapped
            raise ValueError("samples, got an empty file")
        data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
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
    except ValueError as error:
        raise DamagedDataError(f"{shard.name}: expected {error}") from error
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
