"""Reads and writes TensorFlow's checkpoint files ("tensor bundles") without TensorFlow.

A checkpoint <prefix> is a table <prefix>.index and data files <prefix>.data-0000i-of-0000n. The
table maps "" to a BundleHeaderProto and the name of each tensor to a BundleEntryProto: its dtype,
shape, data file, offset and checksum. Data files hold the tensors' elements, row by row,
little-endian. Format: tensorflow/core/protobuf/tensor_bundle.proto and
tensorflow/core/util/tensor_bundle/tensor_bundle.cc, which writes the index uncompressed.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bert_unpad._crc32c import masked_crc32c
from bert_unpad._files import replacing
from bert_unpad._protobuf import fields, write_message, write_number, write_varint
from bert_unpad.convert.sstable import read_table, table

# The types of tensorflow/core/framework/types.proto that PyTorch has too.
_DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_BUNDLE_VERSION = 1  # kTensorBundleVersion, which TensorFlow writes as the producer


def index_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.index")


def data_path(prefix: Path, shard: int, shards: int) -> Path:
    return prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}")


@dataclass(frozen=True)
class _Entry:
    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int
    sliced: bool


class TensorBundle:
    """A checkpoint opened for reading; tensors are read on demand."""

    def __init__(self, prefix: Path) -> None:
        """Reads the index.

        Args:
            prefix: the path without .index.

        Raises:
            FileNotFoundError: there is no such index.
            ValueError: it is damaged, cut off, compressed, or from a big-endian machine.
        """
        self.prefix = prefix
        path = index_path(prefix)
        try:
            entries = read_table(path.read_bytes())
            header = dict(fields(entries.pop(b"", b"")))
            self._shards = _integer(header, 1)
            if self._shards < 1:
                raise ValueError("it has no header of a tensor bundle")
            if _integer(header, 2):
                raise ValueError("its tensors are big-endian")
            self._entries = {key.decode(): _entry(value) for key, value in entries.items()}
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def keys(self) -> list[str]:
        """Returns the names of all tensors, sorted."""
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def __getitem__(self, name: str) -> Tensor:
        """Reads a tensor.

        Raises:
            KeyError: there is no tensor of this name.
            FileNotFoundError: its data file is missing.
            ValueError: the data file is cut off or damaged; the tensor has a dtype that PyTorch
                does not, or is stored as slices.
        """
        entry = self._entries[name]
        if entry.sliced:
            raise ValueError(f"{name} is stored in slices (a partitioned variable): not supported")
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise ValueError(f"{name} has TensorFlow's dtype number {entry.dtype}: not supported")
        if math.prod(size for size in entry.shape if size) * dtype.itemsize >= 1 << 63:
            raise ValueError(f"{name}: {list(entry.shape)} is no shape of a tensor")
        expected = math.prod(entry.shape) * dtype.itemsize
        if entry.size != expected:
            raise ValueError(
                f"{name}: {list(entry.shape)} of {dtype} are {expected} bytes, got {entry.size}"
            )
        path = data_path(self.prefix, entry.shard, self._shards)
        if entry.offset + entry.size > path.stat().st_size:
            raise ValueError(
                f"{path} is cut off: {name} is at {entry.offset} to {entry.offset + entry.size}"
            )
        data = np.fromfile(path, np.uint8, entry.size, offset=entry.offset)
        if masked_crc32c(data) != entry.crc:
            raise ValueError(f"{path} is damaged: the checksum of {name} is wrong")
        if not data.size:  # PyTorch cannot view an empty buffer
            return torch.empty(entry.shape, dtype=dtype)
        return torch.from_numpy(data).view(dtype).reshape(entry.shape)


def write_bundle(prefix: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a checkpoint of one data file; each file appears whole or not at all.

    Raises:
        ValueError: TensorFlow does not have a tensor's dtype.
    """
    version = write_number(1, _BUNDLE_VERSION)
    header = write_number(1, 1) + write_message(3, version)  # little-endian is 0
    entries, offset = {b"": header}, 0
    with replacing(data_path(prefix, 0, 1)) as temporary, open(temporary, "wb") as file:
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().contiguous()
            if tensor.dtype not in _NUMBERS:
                raise ValueError(f"{name} is {tensor.dtype}, which TensorFlow does not have")
            data = tensor.reshape(-1).view(torch.uint8).numpy()
            dimensions = b"".join(write_message(2, write_number(1, size)) for size in tensor.shape)
            entries[name.encode()] = (
                write_number(1, _NUMBERS[tensor.dtype])
                + write_message(2, dimensions)
                + write_number(4, offset)
                + write_number(5, data.size)
                + write_varint(6 << 3 | 5)
                + struct.pack("<I", masked_crc32c(data))
            )
            file.write(data.data)
            offset += data.size
    with replacing(index_path(prefix)) as temporary:
        temporary.write_bytes(table(entries))


def _entry(message: bytes) -> _Entry:
    found = dict(fields(message))
    shape = [value for number, value in fields(_bytes(found.get(2, b""))) if number == 2]
    return _Entry(
        dtype=_integer(found, 1),
        shape=tuple(_integer(dict(fields(_bytes(dimension))), 1) for dimension in shape),
        shard=_integer(found, 3),
        offset=_integer(found, 4),
        size=_integer(found, 5),
        crc=_integer(found, 6),
        sliced=7 in found,
    )


def _integer(fields: Mapping[int, Any], number: int) -> int:
    value = fields.get(number, 0)
    if not isinstance(value, int):
        raise ValueError(f"expected a number in field {number}")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("expected a message within a message")
    return value
