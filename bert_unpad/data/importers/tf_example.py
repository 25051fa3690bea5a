"""Reads TensorFlow's `Example` messages, which map names to lists of numbers, without TensorFlow.

    Example { 1: Features { 1: { 1: name, 2: Feature { 2: FloatList or 3: Int64List } }, ... } }

A list's field 1 has all of its numbers in a row. Format: `tensorflow/core/example/example.proto`
and `feature.proto`. The lists of many messages are decoded together, by array operations; libraries
that read these messages (protobuf, and tfrecord on top of it) make a Python object of every number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bert_unpad._protobuf import fields, write_varint

_FLOATS, _INTEGERS = 2, 3
_MAX_WIDTH = 10  # bytes of a number of 64 bits

Lists = dict[bytes, tuple[int, bytes]]
"""Lists by name: the field number of a list's type, and its numbers as they are stored."""


def read_lists(record: bytes) -> Lists:
    """Finds the lists of a message.

    Raises:
        ValueError: it is no `Example`.
    """
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

    Raises:
        ValueError: a record has no such list, or it is damaged.
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
