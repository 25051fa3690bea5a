"""What an instruction writes, for those that addresses, counters and conditions are made of.

A handler takes the thread state (walk.py) and an instruction and returns a value for each result:
words, bits for predicates, or None where it is not known. Instructions without a handler write
what is not known. The uniform datapath's instructions are those of threads with another register
file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_model.sm import integers as ints
from gpu_model.sm.sass import Instruction, Operand

Handler = Callable[[Any, Instruction], list[Any]]
HANDLERS: dict[str, Handler] = {}
_ONE = np.uint64(1)


def handler(*names: str) -> Callable[[Handler], Handler]:
    def add(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, function))
        return function

    return add


def find(instruction: Instruction) -> Handler | None:
    name = instruction.name
    return HANDLERS.get(name) or (HANDLERS.get(name[1:]) if name.startswith("U") else None)


def _is_predicate(operand: Operand) -> bool:
    return "predicate" in operand.kind


def _unknown(instruction: Instruction) -> list[Any]:
    return [None] * instruction.result_count


def _data(instruction: Instruction) -> list[Operand]:
    return [o for o in instruction.sources if not _is_predicate(o)]


def _carry_in(state: Any, instruction: Instruction) -> Any:
    """The sum of the carries that an .X instruction adds; None if one is not known."""
    total = state.zeros.astype(np.uint64)
    if "X" in instruction.suffixes:
        for operand in instruction.sources:
            if _is_predicate(operand):
                bits = state.bits(operand)
                if bits is None:
                    return None
                total = total + bits.astype(np.uint64)
    return total


def _with_carry(instruction: Instruction, total: Any) -> list[Any]:
    carry = total >> np.uint64(32)
    outs = [carry > k for k in range(instruction.result_count - 1)]
    return [ints.low(total), *outs]


@handler("MOV")
def _mov(state: Any, ins: Instruction) -> list[Any]:
    return [state.words(ins.operands[1])]


@handler("IADD3", "VIADD", "IADD")
def _iadd3(state: Any, ins: Instruction) -> list[Any]:
    total = _carry_in(state, ins)
    for operand in _data(ins):
        value = state.words(operand, plain=True)
        if value is None or total is None:
            return _unknown(ins)
        value = value.astype(np.uint64)
        if operand.negated or operand.inverted:
            value = (value ^ ints.LOW) + (_ONE if operand.negated else np.uint64(0))
        total = total + value
    return _with_carry(ins, total)


@handler("IMAD")
def _imad(state: Any, ins: Instruction) -> list[Any]:
    x, y, z = _data(ins)
    a, b = state.words(x), state.words(y)
    if a is None or b is None:
        # RZ times anything: a move.
        if not (x.kind == "register" and x.number is None) and not (
            y.kind == "register" and y.number is None
        ):
            return _unknown(ins)
        a = b = state.zeros
    if not ins.suffixes & {"WIDE", "HI"}:
        c, carry = state.words(z), _carry_in(state, ins)
        if c is None or carry is None:
            return _unknown(ins)
        total = (a.astype(np.uint64) * b + c + carry) & ints.LOW
        return [ints.low(total), *[None] * (ins.result_count - 1)]
    c = state.pair(z)
    if c is None:
        return _unknown(ins)
    if "U32" in ins.suffixes:
        product = a.astype(np.uint64) * b.astype(np.uint64)
    else:
        product = (ints.signed(a) * ints.signed(b)).view(np.uint64)
    total = product + c
    if "HI" in ins.suffixes:
        return [ints.high(total), *[None] * (ins.result_count - 1)]
    return [(ints.low(total), ints.high(total)), *[total < c] * (ins.result_count - 1)]


@handler("LEA")
def _lea(state: Any, ins: Instruction) -> list[Any]:
    values = [state.words(o) for o in _data(ins)]
    carry = _carry_in(state, ins)
    if carry is None or any(v is None for v in values):
        return _unknown(ins)
    amount = (values[-1] & np.uint32(31)).astype(np.uint64)
    a, b = values[0], values[1].astype(np.uint64)
    if "HI" not in ins.suffixes:
        return _with_carry(ins, ints.low(a.astype(np.uint64) << amount) + b + carry)
    extended = "SX32" in ins.suffixes
    value = ints.signed(a).view(np.uint64) if extended else ints.wide(a, values[2])
    return _with_carry(ins, ints.high(value << amount) + b + carry)


@handler("SHF")
def _shf(state: Any, ins: Instruction) -> list[Any]:
    a, by, c = (state.words(o) for o in _data(ins))
    high_only = (
        "HI" in ins.suffixes and not ins.suffixes & {"U64", "S64"} and "L" not in (ins.suffixes)
    )
    if a is None and high_only and c is not None:
        a = state.zeros
    if a is None or by is None or c is None:
        return _unknown(ins)
    return [ints.shift(ins.suffixes, "L" in ins.suffixes, a, by, c)]


@handler("LOP3", "LOP32I")
def _lop3(state: Any, ins: Instruction) -> list[Any]:
    data = _data(ins)
    values = [state.words(o) for o in data[:3]]
    if any(v is None for v in values):
        return _unknown(ins)
    result = ints.lut(data[3].value, *values)
    return [result] if ins.result_count == 1 else [result != 0, result]


@handler("ISETP")
def _isetp(state: Any, ins: Instruction) -> list[Any]:
    a, b = (state.words(o) for o in _data(ins))
    others = [state.bits(o) for o in ins.sources if _is_predicate(o)]
    if a is None or b is None or any(o is None for o in others):
        return _unknown(ins)
    parts = ins.opcode.split(".")[1:]
    result = ints.compare(parts, a, b, others[1] if "EX" in parts else None)
    return [ints.combine(parts, result, others[0]), ints.combine(parts, ~result, others[0])]


@handler("PLOP3")
def _plop3(state: Any, ins: Instruction) -> list[Any]:
    bits = [state.bits(o) for o in ins.sources if _is_predicate(o)]
    tables = [o.value for o in ins.sources if o.kind == "immediate"]
    if len(bits) != 3 or any(b is None for b in bits):
        return _unknown(ins)
    return [ints.lut_bits(table, *bits) for table in tables[:2]]


@handler("SEL")
def _sel(state: Any, ins: Instruction) -> list[Any]:
    a, b = (state.words(o) for o in _data(ins))
    chosen = state.bits(ins.sources[-1])
    if a is None or b is None or chosen is None:
        return _unknown(ins)
    return [np.where(chosen, a, b)]


@handler("IMNMX", "VIMNMX")
def _minimum(state: Any, ins: Instruction) -> list[Any]:
    a, b = (state.words(o) for o in _data(ins)[:2])
    least = state.bits(next(o for o in ins.sources if _is_predicate(o)))
    if a is None or b is None or least is None:
        return _unknown(ins)
    smaller = a < b if "U32" in ins.suffixes else a.view(np.int32) < b.view(np.int32)
    return [np.where(smaller == least, a, b)]


@handler("VIADDMNMX")
def _sum_or_minimum(state: Any, ins: Instruction) -> list[Any]:
    """The smaller of a sum and a third number, or the larger one."""
    a, b, c = (state.words(o) for o in _data(ins)[:3])
    least = state.bits(next(o for o in ins.sources if _is_predicate(o)))
    if a is None or b is None or c is None or least is None:
        return _unknown(ins)
    total = a + b
    smaller = total < c if "U32" in ins.suffixes else total.view(np.int32) < c.view(np.int32)
    return [np.where(smaller == least, total, c)]


@handler("PRMT")
def _prmt(state: Any, ins: Instruction) -> list[Any]:
    a, selector, c = (state.words(o) for o in _data(ins))
    if a is None or selector is None or c is None:
        return _unknown(ins)
    return [ints.permute(a, selector, c)]


def _of_one(function: Callable[..., Any]) -> Handler:
    def run(state: Any, ins: Instruction) -> list[Any]:
        value = state.words(ins.operands[1])
        return [None if value is None else function(value)]

    return run


HANDLERS["POPC"] = _of_one(ints.count_ones)
HANDLERS["IABS"] = _of_one(lambda v: np.abs(ints.signed(v)).astype(np.uint32))


@handler("FLO")
def _flo(state: Any, ins: Instruction) -> list[Any]:
    value = state.words(ins.operands[-1])
    known = value is not None and "U32" in ins.suffixes and "SH" not in ins.suffixes
    return [ints.leading_one(value)] if known else _unknown(ins)


@handler("I2F", "I2FP")
def _i2f(state: Any, ins: Instruction) -> list[Any]:
    value = state.words(ins.operands[1])
    narrow = ins.suffixes & {"S8", "S16", "U8", "U16", "F16", "F64", "S64", "U64"}
    return [None if value is None or narrow else ints.to_float(ins.opcode.split("."), value)]


@handler("F2I")
def _f2i(state: Any, ins: Instruction) -> list[Any]:
    value = state.words(ins.operands[1])
    known = value is not None and "TRUNC" in ins.suffixes and not ins.suffixes & {"F64", "F16"}
    return [ints.from_float(ins.opcode.split("."), value)] if known else _unknown(ins)


@handler("MUFU")
def _mufu(state: Any, ins: Instruction) -> list[Any]:
    value = state.words(ins.operands[1]) if "RCP" in ins.suffixes else None
    return [None if value is None else ints.reciprocal(value)]


@handler("S2R", "S2UR", "CS2R")
def _s2r(state: Any, ins: Instruction) -> list[Any]:
    source = ins.operands[1]
    if source.kind == "register":  # SRZ
        return [(state.zeros, state.zeros) if ins.result_width == 2 else state.zeros]
    return [state.special(source.text)]


@handler("R2UR")
def _r2ur(state: Any, ins: Instruction) -> list[Any]:
    """The first running lane's value; walk.py keeps uniform registers once per thread."""
    value = state.words(ins.sources[0])
    if value is None:
        return _unknown(ins)
    lanes = state.running().reshape(-1, 32).argmax(1) + np.arange(0, len(value), 32)
    first = np.repeat(value[lanes], 32)
    return [*[None] * (ins.result_count - 1), first]


@handler("ELECT")
def _elect(state: Any, ins: Instruction) -> list[Any]:
    """The first running lane, and its number."""
    running = state.running().reshape(-1, 32)
    first = running.argmax(1).astype(np.uint32)
    lane = np.arange(32, dtype=np.uint32)
    return [(running & (lane == first[:, None])).reshape(-1), np.repeat(first, 32)]


@handler("SYNCS")
def _syncs(state: Any, ins: Instruction) -> list[Any]:
    """A wait is over when it ends: when that is, scoreboard.cpp says."""
    return [state.true] if "PHASECHK" in ins.suffixes else _unknown(ins)


@handler("USETMAXREG")
def _usetmaxreg(state: Any, ins: Instruction) -> list[Any]:
    """Registers are there at the first try."""
    return [state.true if "TRY_ALLOC" in ins.suffixes else None]


@handler("VOTE", "VOTEU")
def _vote(state: Any, ins: Instruction) -> list[Any]:
    bits = state.bits(ins.sources[-1])
    if bits is None:
        return _unknown(ins)
    running = state.running().reshape(-1, 32)
    lanes = bits.reshape(-1, 32) & running
    powers = np.uint32(1) << np.arange(32, dtype=np.uint32)
    ballot = np.repeat((lanes * powers).sum(1, dtype=np.uint64).astype(np.uint32), 32)
    held = np.repeat((lanes | ~running).all(1) if "ALL" in ins.suffixes else lanes.any(1), 32)
    return [held if _is_predicate(o) else ballot for o in ins.results]


@handler("SHFL")
def _shfl(state: Any, ins: Instruction) -> list[Any]:
    value, by = (state.words(o) for o in ins.sources[:2])
    if value is None or by is None or not ins.suffixes & {"IDX", "BFLY"}:
        return _unknown(ins)
    lane = np.arange(len(value), dtype=np.int64)
    other = lane % 32 ^ by if "BFLY" in ins.suffixes else by % 32
    return [None, value[lane // 32 * 32 + other]]


@handler("P2R")
def _p2r(state: Any, ins: Instruction) -> list[Any]:
    mask, old = state.words(ins.sources[-1]), state.words(ins.sources[-2])
    packed = state.packed_predicates()
    if mask is None or old is None or packed is None or len(ins.opcode.split(".")) > 1:
        return _unknown(ins)
    return [packed & mask | old & ~mask]


@handler("LDC")
def _ldc(state: Any, ins: Instruction) -> list[Any]:
    source = ins.operands[1]
    if ins.suffixes & {"U8", "S8", "U16", "S16"}:
        word = state.constant(source, source.value // 4 * 4)
        if word is None:
            return [None]
        bits = 8 if ins.suffixes & {"U8", "S8"} else 16
        value = word >> np.uint32(source.value % 4 * 8) & np.uint32((1 << bits) - 1)
        if ins.suffixes & {"S8", "S16"} and value[0] >> (bits - 1):
            value = value | np.uint32(0xFFFFFFFF << bits & 0xFFFFFFFF)
        return [value]
    parts = [state.constant(source, source.value + 4 * i) for i in range(ins.result_width)]
    return [tuple(parts) if len(parts) > 1 else parts[0]]
