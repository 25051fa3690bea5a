"""Sorted string tables: LevelDB's file format, which TensorFlow uses for a checkpoint's index.

A table is a sequence of blocks and a footer. A block holds key-value pairs sorted by key, each key
without the bytes that it shares with the previous one, then the offsets of the keys that are stored
whole. After a block come 1 byte of compression type and a masked CRC-32C. The last block maps the
last key of each data block to the block's position. Format: LevelDB's doc/table_format.md.
"""

import struct
from collections.abc import Iterator, Mapping

from bert_unpad._crc32c import masked_crc32c
from bert_unpad._protobuf import varint, write_varint

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48  # bytes: two block handles, padded to 40, and the magic number
_TRAILER = 5  # bytes after a block: type and CRC
_BLOCK_SIZE = 2**18  # as in TensorFlow; the index of a checkpoint has one block
_RESTART_INTERVAL = 16  # as in TensorFlow; every 16th key is stored whole


def read_table(data: bytes) -> dict[bytes, bytes]:
    """Reads all pairs of a table.

    Raises:
        ValueError: the data is not a table, or is cut off, compressed or damaged.
    """
    if len(data) < _FOOTER or struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise ValueError("not a table, or cut off: the magic number is not at its end")
    _, at = _handle(
        data, len(data) - _FOOTER
    )  # after the handle of the metadata block, which is empty
    index, _ = _handle(data, at)
    pairs: dict[bytes, bytes] = {}
    # A small file must not expand to a huge table: no block is read twice, and keys that share
    # bytes are together no longer than they can be if every 16th is whole.
    read, room = 0, _RESTART_INTERVAL * len(data)
    for _, entry in _entries(_block(data, index)):
        (offset, size), _ = _handle(entry, 0)
        if offset < read:
            raise ValueError(f"the block at {offset} begins within the one before")
        read = offset + size
        for key, value in _entries(_block(data, (offset, size))):
            room -= len(key)
            if room < 0:
                raise ValueError("its keys are longer than the table can hold")
            pairs[key] = value
    return pairs


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    offset, at = varint(data, at)
    size, at = varint(data, at)
    return (offset, size), at


def _block(data: bytes, handle: tuple[int, int]) -> bytes:
    offset, size = handle
    end = offset + size
    if end + _TRAILER > len(data) - _FOOTER:
        raise ValueError(f"a block at {offset} with {size} bytes lies outside the table")
    kind, crc = struct.unpack_from("<BI", data, end)
    if masked_crc32c(data[offset : end + 1]) != crc:
        raise ValueError(f"the checksum of the block at {offset} is wrong: the table is damaged")
    if kind:
        name = "snappy" if kind == 1 else f"method {kind}"
        raise ValueError(f"a block is compressed with {name}; save the table without compression")
    return data[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    (restarts,) = struct.unpack("<I", block[-4:]) if len(block) >= 4 else (len(block),)
    end = len(block) - 4 * (restarts + 1)
    if end < 0:
        raise ValueError("a block is too short for its list of restarts")
    at, key = 0, b""
    while at < end:
        shared, at = varint(block, at)
        own, at = varint(block, at)
        size, at = varint(block, at)
        if shared > len(key) or at + own + size > end:
            raise ValueError("an entry reaches beyond its block")
        key = key[:shared] + block[at : at + own]
        yield key, block[at + own : at + own + size]
        at += own + size


def table(pairs: Mapping[bytes, bytes], block_size: int = _BLOCK_SIZE) -> bytes:
    """Encodes pairs as an uncompressed table.

    Args:
        pairs: values by key.
        block_size: a block ends when it holds this many bytes.
    """
    out, index, block = bytearray(), {}, _BlockWriter()
    for key in sorted(pairs):
        block.add(key, pairs[key])
        if len(block.data) >= block_size:
            index[key] = _append(out, block)
            block = _BlockWriter()
    if block.count or not index:
        index[block.key] = _append(out, block)
    footer = _append(out, _BlockWriter())
    directory = _BlockWriter()
    for key, handle in index.items():
        directory.add(key, handle)
    footer += _append(out, directory)
    return bytes(out) + footer.ljust(_FOOTER - 8, b"\0") + struct.pack("<Q", _MAGIC)


class _BlockWriter:
    def __init__(self) -> None:
        self.data, self.key, self.count = bytearray(), b"", 0
        self.restarts: list[int] = []

    def add(self, key: bytes, value: bytes) -> None:
        pairs = enumerate(zip(self.key, key, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(self.key), len(key)))
        if self.count % _RESTART_INTERVAL == 0:
            shared = 0
            self.restarts.append(len(self.data))
        for number in (shared, len(key) - shared, len(value)):
            self.data += write_varint(number)
        self.data += key[shared:] + value
        self.key, self.count = key, self.count + 1


def _append(out: bytearray, block: _BlockWriter) -> bytes:
    """Appends a block; returns its handle."""
    restarts = block.restarts or [0]
    contents = bytes(block.data) + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
    handle = write_varint(len(out)) + write_varint(len(contents))
    contents += b"\0"  # the type: not compressed
    out += contents + struct.pack("<I", masked_crc32c(contents))
    return handle
