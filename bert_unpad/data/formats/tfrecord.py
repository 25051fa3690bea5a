"""MLPerf's BERT examples in TFRecord files.

A file is a sequence of records: number of bytes, uint64; its checksum; the bytes; their checksum
(masked CRC-32C, uint32, little-endian). A record is an `Example` with the features

    input_ids, segment_ids [S]                      padded
    input_mask [S]                                  1 = real; without it, all but padding is real
    masked_lm_positions, masked_lm_ids [P]          padded
    masked_lm_weights [P]                           1.0 = real; without it, position 0 is padding
    next_sentence_labels [1]

of Google's `create_pretraining_data.py`. TensorFlow's `Example` messages map names to lists of
numbers, where a list's field 1 has all of its numbers in a row:

    Example { 1: Features { 1: { 1: name, 2: Feature { 2: FloatList or 3: Int64List } }, ... } }

The lists of many messages are decoded together, by array operations; libraries that read these
messages (protobuf, and tfrecord on top of it) make a Python object of every number. Format:
`tensorflow/core/example/example.proto` and `feature.proto`.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from bert_unpad._crc32c import masked_crc32c_of
from bert_unpad._protobuf import fields, write_varint
from bert_unpad.data.formats import Setting
from bert_unpad.data.formats.finished import finished_batch
from bert_unpad.data.store.example_batch import ExampleBatch, Masks, ragged_places
from bert_unpad.data.store.manifest import DamagedDataError

_BLOCK = 1024  # records at a time
_MAX_RECORD = 2**20  # bytes; the longest example has 65,535 tokens
_MAX_PADDED = 2**23  # bytes whose checksums are computed side by side
_FLOATS, _INTEGERS = 2, 3
_MAX_WIDTH = 10  # bytes of a number of 64 bits

Lists = dict[bytes, tuple[int, bytes]]
"""Lists by name: the field number of a list's type, and its numbers as they are stored."""


def examples(path: Path, setting: Setting) -> Iterator[ExampleBatch]:
    """Reads the examples of a file."""
    number = 0
    with path.open("rb") as file:
        while records := _read_records(path, file, number):
            yield _batch_of(path, records, number, setting)
            number += len(records)


def _batch_of(path: Path, records: Sequence[bytes], number: int, setting: Setting) -> ExampleBatch:
    """Decodes all records at once; if that fails, finds the one to name in the error."""
    try:
        return _decode(records, setting)
    except ValueError:
        for at, record in enumerate(records):
            try:
                _decode([record], setting)
            except ValueError as error:
                raise DamagedDataError(f"{path}: record {number + at}: {error}") from error
        raise


def _read_records(path: Path, file: BinaryIO, number: int) -> list[bytes]:
    """Reads the next records of a file and compares their checksums; none at its end."""

    def fail(record: int, message: str) -> DamagedDataError:
        return DamagedDataError(f"{path}: record {number + record}: {message}")

    records: list[bytes] = []
    heads, head_crcs, crcs = [], [], []
    broken = None
    while len(records) < _BLOCK and (head := file.read(12)):
        if len(head) < 12:
            broken = "expected a whole record, but the file is cut off"
            break
        length, crc = struct.unpack("<QI", head)
        heads.append(head[:8])
        head_crcs.append(crc)
        data = file.read(length + 4) if length <= _MAX_RECORD else b""
        if len(data) < length + 4:
            broken = (
                f"expected at most {_MAX_RECORD:,} bytes, within the file, got {length:,}: it is "
                "cut off, or no TFRecord file of examples"
            )
            break
        records.append(data[:-4])
        crcs.append(struct.unpack("<I", data[-4:])[0])
    # Before the size is believed: a wrong one looks like a file that is cut off.
    wrong = np.flatnonzero(masked_crc32c_of(heads) != np.array(head_crcs, np.uint32))
    if len(wrong):
        at = int(wrong[0])
        raise fail(
            at,
            "expected an uncompressed file, got gzip; decompress it"
            if number + at == 0 and heads[0][:2] == b"\x1f\x8b"
            else "the checksum of its size is wrong: the file is damaged, or no TFRecord file",
        )
    step = max(_MAX_PADDED // max(map(len, records), default=1), 1)
    for first in range(0, len(records), step):
        some = slice(first, first + step)
        wrong = np.flatnonzero(masked_crc32c_of(records[some]) != np.array(crcs[some], np.uint32))
        if len(wrong):
            raise fail(first + int(wrong[0]), "its checksum is wrong: the file is damaged")
    if broken is not None:
        raise fail(len(records), broken)
    return records


def _decode(data: Sequence[bytes], setting: Setting) -> ExampleBatch:
    records = [read_lists(record) for record in data]
    lengths = _real(records, b"input_mask", lambda each: _mask(each, setting.pad_id))
    masked = _real(records, b"masked_lm_weights", _weights)
    longest = setting.max_seq_length
    if not 1 <= lengths.min() <= lengths.max() <= longest:
        raise ValueError(
            f"input_mask: expected 1 to {longest:,} tokens (max_seq_length), got {lengths.min()} "
            f"to {lengths.max()}"
        )
    labels, counts = integers(records, b"next_sentence_labels")
    if (counts != 1).any():
        raise ValueError("next_sentence_labels: expected one label")
    return finished_batch(
        lengths,
        _first(records, b"input_ids", lengths),
        _first(records, b"segment_ids", lengths),
        Masks(
            masked,
            _first(records, b"masked_lm_positions", masked),
            _first(records, b"masked_lm_ids", masked),
        ),
        labels,
        setting.vocab_size,
    )


def _first(records: Sequence[Lists], name: bytes, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns so many first numbers of a list of each record."""
    values, counts = integers(records, name)
    if (counts < wanted).any():
        raise ValueError(f"{name.decode()}: expected {wanted.max()} numbers, got {counts.min()}")
    return values[ragged_places(np.cumsum(counts) - counts, wanted)]


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


def read_lists(record: bytes) -> Lists:
    """Finds the lists of a message."""
    found: Lists = {}
    for entry in _messages(record, 1, "features"):
        for pair in _messages(entry, 1, "a feature"):
            about = dict(fields(pair))
            name, feature = about.get(1, b""), about.get(2, b"")
            if not isinstance(name, bytes) or not isinstance(feature, bytes):
                raise ValueError("expected a feature with a name")
            for kind, values in fields(feature):
                if not isinstance(values, bytes):
                    raise ValueError(f"{_text(name)}: expected a list")
                found[name] = kind, _packed(values, kind)
    return found


def _messages(message: bytes, number: int, what: str) -> list[bytes]:
    found = [value for field, value in fields(message) if field == number]
    if not all(isinstance(value, bytes) for value in found):
        raise ValueError(f"expected {what} of an Example")
    return found


def _packed(values: bytes, kind: int) -> bytes:
    """Joins the parts of a list; a writer may also give each number a field of its own."""
    parts = [value for number, value in fields(values) if number == 1]
    if len(parts) == 1 and isinstance(parts[0], bytes):
        return parts[0]
    if kind == _INTEGERS:
        return b"".join(part if isinstance(part, bytes) else write_varint(part) for part in parts)
    if any(not isinstance(part, bytes) and part >= 1 << 32 for part in parts):
        raise ValueError("expected numbers of 4 bytes in a list")
    return b"".join(
        part if isinstance(part, bytes) else part.to_bytes(4, "little") for part in parts
    )


def integers(records: Sequence[Lists], name: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decodes a list of integers of B records.

    Returns:
        The numbers of all records, one after another, int64, and how many each has, int64 [B].
    """
    parts = [_part(lists, name, _INTEGERS) for lists in records]
    data = np.frombuffer(b"".join(parts), np.uint8)
    sizes = np.array([len(part) for part in parts], np.int64)
    bounds = np.cumsum(sizes)
    last = np.flatnonzero(data < 0x80)  # byte of each number
    if (data[bounds[sizes > 0] - 1] >= 0x80).any():
        raise ValueError(f"{_text(name)}: expected whole numbers of bytes 0 to 127 at their ends")
    first = np.concatenate([[0], last[:-1] + 1]) if len(last) else last
    widths = last - first + 1
    longest = int(widths.max(initial=0))
    if longest > _MAX_WIDTH:
        raise ValueError(f"{_text(name)}: expected numbers of 64 bits")
    values = (data[first] & 0x7F).astype(np.uint64)
    for place in range(1, longest):
        here = np.flatnonzero(widths > place)
        digits = (data[first[here] + place] & 0x7F).astype(np.uint64)
        values[here] |= digits << np.uint64(7 * place)
    counts = np.diff(np.searchsorted(last, bounds), prepend=0)
    return values.view(np.int64), counts


def floats(records: Sequence[Lists], name: bytes) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Decodes a list of floating-point numbers of B records; see `integers`."""
    parts = [_part(lists, name, _FLOATS) for lists in records]
    counts, rest = np.divmod(np.array([len(part) for part in parts], np.int64), 4)
    if rest.any():
        raise ValueError(f"{_text(name)}: expected numbers of 4 bytes")
    return np.frombuffer(b"".join(parts), "<f4"), counts


def _part(lists: Lists, name: bytes, kind: int) -> bytes:
    if name not in lists:
        names = ", ".join(map(_text, sorted(lists))) or "none"
        raise ValueError(f"expected a feature {_text(name)}, got {names}")
    found, part = lists[name]
    if found != kind:
        wanted = "integers" if kind == _INTEGERS else "floating-point numbers"
        raise ValueError(f"{_text(name)}: expected a list of {wanted}")
    return part


def _text(name: bytes) -> str:
    return name.decode(errors="replace")
