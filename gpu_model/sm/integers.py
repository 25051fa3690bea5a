"""What the integer instructions of SASS compute, on arrays of 32-bit words (one per thread).

None stands for what is not known: data from memory, and all that follows from it. Semantics are
those of the PTX instructions that they are made from (NVIDIA, "PTX ISA"), and of the arithmetic
that compiled code does with them, e.g. the division by a reciprocal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Bits = NDArray[np.bool_]

LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def wide(low: Words, high: Words) -> NDArray[np.uint64]:
    """64 bits from two registers."""
    return low.astype(np.uint64) | (high.astype(np.uint64) << _32)


def low(value: NDArray[np.uint64]) -> Words:
    return (value & LOW).astype(np.uint32)


def high(value: NDArray[np.uint64]) -> Words:
    return (value >> _32).astype(np.uint32)


def signed(value: Words) -> NDArray[np.int64]:
    return value.view(np.int32).astype(np.int64)


def lut(table: int, a: Words, b: Words, c: Words) -> Words:
    """LOP3: bit i of `table` is the result where the bits of a, b and c are the number i."""
    result = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            term = (a if row & 4 else ~a) & (b if row & 2 else ~b)
            result |= term & (c if row & 1 else ~c)
    return result


def lut_bits(table: int, a: Bits, b: Bits, c: Bits) -> Bits:
    """PLOP3: the same on predicates."""
    index = a.astype(np.uint8) * 4 + b * 2 + c
    return (np.uint32(table) >> index & 1).astype(bool)


def shift(opcode_parts: frozenset[str], left: bool, a: Words, by: Words, c: Words) -> Words:
    """SHF: {c:a} shifted; its upper half with HI."""
    sixty_four = bool(opcode_parts & {"U64", "S64"})
    limit = np.uint64(63 if sixty_four else 32)
    amount = by.astype(np.uint64)
    amount = amount & np.uint64(31) if "W" in opcode_parts else np.minimum(amount, limit)
    value = wide(a, c)
    if left:
        # 64 bits shifted by 32 leave the lower half in the upper one.
        result = value << amount
    elif opcode_parts & {"S32", "S64"}:
        result = (value.view(np.int64) >> amount.view(np.int64)).view(np.uint64)
    else:
        result = value >> amount
    return high(result) if "HI" in opcode_parts else low(result)


def permute(a: Words, selector: Words, c: Words) -> Words:
    """PRMT: four bytes of {c:a}; bit 3 of a selector repeats a byte's sign."""
    both = wide(a, c)
    result = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)) & np.uint64(255)
        sign = np.where(byte >= 128, np.uint32(255), np.uint32(0))
        part = np.where(nibble & np.uint32(8), sign, byte.astype(np.uint32))
        result |= part << np.uint32(8 * i)
    return result


_COMPARE: dict[str, Callable[[np.ndarray, np.ndarray], Bits]] = {
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
}


def compare(parts: Sequence[str], a: Words, b: Words, lower: Bits | None) -> Bits:
    """ISETP's comparison; `lower` is that of the lower halves, of .EX."""
    name = next(part for part in parts if part in _COMPARE)
    if "U32" not in parts:
        a, b = a.view(np.int32), b.view(np.int32)
    result = _COMPARE[name](a, b)
    if lower is None:
        return result
    if name == "NE":
        return result | lower
    if name == "EQ":
        return result & lower
    return _COMPARE[name[:1] + "T"](a, b) | (a == b) & lower


def combine(parts: Sequence[str], a: Bits, b: Bits) -> Bits:
    """A comparison and another predicate, as ISETP's last suffix says."""
    if "OR" in parts:
        return a | b
    return a ^ b if "XOR" in parts else a & b


def to_float(parts: Sequence[str], value: Words) -> Words:
    """I2F: a float's bits, rounded upwards with RP."""
    exact = value.astype(np.float64) if "U32" in parts else signed(value).astype(np.float64)
    rounded = exact.astype(np.float32)
    if "RP" in parts:
        short = rounded.astype(np.float64) < exact
        rounded = np.where(short, np.nextafter(rounded, np.float32(np.inf)), rounded)
    return rounded.astype(np.float32).view(np.uint32)


def from_float(parts: Sequence[str], value: Words) -> Words:
    """F2I with truncation, saturating."""
    number = np.nan_to_num(np.trunc(value.view(np.float32).astype(np.float64)))
    if "U32" in parts:
        return np.clip(number, 0, 2**32 - 1).astype(np.uint64).astype(np.uint32)
    return np.clip(number, -(2**31), 2**31 - 1).astype(np.int64).astype(np.int32).view(np.uint32)


def reciprocal(value: Words) -> Words:
    """MUFU.RCP, rounded to nearest."""
    with np.errstate(divide="ignore", over="ignore"):
        return (np.float32(1) / value.view(np.float32)).view(np.uint32)


def leading_one(value: Words) -> Words:
    """FLO.U32: the number of the highest set bit; all ones for 0."""
    exponent = np.frexp(value.astype(np.float64))[1] - 1
    return np.where(value == 0, np.uint32(0xFFFFFFFF), exponent.astype(np.uint32))


def count_ones(value: Words) -> Words:
    return np.unpackbits(value.view(np.uint8).reshape(-1, 4), axis=1).sum(1).astype(np.uint32)
