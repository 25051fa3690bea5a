"""MDS shards as tests make them, after the format's description, without mosaicml-streaming."""

import json
import struct

import numpy as np

CODES = {"uint8": 8, "uint16": 16, "int32": 33, "int64": 65, "float32": 34}


def encode(encoding, value):
    """A value as its bytes in a sample."""
    kind, *arguments = encoding.split(":")
    if kind in ("str", "bytes"):
        return value.encode() if kind == "str" else value
    if kind == "int":
        return struct.pack("<q", value)
    array = np.asarray(value)
    if not arguments:
        head = bytes([CODES[array.dtype.name]])
    else:
        head, array = b"", array.astype(arguments[0])
    if len(arguments) < 2:
        width = next(i for i in range(4) if max(array.shape) < 1 << (8 << i))
        sizes = np.array(array.shape, f"<u{1 << width}")
        head += bytes([array.ndim << 2 | width]) + sizes.tobytes()
    return head + array.tobytes()


def fixed_size(encoding):
    kind, *arguments = encoding.split(":")
    if kind == "int":
        return 8
    if kind == "ndarray" and len(arguments) == 2:
        return int(arguments[1]) * np.dtype(arguments[0]).itemsize
    return None


def write_shard(folder, number, columns, samples):
    """Writes one shard; returns its entry of the index."""
    names = sorted(columns)
    sizes = [fixed_size(columns[name]) for name in names]
    about = {
        "column_encodings": [columns[name] for name in names],
        "column_names": names,
        "column_sizes": sizes,
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
    }
    text = json.dumps(about, sort_keys=True).encode()
    parts = []
    for sample in samples:
        values = [encode(columns[name], sample[name]) for name in names]
        varying = [len(v) for v, size in zip(values, sizes, strict=True) if size is None]
        parts.append(struct.pack(f"<{len(varying)}I", *varying) + b"".join(values))
    count = len(parts)
    begins = 4 + 4 * (count + 1) + len(text) + np.cumsum([0, *map(len, parts)])
    data = struct.pack("<I", count) + begins.astype("<u4").tobytes() + text + b"".join(parts)
    name = f"shard.{number:05}.mds"
    (folder / name).write_bytes(data)
    raw = {"basename": name, "bytes": len(data), "hashes": {}}
    return about | {"raw_data": raw, "zip_data": None, "samples": count}


def write_mds(folder, columns, samples, each=20):
    """Writes a folder of shards."""
    folder.mkdir(parents=True)
    shards = [
        write_shard(folder, number, columns, samples[begin : begin + each])
        for number, begin in enumerate(range(0, len(samples), each))
    ]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def compress(folder, ending, pack):
    """Replaces the shards by compressed ones, as mosaicml-streaming writes them."""
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        raw = folder / shard["raw_data"]["basename"]
        name = f"{raw.name}.{ending}"
        (folder / name).write_bytes(pack(raw.read_bytes()))
        raw.unlink()
        shard["zip_data"] = {"basename": name, "bytes": 0, "hashes": {}}
    (folder / "index.json").write_text(json.dumps(index))
