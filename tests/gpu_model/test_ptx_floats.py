"""The PTX interpreter's floating-point instructions, against PyTorch and numpy.

Operands are all sorts of bits: subnormals, infinities, NaN, values on both sides of a tie.
"""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.ptx_kernels import evaluate
from tests.support.seeds import derived

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
BITS = {F32: torch.int32, F64: torch.int64, F16: torch.int16, BF16: torch.int16}
NAMES = {F32: "f32", F64: "f64", F16: "f16", BF16: "bf16"}
HALVES = [F16, BF16]


def special(dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    values = [0.0, 1.0, 1.5, 2.0, 3.0, info.max, info.tiny, info.tiny / 4, info.eps, torch.inf]
    x = torch.tensor(values, dtype=F64).to(dtype)
    return torch.cat([x, -x, torch.tensor([torch.nan], dtype=dtype)])


def draw(dtype: torch.dtype, count: int = 2000, seed: int = 0) -> Tensor:
    """Any bits, and normal values of all signs."""
    generator = torch.Generator().manual_seed(derived(seed))
    size = torch.finfo(dtype).bits // 8
    raw = torch.randint(0, 256, (count // 2 * size,), generator=generator, dtype=torch.uint8)
    normal = torch.randn(count // 2, generator=generator, dtype=F64).to(dtype)
    return torch.cat([special(dtype), raw.view(dtype), normal])


def pairs(dtype: torch.dtype, count: int = 2) -> list[Tensor]:
    """Random operands, and all pairs of special ones."""
    columns = list(zip(*itertools.product(special(dtype).tolist(), repeat=2), strict=True))
    columns = [torch.tensor(c, dtype=F64).to(dtype) for c in columns]
    columns.append(columns[0].flip(0))
    return [torch.cat([columns[k], draw(dtype, seed=k)]) for k in range(count)]


def rounded(exact: list[Fraction | float], dtype: torch.dtype) -> Tensor:
    """The nearest numbers of a 16-bit type: rounded once, by way of float32 rounded to odd."""
    with np.errstate(over="ignore"):
        narrow = np.array([float(x) for x in exact]).astype(np.float32)
    for k, (x, near) in enumerate(zip(exact, narrow, strict=True)):
        even = not int(near.view(np.uint32)) & 1
        if even and np.isfinite(near) and x != float(near):
            narrow[k] = np.nextafter(near, np.float32(np.inf if x > float(near) else -np.inf))
    return torch.from_numpy(narrow).to(dtype)


def fused(x: float, y: float, z: float) -> Fraction | float:
    """x y + z, exact; but as fp64 has it where it is no number or a signed zero."""
    plain = x * y + z
    if plain == 0 or not np.isfinite(plain):
        return plain
    return Fraction(x) * Fraction(y) + Fraction(z)


def same(got: Tensor, want: Tensor) -> None:
    """The same bits; any NaN for NaN."""
    want = want.to(got.dtype)
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    bits = BITS[got.dtype]
    wrong = (got[~nan].view(bits) != want[~nan].view(bits)).nonzero().flatten()
    assert not wrong.numel(), (got[~nan][wrong[:3]], want[~nan][wrong[:3]])


def run(instruction: str, inputs: list[Tensor], dtype: torch.dtype) -> Tensor:
    # int16 has no NaN that copies might change.
    out = BITS[dtype]
    return evaluate(instruction, [x.view(BITS[x.dtype]) if x.is_floating_point() else x
                                  for x in inputs], out)[0].view(dtype)  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, F64])
def test_arithmetic_of_ieee_754(dtype):
    x, y = pairs(dtype)
    t = NAMES[dtype]
    same(run(f"add.{t} y0, x0, x1;", [x, y], dtype), x + y)
    same(run(f"sub.rn.{t} y0, x0, x1;", [x, y], dtype), x - y)
    same(run(f"mul.{t} y0, x0, x1;", [x, y], dtype), x * y)
    same(run(f"div.rn.{t} y0, x0, x1;", [x, y], dtype), x / y)
    same(run(f"rcp.rn.{t} y0, x0;", [x], dtype), 1 / x)
    with np.errstate(invalid="ignore"):  # PyTorch's is not always the nearest
        root = torch.from_numpy(np.sqrt(x.numpy()))
    same(run(f"sqrt.rn.{t} y0, x0;", [x], dtype), root)
    same(run(f"neg.{t} y0, x0;", [x], dtype), -x)
    same(run(f"abs.{t} y0, x0;", [x], dtype), x.abs())


def test_fused_multiply_add_rounds_once():
    x, y, z = pairs(F32, 3)
    # A sum in fp64 rounds twice; where all of it fits, it is exact.
    exact = x.double() * y.double()
    z[100:1000] = -exact[100:1000].float()
    got = run("fma.rn.f32 y0, x0, x1, x2;", [x, y, z], F32)
    with np.errstate(all="ignore"):
        wide = exact.numpy().astype(np.longdouble) + z.numpy().astype(np.longdouble)
        same(got, torch.from_numpy(wide.astype(np.float32)))


def test_flushing_and_saturation():
    x, y = pairs(F32)

    def flush(v: Tensor) -> Tensor:
        return torch.where(v.abs() < torch.finfo(F32).tiny, v * 0, v)

    same(run("mul.ftz.f32 y0, x0, x1;", [x, y], F32), flush(flush(x) * flush(y)))
    same(run("add.sat.f32 y0, x0, x1;", [x, y], F32), (x + y).nan_to_num(0).clamp(0, 1) + 0.0)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_minimum_and_maximum_of_nan_and_signed_zeros(dtype):
    x, y = pairs(dtype)
    t = NAMES[dtype]
    for name, torch_name in (("max", "fmax"), ("min", "fmin")):
        want = getattr(torch, torch_name)(x, y)
        want = torch.where(x.isnan(), y, torch.where(y.isnan(), x, want))
        zeros = (x == 0) & (y == 0)
        negative = x.signbit() & y.signbit() if name == "max" else x.signbit() | y.signbit()
        want = torch.where(zeros, torch.where(negative, -0.0, 0.0).to(dtype), want)
        same(run(f"{name}.{t} y0, x0, x1;", [x, y], dtype), want)
    x, y = pairs(F32)
    plain = run("max.f32 y0, x0, x1;", [x, y], F32)
    want = torch.where(x.isnan() | y.isnan(), torch.nan, plain)
    same(run("max.NaN.f32 y0, x0, x1;", [x, y], F32), want)


APPROXIMATIONS = {
    "ex2.approx.ftz": torch.exp2, "rcp.approx.ftz": lambda x: 1 / x, "lg2.approx": torch.log2,
    "sqrt.approx": torch.sqrt, "rsqrt.approx": torch.rsqrt, "sin.approx": torch.sin,
    "cos.approx": torch.cos, "tanh.approx": torch.tanh,
}  # fmt: skip


@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_approximations_are_close(name):
    x = torch.cat(
        [special(F32), 8 * torch.randn(2000, generator=torch.Generator().manual_seed(derived(1)))]
    )
    x = x[(x.abs() < 1e4) | ~x.isfinite()] if name[:3] in ("sin", "cos") else x
    got = run(f"{name}.f32 y0, x0;", [x], F32).double()
    wide = x.double()
    if "ftz" in name:
        wide = torch.where(x.abs() < torch.finfo(F32).tiny, wide * 0, wide)
    want = APPROXIMATIONS[name](wide)
    if "ftz" in name:
        want = torch.where(want.abs() < torch.finfo(F32).tiny, want * 0, want)
    want = want.float().double()
    torch.testing.assert_close(got, want, rtol=3e-7, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES)
def test_arithmetic_of_16_bits(dtype):
    x, y, z = (t[: len(t) // 2 * 2] for t in pairs(dtype, 3))
    a, b, c = (t.double() for t in (x, y, z))
    t = NAMES[dtype]
    fma = [fused(*values) for values in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    sums = {"add": a + b, "sub": a - b, "mul": a * b}
    sums = {name: rounded(exact.tolist(), dtype) for name, exact in sums.items()}
    cases = {**sums, "fma.rn": rounded(fma, dtype), "neg": -a, "abs": a.abs(),
             "max": torch.fmax(a, b), "min": torch.fmin(a, b)}  # fmt: skip
    for name, want in cases.items():
        count = 3 if name == "fma.rn" else 1 if name in ("neg", "abs") else 2
        args = ", ".join(f"x{k}" for k in range(count))
        keep = ~((a == 0) & (b == 0)) if name in ("max", "min") else torch.ones_like(a, dtype=bool)
        got = run(f"{name}.{t} y0, {args};", [x, y, z][:count], dtype)
        same(got[keep], want.to(dtype)[keep])
        words = [v.view(torch.int32) for v in (x, y, z)[:count]]
        packed = evaluate(f"{name}.{t}x2 y0, {args};", words, torch.int32)[0].view(dtype)
        same(packed[keep], want.to(dtype)[keep])


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_to_16_bits(dtype):
    x = draw(F32, 20_000)
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype).float()
    ties = (values + torch.nextafter(values, torch.tensor(torch.inf))) / 2
    middles = (values[:-1].double() + values[1:].double()).div(2).float()
    x = torch.cat([x, values, ties, middles, torch.nextafter(middles, torch.tensor(0.0))])
    x = x[: len(x) // 2 * 2]
    t = NAMES[dtype]
    same(run(f"cvt.rn.{t}.f32 y0, x0;", [x], dtype), x.to(dtype))
    high, low = x[::2].contiguous(), x[1::2].contiguous()
    words = [v.view(torch.int32) for v in (high, low)]
    packed = evaluate(f"cvt.rn.{t}x2.f32 y0, x0, x1;", words, torch.int32)[0].view(dtype)
    same(packed[1::2], high.to(dtype))
    same(packed[::2], low.to(dtype))
    nan = packed[packed.isnan()].view(torch.int16)
    assert torch.equal(nan, torch.full_like(nan, 0x7FFF))
    relu = evaluate(f"cvt.rn.relu.{t}x2.f32 y0, x0, x1;", words, torch.int32)[0].view(dtype)
    same(relu[::2], torch.where(low < 0, 0.0, low).to(dtype))
    # Toward zero: never larger, and less than a step off.
    got = run(f"cvt.rz.{t}.f32 y0, x0;", [x], dtype)
    near = x.to(dtype)
    finite = x.isfinite()
    step = torch.where(near.abs().float() > x.abs(), 1, 0).to(torch.int16)
    want = (near.view(torch.int16) - step).view(dtype)
    same(got[finite], want[finite])
    # And back, which is exact.
    same(run(f"cvt.f32.{t} y0, x0;", [values.to(dtype)], F32), values)


def test_conversions_between_floats():
    x = draw(F64)
    same(run("cvt.rn.f32.f64 y0, x0;", [x], F32), x.float())
    y = draw(F32)
    same(run("cvt.f64.f32 y0, x0;", [y], F64), y.double())
    for name, function in {
        "rni": torch.round, "rzi": torch.trunc, "rmi": torch.floor, "rpi": torch.ceil,
    }.items():  # fmt: skip
        same(run(f"cvt.{name}.f32.f32 y0, x0;", [y], F32), function(y))
    want = torch.where(y > 0, y.clamp(max=1), 0.0)
    same(run("cvt.sat.f32.f32 y0, x0;", [y], F32), want)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(("kind", "bits"), list(itertools.product("us", (16, 32, 64))))
def test_floats_to_integers(dtype, kind, bits):
    """Clamped to the range; NaN is 0, or a lone top bit where a type has 64 bits."""
    x = torch.cat([draw(dtype), 300 * torch.randn(500, dtype=dtype), draw(dtype) * 0 + 0.5])
    ends = [0.5, 1.5, 2.5, -0.5, -1.5, 2.0**15, 2.0**16, 2.0**31, 2.0**32, 2.0**63, 2.0**64]
    x = torch.cat([x, torch.tensor([*ends, *(-e for e in ends)], dtype=dtype)])
    low = 0 if kind == "u" else -(1 << (bits - 1))
    high = low + (1 << bits) - 1
    out = {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    for name, function in {
        "rni": torch.round, "rzi": torch.trunc, "rmi": torch.floor, "rpi": torch.ceil,
    }.items():  # fmt: skip
        text = f"cvt.{name}.{kind}{bits}.{NAMES[dtype]} y0, x0;"
        (got,) = evaluate(text, [x.view(BITS[dtype])], out)
        for value, number in zip(function(x.double()).tolist(), got.tolist(), strict=True):
            if value != value:
                want = 0 if dtype == F32 and bits < 64 else 1 << (bits - 1)
            elif abs(value) == float("inf"):
                want = high if value > 0 else low
            else:
                want = min(max(int(value), low), high)
            assert number % (1 << bits) == want % (1 << bits), (text, value)


@pytest.mark.parametrize(("kind", "bits"), list(itertools.product("us", (16, 32, 64))))
def test_integers_to_floats(kind, bits):
    rng = np.random.default_rng(derived(bits))
    x = rng.integers(0, 2**63, 3000, dtype=np.uint64) * 2 + rng.integers(
        0, 2, 3000, dtype=np.uint64
    )
    x = (x >> rng.integers(0, 64, 3000, dtype=np.uint64)).astype(f"uint{bits}")
    x = np.concatenate([x, np.array([0, 1, 2**bits - 1, 2 ** (bits - 1)], dtype=f"uint{bits}")])
    numbers = x if kind == "u" else x.view(f"int{bits}")
    raw = torch.from_numpy(x.view(f"int{bits}"))
    for dtype, name in ((F32, np.float32), (F64, np.float64)):
        got = run(f"cvt.rn.{NAMES[dtype]}.{kind}{bits} y0, x0;", [raw], dtype)
        same(got, torch.from_numpy(numbers.astype(name)))


@pytest.mark.parametrize("kind", "us")
def test_integers_to_bf16_are_rounded_once(kind):
    """Beside what lies half way between two values, where rounding to fp64 first loses the bit."""
    x = torch.tensor([(m * 2 + 1) << 54 for m in range(128, 256)], dtype=torch.int64)
    for step in (-1, 0, 1):
        got = run(f"cvt.rn.bf16.{kind}64 y0, x0;", [x + step], BF16)
        odd = torch.arange(128, 256) % 2
        up = odd if step == 0 else torch.full((128,), int(step > 0))
        want = (torch.arange(128, 256) + up).double() * 2.0**55
        same(got, want.to(BF16))
        if kind == "s":
            same(run("cvt.rn.bf16.s64 y0, x0;", [-(x + step)], BF16), -want.to(BF16))


def test_flushing_before_what_has_no_float_result():
    x = torch.tensor([1e-40, -1e-40, 1.5, -1.5, 0.0])
    for way, plain, flushed in (("rmi", [0, -1, 1, -2, 0], [0, 0, 1, -2, 0]),
                                ("rpi", [1, 0, 2, -1, 0], [0, 0, 2, -1, 0])):  # fmt: skip
        for ftz, want in (("", plain), (".ftz", flushed)):
            got = evaluate(f"cvt.{way}{ftz}.s32.f32 y0, x0;", [x.view(torch.int32)], torch.int32)[0]
            assert got.tolist() == want
    for ftz, want in (("", [5, 6, 5, 6, 5]), (".ftz", [5, 5, 5, 6, 5])):
        text = f"slct{ftz}.u32.f32 y0, 5, 6, x0;"
        assert evaluate(text, [x.view(torch.int32)], torch.int32)[0].tolist() == want


FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("name", FLOAT8)
def test_conversions_of_8_bits(name):
    dtype = FLOAT8[name]
    x = torch.cat([draw(F32, 20_000), torch.randn(20_000) * 0.05, torch.randn(20_000) * 300])
    x = x[: len(x) // 2 * 2]
    largest = torch.finfo(dtype).max

    def encoded(v: Tensor) -> Tensor:
        codes = v.clamp(-largest, largest).to(dtype).view(torch.uint8)
        return torch.where(v.isnan(), 0x7F, codes)

    high, low = x[::2].contiguous(), x[1::2].contiguous()
    words = [v.view(torch.int32) for v in (high, low)]
    text = f"cvt.rn.satfinite.{name}x2.f32 y0, x0, x1;"
    codes = evaluate(text, words, torch.int16)[0].view(torch.uint8)
    assert torch.equal(codes[1::2], encoded(high))
    assert torch.equal(codes[::2], encoded(low))
    halves = x.half()
    text = f"cvt.rn.satfinite.{name}x2.f16x2 y0, x0;"
    codes = evaluate(text, [halves.view(torch.int32)], torch.int16)[0].view(torch.uint8)
    assert torch.equal(codes, encoded(halves.float()))
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    text = f"cvt.rn.f16x2.{name}x2 y0, x0;"
    back = evaluate(text, [every.view(torch.int16)], torch.int32)[0].view(F16)
    same(back, every.view(dtype).float().half())


def test_rounding_to_tf32():
    x = draw(F32, 20_000)
    x = x[x.isfinite() & (x.abs() < 1e38) & (x != 0)]
    got = run("cvt.rna.tf32.f32 y0, x0;", [x], F32)
    assert not (got.view(torch.int32) & 0x1FFF).any()
    step = torch.ldexp(torch.ones_like(x, dtype=F64), x.double().frexp().exponent - 11)
    scaled = x.double() / step.clamp_min(2.0**-136)
    want = scaled.sign() * (scaled.abs() + 0.5).floor() * step.clamp_min(2.0**-136)
    same(got, want.float())


FLOAT_COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]


@pytest.mark.parametrize("dtype", [F32, F64, *HALVES])
def test_comparisons_with_nan(dtype):
    x, y = pairs(dtype)
    nan = x.isnan() | y.isnan()
    t = NAMES[dtype]

    def check(name: str, want: Tensor) -> None:
        (got,) = evaluate(f"setp.{name}.{t} %q0, x0, x1; selp.u32 y0, 1, 0, %q0;",
                          [x.view(BITS[dtype]), y.view(BITS[dtype])], torch.int32)  # fmt: skip
        assert torch.equal(got.bool(), want), name

    for name in FLOAT_COMPARISONS:
        ordered = getattr(torch, name)(x, y) & ~nan
        check(name, ordered)
        check(f"{name}u", ordered | nan)
    check("nan", nan)
    check("num", ~nan)


@pytest.mark.parametrize("dtype", HALVES)
def test_comparisons_of_pairs(dtype):
    x, y = (t[: len(t) // 2 * 2] for t in pairs(dtype))
    t = NAMES[dtype]
    words = [x.view(torch.int32), y.view(torch.int32)]
    text = f"""setp.lt.{t}x2 %q0|%q1, x0, x1; selp.u32 y0, 1, 0, %q0; selp.u32 y1, 1, 0, %q1;
               set.lt.u32.{t}x2 y2, x0, x1;"""
    low, high, mask = evaluate(text, words, *[torch.int32] * 3)
    want = x < y
    assert torch.equal(torch.stack([low, high], 1).flatten().bool(), want)
    assert torch.equal(mask.view(torch.int16), -want.to(torch.int16))
