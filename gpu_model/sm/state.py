"""What the threads of a block know while walk.py takes them through machine code: registers,
predicates, constants, and the global memory that control flow depends on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_model.sm.integers import wide
from gpu_model.sm.sass import Operand


@dataclass
class Memory:
    """Global memory whose values matter to control flow, such as cu_seqlens; all else is unknown.

    `regions`: contents by the address that they begin at.
    """

    regions: dict[int, NDArray[np.int32]] = field(default_factory=dict)

    def read(self, addresses: NDArray[np.uint64], words: int) -> list[NDArray[np.uint32] | None]:
        """`words` words from each thread's address on; None where one is not in a region."""
        for base, data in self.regions.items():
            offset = addresses.astype(np.int64) - base
            if offset.min() >= 0 and offset.max() + 4 * words <= 4 * len(data):
                content = data.view(np.uint32)
                return [content[offset // 4 + i] for i in range(words)]
        return [None] * words


@cache
def address_parts(text: str) -> tuple[tuple[str, int, str], ...]:
    """The registers of an address: R or UR, number (-1 for RZ) and suffix."""
    inside = text[text.rindex("[") + 1 : text.rindex("]")]
    found = re.findall(r"(?:^|\+)(UR|R)(\d+|Z)((?:\.\w+)*)", inside)
    return tuple((file, -1 if n == "Z" else int(n), suffix) for file, n, suffix in found)


class State:
    """Registers of all threads of a block. None: not known by the threads that run (`active`).

    `known`: of registers that some threads know, which; those in no key are known by all or none.
    """

    def __init__(self, threads: int, block: Sequence[int], constants: NDArray[np.uint32]):
        self.zeros = np.zeros(threads, np.uint32)
        self.true = np.ones(threads, bool)
        self.files: dict[str, list[Any]] = {
            "register": [self.zeros] * 256,
            "uniform": [self.zeros] * 64,
            "predicate": [~self.true] * 8,
            "uniform_predicate": [~self.true] * 8,
        }
        self.known: dict[tuple[str, int], NDArray[np.bool_]] = {}
        self.active: NDArray[np.bool_] | None = None
        self.constants = constants
        thread = np.arange(threads, dtype=np.uint32)
        self.specials = {
            "SR_TID.X": thread,
            "SR_LANEID": thread % np.uint32(32),
            **{f"SR_TID.{axis}": self.zeros for axis in "YZ"},
            **{
                f"SR_CTAID.{axis}": self.zeros + np.uint32(n)
                for axis, n in zip("XYZ", block, strict=True)
            },
            "SR_CgaCtaId": self.zeros,
        }

    def get(self, file: str, number: int | None) -> Any:
        """A register's value; RZ's and URZ's for None."""
        if number is None:
            return self.zeros
        known = self.known.get((file, number)) if self.known else None
        if known is not None and (self.running() & ~known).any():
            return None
        return self.files[file][number]

    def running(self) -> NDArray[np.bool_]:
        """Which threads execute the current instruction."""
        return self.true if self.active is None else self.active

    def words(self, operand: Operand, plain: bool = False) -> NDArray[np.uint32] | None:
        """An operand's value; `plain`: without its sign."""
        if operand.kind == "immediate":
            return self.zeros + np.uint32(operand.value & 0xFFFFFFFF)
        if operand.kind == "constant":
            value = self.constant(operand, operand.value)
        elif operand.kind in ("register", "uniform"):
            value = self.get(operand.kind, operand.number)
        else:
            return None
        if value is None or plain:
            return value
        if operand.negated:
            return ~value + np.uint32(1)
        return ~value if operand.inverted else value

    def pair(self, operand: Operand) -> NDArray[np.uint64] | None:
        """64 bits: two registers, or eight bytes of a constant bank."""
        if operand.kind == "immediate":
            return self.zeros.astype(np.uint64) + np.uint64(operand.value & (2**64 - 1))
        if operand.kind == "constant":
            halves = [self.constant(operand, operand.value + 4 * i) for i in range(2)]
        elif operand.number is None:
            halves = [self.zeros, self.zeros]
        else:
            halves = [self.get(operand.kind, operand.number + i) for i in range(2)]
        return None if halves[0] is None or halves[1] is None else wide(*halves)

    def bits(self, operand: Operand) -> NDArray[np.bool_] | None:
        """A predicate's value."""
        number = operand.number
        value = self.true if number is None else self.get(operand.kind, number)
        return value if value is None or not operand.negated else ~value

    def constant(self, operand: Operand, offset: int) -> NDArray[np.uint32] | None:
        if operand.bank or not 0 <= offset < 4 * len(self.constants) or operand.value < 0:
            return None
        return self.zeros + self.constants[offset // 4]

    def special(self, name: str) -> NDArray[np.uint32] | None:
        return self.specials.get(name)

    def packed_predicates(self) -> NDArray[np.uint32] | None:
        values = [self.get("predicate", i) for i in range(7)]
        if any(v is None for v in values):
            return None
        return sum((v.astype(np.uint32) << np.uint32(i) for i, v in enumerate(values)), self.zeros)

    def address(self, operand: Operand, sixty_four: bool) -> NDArray[np.uint64] | None:
        """Where a load or store goes to."""
        total = self.zeros.astype(np.uint64) + np.uint64(operand.value & (2**64 - 1))
        for file, number, suffix in address_parts(operand.text):
            if number < 0:
                continue
            kind = "uniform" if file == "UR" else "register"
            value = self.get(kind, number)
            if value is None:
                return None
            part = value.astype(np.uint64)
            if sixty_four and (".64" in suffix or file == "UR"):
                upper = self.get(kind, number + 1)
                if upper is None:
                    return None
                part = wide(value, upper)
            elif found := re.search(r"\.X(\d+)", suffix):
                part = part * np.uint64(int(found[1]))
            total = total + part
        return total

    def write(self, operand: Operand, value: Any, width: int, mask: Any) -> None:
        """`mask`: the threads that write; None for all."""
        if operand.number is None or operand.kind not in self.files:
            return
        values = value if isinstance(value, tuple) else (value, *[None] * (width - 1))
        for i, new in enumerate(values):
            self._set(operand.kind, operand.number + i, new, mask)

    def _set(self, kind: str, number: int, new: Any, mask: Any) -> None:
        file, key = self.files[kind], (kind, number)
        old = file[number]
        if mask is None or (new is None and old is None):
            file[number] = new
            self.known.pop(key, None)
            return
        known = self.known.get(key, self.true if old is not None else ~self.true)
        known = known & ~mask if new is None else known | mask
        if new is not None:
            file[number] = new if old is None else np.where(mask, new, old)
        if known.all():
            self.known.pop(key, None)
        else:
            self.known[key] = known
