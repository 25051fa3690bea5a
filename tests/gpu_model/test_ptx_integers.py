"""The PTX interpreter's integer instructions, against numpy and Python's integers.

Operands are random bits and what is special: 0, the ends of the ranges, shifts of the width and
more.
"""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.ptx_kernels import evaluate
from tests.support.seeds import derived

INTS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def draw(bits: int, count: int = 512, seed: int = 0) -> list[int]:
    """Patterns of so many bits: special ones and random ones of all lengths."""
    rng = np.random.default_rng([derived(bits), seed])
    top = 1 << (bits - 1)
    special = [0, 1, 2, 3, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, 31, 32, 33, 63, 64]
    wide = rng.integers(0, 2**64, count, dtype=np.uint64).tolist()
    lengths = rng.integers(1, bits + 1, count).tolist()
    return special + [x % (1 << n) for x, n in zip(wide, lengths, strict=True)]


def operands(bits: int, count: int) -> list[list[int]]:
    """All pairs of special values, among random rows."""
    rng = np.random.default_rng(derived(count))
    pairs = list(itertools.product(draw(bits)[:14], repeat=2))
    columns = [draw(bits, 600, seed) for seed in range(count)]
    rows = [[column[i] for i in rng.permutation(len(column))[:500]] for column in columns]
    for k in range(count):
        rows[k] += [pair[k] if k < 2 else rows[k][i] for i, pair in enumerate(pairs)]
    return rows


def tensor(values: list[int], bits: int) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=f"uint{bits}").view(f"int{bits}"))


def unsigned(x: Tensor) -> list[int]:
    bits = 8 * x.element_size()
    return [int(v) % (1 << bits) for v in x.tolist()]


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def check(instruction: str, bits: int, function, *, is_signed: bool = False, count: int = 2,
          out_bits: int | None = None) -> None:  # fmt: skip
    """y0 = function(x0, ...), on Python's integers, modulo 2^bits."""
    out_bits = out_bits or bits
    rows = operands(bits, count)
    (y,) = evaluate(instruction, [tensor(row, bits) for row in rows], INTS[out_bits])
    for row in zip(*rows, unsigned(y), strict=True):
        *x, got = row
        if is_signed:
            x = [signed(v, bits) for v in x]
        assert got == function(*x) % (1 << out_bits), (instruction, x)


TYPES = [("u", 16), ("s", 16), ("u", 32), ("s", 32), ("u", 64), ("s", 64)]


@pytest.mark.parametrize(("kind", "bits"), TYPES)
def test_arithmetic(kind, bits):
    is_signed, t = kind == "s", f"{kind}{bits}"

    def run(name, function, count=2, out_bits=None):
        names = ", ".join(f"x{k}" for k in range(count))
        check(f"{name}.{t} y0, {names};", bits, function, is_signed=is_signed, count=count,
              out_bits=out_bits)  # fmt: skip

    run("add", lambda x, y: x + y)
    run("sub", lambda x, y: x - y)
    run("mul.lo", lambda x, y: x * y)
    run("mul.hi", lambda x, y: x * y >> bits)
    run("mad.lo", lambda x, y, z: x * y + z, 3)
    run("mad.hi", lambda x, y, z: (x * y >> bits) + z, 3)
    run("min", min)
    run("max", max)
    if bits < 64:
        run("mul.wide", lambda x, y: x * y, out_bits=2 * bits)


@pytest.mark.parametrize(("kind", "bits"), TYPES)
def test_division_truncates(kind, bits):
    def quotient(x, y):
        if y == 0:
            return -1
        return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    def remainder(x, y):
        return x if y == 0 else x - y * quotient(x, y)

    is_signed = kind == "s"
    check(f"div.{kind}{bits} y0, x0, x1;", bits, quotient, is_signed=is_signed)
    check(f"rem.{kind}{bits} y0, x0, x1;", bits, remainder, is_signed=is_signed)


@pytest.mark.parametrize(("kind", "bits"), [("u", 16), ("s", 16), ("u", 32), ("s", 32)])
def test_wide_multiply_add(kind, bits):
    rows = operands(bits, 2)
    addend = draw(2 * bits, len(rows[0]))[: len(rows[0])]
    x, y = (tensor(row, bits) for row in rows)
    z = tensor(addend, 2 * bits)
    (out,) = evaluate(f"mad.wide.{kind}{bits} y0, x0, x1, x2;", [x, y, z], INTS[2 * bits])
    for a, b, c, got in zip(*rows, addend, unsigned(out), strict=True):
        if kind == "s":
            a, b = signed(a, bits), signed(b, bits)
        assert got == (a * b + c) % (1 << 2 * bits)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_negation_and_absolute_value(bits):
    check(f"neg.s{bits} y0, x0;", bits, lambda x: -x, is_signed=True, count=1)
    check(f"abs.s{bits} y0, x0;", bits, abs, is_signed=True, count=1)


def test_saturating_sums():
    low, high = -(1 << 31), (1 << 31) - 1
    for name, sign in (("add", 1), ("sub", -1)):
        check(
            f"{name}.sat.s32 y0, x0, x1;",
            32,
            lambda x, y, sign=sign: min(max(x + sign * y, low), high),
            is_signed=True,
        )


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic(bits):
    check(f"and.b{bits} y0, x0, x1;", bits, lambda x, y: x & y)
    check(f"or.b{bits} y0, x0, x1;", bits, lambda x, y: x | y)
    check(f"xor.b{bits} y0, x0, x1;", bits, lambda x, y: x ^ y)
    check(f"not.b{bits} y0, x0;", bits, lambda x: ~x, count=1)
    check(f"cnot.b{bits} y0, x0;", bits, lambda x: int(x == 0), count=1)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_by_the_width_and_more(bits):
    x, n = draw(bits, 600), [*range(70), 255, 2**31, 2**32 - 1] * 10
    n = n[: len(x)]
    for name, function in {
        f"shl.b{bits}": lambda v, k: 0 if k >= bits else v << k,
        f"shr.u{bits}": lambda v, k: v >> min(k, bits),
        f"shr.s{bits}": lambda v, k: signed(v, bits) >> min(k, bits),
    }.items():
        (y,) = evaluate(f"{name} y0, x0, x1;", [tensor(x, bits), tensor(n, 32)], INTS[bits])
        for v, k, got in zip(x, n, unsigned(y), strict=True):
            assert got == function(v, k) % (1 << bits), (name, v, k)


def test_funnel_shifts():
    for mode, amount in (("wrap", lambda n: n & 31), ("clamp", lambda n: min(n, 32))):
        check(
            f"shf.l.{mode}.b32 y0, x0, x1, x2;",
            32,
            lambda low, high, n, amount=amount: (high << 32 | low) << amount(n) >> 32,
            count=3,
        )
        check(
            f"shf.r.{mode}.b32 y0, x0, x1, x2;",
            32,
            lambda low, high, n, amount=amount: (high << 32 | low) >> amount(n),
            count=3,
        )


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits):
    x, y = draw(bits, 600, 1), draw(bits, 600, 2)
    rng = np.random.default_rng(derived(bits))
    at, length = (rng.integers(0, bits + 8, len(x)).tolist() for _ in range(2))
    length[:40], at[40:50] = [0] * 10 + [bits] * 10 + [255] * 20, [255] * 10
    shape = [tensor(at, 32), tensor(length, 32)]

    def extract(v, p, n, is_signed):
        sign = v >> min(p + n - 1, bits - 1) & 1 if is_signed and n else 0
        return sum((v >> (p + i) & 1 if i < n and p + i < bits else sign) << i for i in range(bits))

    for kind in "us":
        (out,) = evaluate(
            f"bfe.{kind}{bits} y0, x0, x1, x2;", [tensor(x, bits), *shape], INTS[bits]
        )
        for v, p, n, got in zip(x, at, length, unsigned(out), strict=True):
            assert got == extract(v, p, n, kind == "s"), (kind, v, p, n)

    def insert(v, into, p, n):
        for i in range(min(n, max(bits - p, 0))):
            into = into & ~(1 << (p + i)) | (v >> i & 1) << (p + i)
        return into

    (out,) = evaluate(
        f"bfi.b{bits} y0, x0, x1, x2, x3;", [tensor(x, bits), tensor(y, bits), *shape], INTS[bits]
    )
    for v, w, p, n, got in zip(x, y, at, length, unsigned(out), strict=True):
        assert got == insert(v, w, p, n), (v, w, p, n)


def test_permutation_of_bytes():
    def permute(a, b, digits):
        result = 0
        for k in range(4):
            digit = digits >> (4 * k) & 15
            byte = (b << 32 | a) >> (8 * (digit & 7)) & 255
            if digit & 8:
                byte = 255 * (byte >> 7)
            result |= byte << (8 * k)
        return result

    check("prmt.b32 y0, x0, x1, x2;", 32, permute, count=3)


@pytest.mark.parametrize("table", [0x00, 0x96, 0xE8, 0xCA, 0x1B, 0xFF])
def test_logic_of_three_operands(table):
    def function(a, b, c):
        return sum(
            (table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i
            for i in range(32)
        )

    check(f"lop3.b32 y0, x0, x1, x2, {table};", 32, function, count=3)


@pytest.mark.parametrize("bits", [32, 64])
def test_counts_of_bits(bits):
    check(f"popc.b{bits} y0, x0;", bits, lambda x: x.bit_count(), count=1, out_bits=32)
    check(f"clz.b{bits} y0, x0;", bits, lambda x: bits - x.bit_length(), count=1, out_bits=32)
    check(f"brev.b{bits} y0, x0;", bits, lambda x: int(f"{x:0{bits}b}"[::-1], 2), count=1)
    check(f"bfind.u{bits} y0, x0;", bits, lambda x: x.bit_length() - 1, count=1, out_bits=32)
    check(
        f"bfind.s{bits} y0, x0;",
        bits,
        lambda x: (~x if x < 0 else x).bit_length() - 1,
        is_signed=True,
        count=1,
        out_bits=32,
    )


@pytest.mark.parametrize("bits", [32, 64])
def test_carries_between_instructions(bits):
    """Sums, differences and products of numbers of twice the width."""
    parts = [draw(bits, 600, seed)[:600] for seed in range(6)]
    x = [tensor(part, bits) for part in parts]
    a, b, c = ([high << bits | low for low, high in zip(*parts[2 * k : 2 * k + 2], strict=True)]
               for k in range(3))  # fmt: skip
    t = f"u{bits}"
    cases = {
        f"add.cc.{t} y0, x0, x2; addc.{t} y1, x1, x3;": lambda a, b, c: a + b,
        f"sub.cc.{t} y0, x0, x2; subc.{t} y1, x1, x3;": lambda a, b, c: a - b,
        f"mad.lo.cc.{t} y0, x0, x2, x4; madc.hi.{t} y1, x0, x2, x5;": lambda a, b, c: (
            (a % (1 << bits)) * (b % (1 << bits)) + c
        ),
    }
    for text, function in cases.items():
        low, high = evaluate(text, x, INTS[bits], INTS[bits])
        got = [h << bits | v for v, h in zip(unsigned(low), unsigned(high), strict=True)]
        want = [function(*row) % (1 << 2 * bits) for row in zip(a, b, c, strict=True)]
        assert got == want, text


def test_conversions_between_widths():
    x = draw(64, 300)
    for source, target in itertools.product((8, 16, 32, 64), repeat=2):
        for from_kind, to_kind in itertools.product("us", repeat=2):
            register = max(source, 16)
            values = [v % (1 << source) for v in x]
            (y,) = evaluate(
                f"cvt.{to_kind}{target}.{from_kind}{source} y0, x0;",
                [tensor(values, register)],
                INTS[max(target, 16)],
            )
            for v, got in zip(values, unsigned(y), strict=True):
                number = signed(v, source) if from_kind == "s" else v
                want = number % (1 << target)
                if to_kind == "s" and target == 8:
                    want = signed(want, 8) % (1 << 16)
                assert got == want, (source, target, from_kind, to_kind, v)


def test_conversions_of_a_wide_register_s_low_part():
    x = draw(64, 300)
    for source, target in itertools.product((16, 32), (16, 32, 64)):
        for from_kind, to_kind in itertools.product("us", repeat=2):
            (y,) = evaluate(
                f"cvt.{to_kind}{target}.{from_kind}{source} y0, x0;", [tensor(x, 64)], INTS[target]
            )
            for v, got in zip(x, unsigned(y), strict=True):
                low = v % (1 << source)
                number = signed(low, source) if from_kind == "s" else low
                assert got == number % (1 << target), (source, target, from_kind, to_kind, v)


def test_saturating_conversions():
    x = draw(64, 300)
    for kind, bits in (("u", 8), ("s", 8), ("u", 16), ("s", 16), ("u", 32), ("s", 32)):
        low, high = (
            (0, (1 << bits) - 1) if kind == "u" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        )
        (y,) = evaluate(f"cvt.sat.{kind}{bits}.s64 y0, x0;", [tensor(x, 64)], INTS[max(bits, 16)])
        for v, got in zip(x, unsigned(y), strict=True):
            assert got == min(max(signed(v, 64), low), high) % (1 << max(bits, 16))


def test_parts_of_registers():
    x = tensor(draw(64, 300), 64)
    low, high = evaluate("mov.b64 {y0, y1}, x0;", [x], torch.int32, torch.int32)
    assert torch.equal(torch.stack([low, high], 1).flatten(), x.view(torch.int32))
    (whole,) = evaluate("mov.b64 y0, {x0, x1};", [low, high], torch.int64)
    assert torch.equal(whole, x)
    halves = x.view(torch.int32)
    first, second = evaluate("mov.b32 {y0, y1}, x0;", [halves], torch.int16, torch.int16)
    assert torch.equal(torch.stack([first, second], 1).flatten(), halves.view(torch.int16))
    (whole,) = evaluate("mov.b32 y0, {x0, x1};", [first, second], torch.int32)
    assert torch.equal(whole, halves)


COMPARISONS = {
    "eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y, "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "bits"), TYPES)
def test_comparisons_and_selection(kind, bits):
    rows = operands(bits, 2)
    names = {**COMPARISONS, **({} if kind == "s" else {
        "lo": COMPARISONS["lt"], "ls": COMPARISONS["le"], "hi": COMPARISONS["gt"],
        "hs": COMPARISONS["ge"]})}  # fmt: skip
    for name, function in names.items():
        text = f"""setp.{name}.{kind}{bits} %q0|%q1, x0, x1;
                   selp.u32 y0, 7, 9, %q0; selp.u32 y1, 1, 0, %q1;"""
        y, z = evaluate(text, [tensor(row, bits) for row in rows], torch.int32, torch.int32)
        for a, b, got, opposite in zip(*rows, y.tolist(), z.tolist(), strict=True):
            if kind == "s":
                a, b = signed(a, bits), signed(b, bits)
            assert (got, opposite) == ((7, 0) if function(a, b) else (9, 1)), (name, a, b)


def test_comparisons_combined_with_a_predicate():
    rows = operands(32, 3)
    x = [tensor(row, 32) for row in rows]
    for name, combine in {
        "and": lambda p, q: p and q, "or": lambda p, q: p or q, "xor": lambda p, q: p != q,
    }.items():  # fmt: skip
        text = f"""setp.lt.u32 %q2, x0, x2; setp.gt.{name}.u32 %q0, x0, x1, %q2;
                   setp.gt.{name}.u32 %q1, x0, x1, !%q2;
                   selp.u32 y0, 1, 0, %q0; set.gt.{name}.u32.u32 y1, x0, x1, !%q2;"""
        y, z = evaluate(text, x, torch.int32, torch.int32)
        for a, b, c, got, mask in zip(*rows, y.tolist(), z.tolist(), strict=True):
            assert got == combine(a > b, a < c)
            assert mask == -int(combine(a > b, not a < c))
