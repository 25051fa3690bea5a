"""Random token ids and examples in the formats of other tools, for the rate of imports."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.lib.feed_files import VOCABULARY, tokenizer
from bert_unpad._crc32c import masked_crc32c_of
from bert_unpad._protobuf import write_message, write_varint
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS

LENGTH, PREDICTIONS = 512, 76  # of an example, in MLPerf's files
_SHORTEST, _LONGEST = 16, 2000  # ids of a sequence


def _sequences(count: int) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Ids end to end, and the length of each sequence."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(_SHORTEST, _LONGEST, count)
    ids = rng.integers(len(SPECIAL_TOKENS), VOCABULARY, int(lengths.sum()))
    return ids.astype(np.uint16), lengths


def write_megatron(path: Path, count: int) -> None:
    """Writes NAME.bin and NAME.idx."""
    ids, lengths = _sequences(count)
    ids.tofile(path.with_suffix(".bin"))
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, count, count + 1)
    begins = 2 * (np.cumsum(lengths) - lengths)
    columns = (lengths.astype("<i4"), begins.astype("<i8"), np.arange(count + 1, dtype="<i8"))
    path.with_suffix(".idx").write_bytes(head + b"".join(x.tobytes() for x in columns))


def write_parquet(path: Path, count: int) -> None:
    """Writes a file of lists of int32, as the `datasets` library does."""
    ids, lengths = _sequences(count)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = pa.ListArray.from_arrays(pa.array(ends), pa.array(ids.astype(np.int32)))
    pq.write_table(pa.table({"input_ids": rows}), path.with_suffix(".parquet"))


def write_mds(path: Path, count: int) -> None:
    """Writes a folder with a shard of encoding `ndarray:uint16`."""
    ids, lengths = _sequences(count)
    parts = [
        struct.pack("<IBH", 2 * len(part) + 3, 1 << 2 | 1, len(part)) + part.tobytes()
        for part in np.split(ids, np.cumsum(lengths)[:-1])
    ]
    begins = 4 * (count + 2) + np.cumsum([0, *map(len, parts)])
    data = struct.pack("<I", count) + begins.astype("<u4").tobytes() + b"".join(parts)
    path.mkdir()
    (path / "shard.00000.mds").write_bytes(data)
    shard = {
        "column_names": ["input_ids"],
        "column_encodings": ["ndarray:uint16"],
        "column_sizes": [None],
        "format": "mds",
        "version": 2,
        "samples": count,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(data)},
        "zip_data": None,
    }
    (path / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))


def _padded(count: int) -> dict[str, NDArray[np.int64]]:
    """The columns of MLPerf's files of fixed length, and the lengths."""
    made, rng = tokenizer(), np.random.default_rng(0)
    lengths = rng.integers(_SHORTEST, LENGTH + 1, count)[:, None]
    places = np.arange(LENGTH)
    real = places < lengths
    ids = np.where(real, rng.integers(len(SPECIAL_TOKENS), VOCABULARY, real.shape), 0)
    ids[:, 0] = made.cls_id
    masked = np.arange(PREDICTIONS) < lengths * 15 // 100
    return {
        "input_ids": ids,
        "input_mask": real.astype(np.int64),
        "segment_ids": (real & (places >= lengths // 2)).astype(np.int64),
        "masked_lm_positions": np.where(masked, np.arange(1, PREDICTIONS + 1), 0),
        "masked_lm_ids": np.where(masked, len(SPECIAL_TOKENS) + 1, 0),
        "masked_lm_weights": masked.astype(np.int64),
        "next_sentence_labels": rng.integers(0, 2, (count, 1)),
    }


def write_fixed(path: Path, count: int) -> None:
    """Writes an HDF5 file of fixed length."""
    with h5py.File(path.with_suffix(".hdf5"), "w") as file:
        for name, values in _padded(count).items():
            if name != "masked_lm_weights":
                flat = values[:, 0] if name.startswith("next") else values
                wide = name in ("input_ids", "masked_lm_positions", "masked_lm_ids")
                file.create_dataset(name, data=flat.astype("i2" if wide else "i1"))


def write_variable(path: Path, count: int) -> None:
    """Writes an HDF5 file of variable length."""
    columns = _padded(count)
    sizes = {"input_ids": columns["input_mask"].sum(1), "segment_ids": columns["input_mask"].sum(1)}
    for name in ("masked_lm_positions", "masked_lm_ids"):
        sizes[name] = columns["masked_lm_weights"].sum(1)
    with h5py.File(path.with_suffix(".hdf5"), "w") as file:
        for name, lengths in sizes.items():
            kind = np.dtype("i1" if name == "segment_ids" else "i2")
            rows = np.empty(count, object)
            for i, (row, length) in enumerate(zip(columns[name], lengths, strict=True)):
                rows[i] = row[:length].astype(kind)
            file.create_dataset(name, data=rows, dtype=h5py.vlen_dtype(kind))
        labels = columns["next_sentence_labels"][:, 0]
        file.create_dataset("next_sentence_labels", data=labels.astype("i1"))


def write_tfrecord(path: Path, count: int) -> None:
    """Writes a TFRecord file."""
    columns = _padded(count)
    records = []
    for at in range(count):
        entries = []
        for name, values in columns.items():
            if name == "masked_lm_weights":
                feature = write_message(2, write_message(1, values[at].astype("<f4").tobytes()))
            else:
                numbers = b"".join(map(write_varint, values[at].tolist()))
                feature = write_message(3, write_message(1, numbers))
            entries.append(
                write_message(1, write_message(1, name.encode()) + write_message(2, feature))
            )
        records.append(write_message(1, b"".join(entries)))
    heads = [struct.pack("<Q", len(record)) for record in records]
    crcs = [masked_crc32c_of(parts).astype("<u4") for parts in (heads, records)]
    with path.with_suffix(".tfrecord").open("wb") as file:
        for head, record, first, second in zip(heads, records, *crcs, strict=True):
            file.write(head + first.tobytes() + record + second.tobytes())


FORMATS: dict[str, tuple[str, Callable[[Path, int], None]]] = {
    "Megatron": ("megatron", write_megatron),
    "MDS": ("mds", write_mds),
    "Parquet": ("parquet", write_parquet),
    "HDF5, fixed length": ("hdf5", write_fixed),
    "HDF5, variable length": ("hdf5", write_variable),
    "TFRecord": ("tfrecord", write_tfrecord),
}
"""By name: the row of `bert_unpad.data.formats.FORMATS`, and what writes so many at a path."""
