"""Reads and writes protocol buffers by hand: TensorFlow's files need a few of their messages.

A message is a sequence of fields, each with (number << 3 | wire type) and a value. Numbers are in
base 128, lowest digits first. Fields with the value 0 are left out.
"""

from collections.abc import Iterator
from typing import Any


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads the base-128 number at data[at:]; returns it and its end.

    Raises:
        ValueError: the data ends within it, or it has more than 64 bits.
    """
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("the data ends within a number")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80 and value < 1 << 64:
            return value, at
    raise ValueError("a number has more than 64 bits")


def write_varint(value: int) -> bytes:
    """Encodes a number >= 0 in base 128, lowest digits first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the number and the value of each field: bytes, or a number for all other types.

    Raises:
        ValueError: the message is none, or is cut off.
    """
    at = 0
    value: int | bytes
    while at < len(message):
        tag, at = varint(message, at)
        kind, width = tag & 7, {1: 8, 5: 4}.get(tag & 7, 0)
        if kind == 0:
            value, at = varint(message, at)
        elif kind in (1, 2, 5):
            if kind == 2:
                width, at = varint(message, at)
            content = message[at : at + width]
            at += width
            if at > len(message):
                raise ValueError("a field reaches beyond its message")
            value = content if kind == 2 else int.from_bytes(content, "little")
        else:
            raise ValueError(f"a field has wire type {kind}: this is no protocol buffer")
        yield tag >> 3, value


def write_number(field: int, value: int) -> bytes:
    """Encodes a field that is a number >= 0."""
    return write_varint(field << 3) + write_varint(value) if value else b""


def write_message(field: int, message: bytes) -> bytes:
    """Encodes a field that is a message or bytes."""
    return write_varint(field << 3 | 2) + write_varint(len(message)) + message
