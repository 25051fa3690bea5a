"""Clipping of a gradient bucket against the formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support.op_checks import assert_same_bits_whatever_the_threads
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIRES = [
    *((dtype, dtype) for dtype in DTYPES),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]
# One element; tails of all widths; several chunks, of which the last is short.
SIZES = [1, 3, 31, 64, 1000, 16384, 50_001]


def draw(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(derived(size))).to(dtype)


def clipped(u: Tensor, bound: float, factor: float) -> Tensor:
    u = u.double()
    return u * min(1.0, bound / float(u.norm())) * factor


def assert_rounded(got: Tensor, exact: Tensor) -> None:
    """One rounding to got's dtype, after a norm that is right to 1e-5."""
    relative = 1e-5 + torch.finfo(got.dtype).eps / 2
    tiny = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=relative, atol=tiny)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "wire"), WIRES)
@pytest.mark.parametrize("acts", [True, False])
def test_matches_the_formula(dtype: torch.dtype, wire: torch.dtype, acts: bool, size: int) -> None:
    bucket = draw(size, dtype)
    before = bucket.clone()
    length = float(bucket.double().norm())
    bound, factor = (length * 0.3, 1 / 3) if acts else (length * 2, 0.5)
    out = None if wire == dtype else torch.full((size,), math.nan, dtype=wire)
    norm = ops.clip_bucket_(bucket, bound, factor=factor, out=out)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert float(norm) == pytest.approx(length, rel=1e-5)
    assert_rounded(bucket if out is None else out, clipped(before, bound, factor))
    if out is not None:
        assert torch.equal(bucket, before)


def test_bound_may_be_a_tensor() -> None:
    a, b = draw(1000, torch.float32), draw(1000, torch.float32)
    ops.clip_bucket_(a, 0.7, factor=0.25)
    ops.clip_bucket_(b, torch.tensor([0.7]), factor=0.25)
    assert torch.equal(a, b)


@pytest.mark.parametrize("bound", [math.inf, 1e9])
def test_what_is_within_the_bound_keeps_its_bits(bound: float) -> None:
    bucket = draw(1000, torch.float32)
    before = bucket.clone()
    ops.clip_bucket_(bucket, bound)
    assert torch.equal(bucket, before)


def test_zeros_and_a_bound_of_zero() -> None:
    zeros, ones = torch.zeros(100), torch.ones(100)
    assert float(ops.clip_bucket_(zeros, 0.0)) == 0
    assert torch.equal(zeros, torch.zeros(100))
    assert float(ops.clip_bucket_(ones, 0.0)) == 10
    assert torch.equal(ones, torch.zeros(100))


def test_nothing_to_clip() -> None:
    assert float(ops.clip_bucket_(torch.empty(0), 1.0)) == 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_spreads_over_the_bucket(dtype: torch.dtype, value: float) -> None:
    bucket = draw(40_000, dtype)
    bucket[20_000] = value
    norm = ops.clip_bucket_(bucket, 1.0)
    assert not norm.isfinite()
    assert bucket.isnan().all()


def test_a_norm_that_overflows_counts_as_not_finite() -> None:
    bucket = torch.full((100,), 1e30)
    assert float(ops.clip_bucket_(bucket, 1.0)) == math.inf
    assert bucket.isnan().all()


def test_a_bound_that_is_nan_does_not_let_anything_through() -> None:
    bucket = torch.ones(100)
    ops.clip_bucket_(bucket, torch.tensor(math.nan))
    assert bucket.isnan().all()


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_error_feedback(wire: torch.dtype, size: int) -> None:
    bucket, residual = draw(size, torch.float32), 0.01 * draw(size, torch.float32).flip(0)
    before, u = bucket.clone(), (bucket + residual).double()
    bound, factor = 0.3 * float(u.norm()), 0.5
    out = torch.full((size,), math.nan, dtype=wire)
    norm = ops.clip_bucket_(bucket, bound, factor=factor, out=out, residual=residual)
    assert float(norm) == pytest.approx(float(u.norm()), rel=1e-5)
    exact = clipped(u, bound, factor)
    assert_rounded(out, exact)
    assert torch.equal(bucket, before)
    # Sent and left over add up to what was to be sent.
    total = out.double() + factor * residual.double()
    torch.testing.assert_close(total, exact, rtol=1e-5, atol=1e-9)


def test_error_feedback_sends_small_numbers_in_the_end() -> None:
    """1 + 1/1000 rounds to 1 in bfloat16; over many steps the rest arrives too."""
    residual, sent = torch.zeros(16), torch.zeros(16)
    for _ in range(1000):
        out = torch.empty(16, dtype=torch.bfloat16)
        ops.clip_bucket_(torch.full((16,), 1.001), math.inf, out=out, residual=residual)
        sent += out
    torch.testing.assert_close(sent, torch.full((16,), 1001.0), rtol=1e-5, atol=0)


def test_a_step_that_is_not_finite_leaves_the_residual() -> None:
    bucket, residual = torch.full((20,), math.inf), torch.full((20,), 0.01)
    out = torch.empty(20, dtype=torch.bfloat16)
    ops.clip_bucket_(bucket, 1.0, out=out, residual=residual)
    assert out.isnan().all()
    assert torch.equal(residual, torch.full((20,), 0.01))


def test_what_is_too_large_for_the_wire_is_not_kept() -> None:
    bucket, residual = torch.tensor([1e6, 1.0001]), torch.zeros(2)
    out = torch.empty(2, dtype=torch.float16)
    ops.clip_bucket_(bucket, math.inf, out=out, residual=residual)
    assert out[0] == math.inf
    assert residual[0] == 0
    assert float(residual[1]) == pytest.approx(0.0001, rel=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_whatever_the_threads(dtype: torch.dtype) -> None:
    def run() -> list[Tensor]:
        bucket = draw(200_000, dtype)
        return [ops.clip_bucket_(bucket, 1.0), bucket]

    assert_same_bits_whatever_the_threads(run)


def test_opcheck() -> None:
    f = torch.ops.bert_unpad
    bound = torch.tensor(0.5)
    opcheck(f.clip_bucket_, (torch.randn(50), 1.0, None, 0.5))
    opcheck(f.clip_bucket_, (torch.randn(5, 7).half(), 1.0, bound, 0.5))
    out, residual = torch.empty(50, dtype=torch.bfloat16), torch.zeros(50)
    opcheck(f.clip_bucket_into, (torch.randn(50), out, None, 1.0, bound, 0.5))
    opcheck(f.clip_bucket_into, (torch.randn(50), out, residual, 1.0, None, 0.5))


def test_compiles_without_graph_breaks() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bucket = x * 2
        out = torch.empty_like(bucket, dtype=torch.bfloat16)
        first = ops.clip_bucket_(bucket, 3.0, factor=0.5)
        second = ops.clip_bucket_(bucket, first * 0.1, out=out)
        return bucket, out, second

    x = draw(1000, torch.float32)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(f(x), compiled(x), strict=True):
        assert torch.equal(a, b)


BUCKET = torch.randn(20)
HALF = torch.empty(20, dtype=torch.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bucket": BUCKET.double()}, "bucket must be float32, bfloat16 or float16"),
        ({"bucket": torch.randn(20, 2)[:, 0]}, "bucket must be contiguous"),
        ({"out": HALF[:19]}, "out must have as many elements as bucket, 20, got 19"),
        ({"out": HALF.long()}, "out must be float32, bfloat16 or float16"),
        ({"bucket": HALF.bfloat16(), "out": HALF}, "out must have the bucket's dtype, or one of"),
        ({"out": BUCKET.view(torch.bfloat16)[:20]}, "memory apart from it"),
        ({"out": HALF, "residual": torch.zeros(19)}, "residual must have as many elements"),
        ({"out": HALF, "residual": HALF.clone()}, "residual must be float32"),
        ({"out": torch.empty(20), "residual": torch.zeros(20)}, "residual needs a float32 bucket"),
        ({"max_norm": -1.0}, "max_norm must be at least 0, got -1"),
        ({"max_norm": torch.ones(2)}, r"bound must have one element, got \[2\]"),
        ({"max_norm": torch.ones(1).double()}, "bound must be float32"),
        ({"factor": 0.0}, "factor must be positive and finite, got 0"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.clip_bucket_(**({"bucket": BUCKET, "max_norm": 1.0} | change))


def test_a_residual_needs_an_output() -> None:
    with pytest.raises(ValueError, match="residual needs out"):
        ops.clip_bucket_(BUCKET, 1.0, residual=torch.zeros(20))
