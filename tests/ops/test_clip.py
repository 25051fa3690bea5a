"""Clipping of a gradient bucket against the formula in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support.backends import Backend, unaligned
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIRES = [
    *((dtype, dtype) for dtype in DTYPES),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]
# Nothing; less than a vector; vectors and tails of all widths; several blocks, of which each passes
# its loop more than once on a small device, or chunks, of which the last is short.
SIZES = [
    *[0, 1, 3, 31, 64, 1029, 20_005],
    *(pytest.param(size, marks=pytest.mark.backends("cpu", "cuda")) for size in (16384, 50_001)),
    pytest.param(3_000_001, marks=pytest.mark.backends("cuda")),
]


def draw(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(derived(size))).to(dtype)


def clipped(u: Tensor, bound: float, factor: float) -> Tensor:
    u = u.double()
    return u * min(1.0, bound / max(float(u.norm()), 1e-30)) * factor


def assert_rounded(got: Tensor, exact: Tensor) -> None:
    """One rounding to got's dtype, after a norm that is right to 1e-5."""
    relative = 1e-5 + torch.finfo(got.dtype).eps / 2
    tiny = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=relative, atol=tiny)


@pytest.mark.sanitizer
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "wire"), WIRES)
@pytest.mark.parametrize(("acts", "shift"), [(True, 0), (False, 1)])
def test_matches_the_formula(
    backend: Backend, dtype: torch.dtype, wire: torch.dtype, acts: bool, shift: int, size: int
) -> None:
    bucket = unaligned(backend.put(draw(size, dtype)), shift)
    before = bucket.clone()
    length = float(bucket.double().norm())
    bound, factor = (length * 0.3, 1 / 3) if acts else (length * 2, 0.5)
    out = None if wire == dtype else torch.full_like(bucket, math.nan, dtype=wire)
    norm = ops.clip_bucket_(bucket, bound, factor=factor, out=out)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert float(norm) == pytest.approx(length, rel=1e-5)
    assert_rounded(bucket if out is None else out, clipped(before, bound, factor))
    if out is not None:
        assert torch.equal(bucket, before)


@pytest.mark.parametrize("multiprocessors", [1, 4])
def test_grids_of_any_size_agree(backend: Backend, multiprocessors: int) -> None:
    backend.assume(multiprocessors=multiprocessors)
    bucket = backend.put(draw(20_005, torch.float32))
    want, length = 0.3 * bucket.double(), float(bucket.double().norm())
    assert float(ops.clip_bucket_(bucket, 0.3 * length)) == pytest.approx(length, rel=1e-6)
    torch.testing.assert_close(bucket.double(), want, rtol=1e-5, atol=0)


def test_bound_may_be_a_tensor(backend: Backend) -> None:
    a, b = backend.put([draw(1000, torch.float32) for _ in range(2)])
    ops.clip_bucket_(a, 0.7, factor=0.25)
    ops.clip_bucket_(b, backend.put(torch.tensor([0.7])), factor=0.25)
    assert torch.equal(a, b)
    (c,) = backend.put([draw(1000, torch.float32)])
    torch.ops.bert_unpad.clip_bucket_(c, 1.4, backend.put(torch.tensor([0.5])), 0.25)
    assert torch.equal(a, c)


@pytest.mark.parametrize("bound", [math.inf, 1e9])
def test_what_is_within_the_bound_keeps_its_bits(backend: Backend, bound: float) -> None:
    bucket = backend.put(draw(5000, torch.float32))
    before = bucket.clone()
    ops.clip_bucket_(bucket, bound)
    assert torch.equal(bucket, before)


def test_zeros_and_a_bound_of_zero(backend: Backend) -> None:
    zeros, ones = backend.put((torch.zeros(100), torch.ones(100)))
    assert float(ops.clip_bucket_(zeros, 0.0)) == 0
    assert not zeros.any()
    assert float(ops.clip_bucket_(ones, 0.0)) == 10
    assert not ones.any()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "size", [5000, pytest.param(40_000, marks=pytest.mark.backends("cpu", "cuda"))]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_spreads_over_the_bucket(
    backend: Backend, dtype: torch.dtype, size: int, value: float
) -> None:
    bucket = backend.put(draw(size, dtype))
    bucket[size // 2] = value
    norm = ops.clip_bucket_(bucket, 1.0)
    assert not norm.isfinite()
    assert bucket.isnan().all()


def test_a_norm_that_overflows_counts_as_not_finite(backend: Backend) -> None:
    bucket = backend.put(torch.full((100,), 1e30))
    assert float(ops.clip_bucket_(bucket, 1.0)) == math.inf
    assert bucket.isnan().all()


def test_a_bound_that_is_nan_does_not_let_anything_through(backend: Backend) -> None:
    bucket, bound = backend.put((torch.ones(100), torch.tensor(math.nan)))
    ops.clip_bucket_(bucket, bound)
    assert bucket.isnan().all()


@pytest.mark.sanitizer
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_error_feedback(backend: Backend, wire: torch.dtype, size: int) -> None:
    bucket = backend.put(draw(size, torch.float32))
    residual = 0.01 * bucket.flip(0)
    before, u = bucket.clone(), (bucket + residual).double()
    bound, factor = 0.3 * float(u.norm()), 0.5
    out = torch.full_like(bucket, math.nan, dtype=wire)
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


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_step_that_is_not_finite_leaves_the_residual(backend: Backend, value: float) -> None:
    bucket, residual = backend.put((torch.ones(5000), torch.full((5000,), 0.01)))
    bucket[2500] = value
    out = torch.empty_like(bucket, dtype=torch.bfloat16)
    ops.clip_bucket_(bucket, 1.0, out=out, residual=residual)
    assert out.isnan().all()
    assert torch.equal(residual, torch.full_like(residual, 0.01))


def test_what_is_too_large_for_the_wire_is_not_kept(backend: Backend) -> None:
    bucket, residual = backend.put((torch.tensor([1e6, 1.0001]), torch.zeros(2)))
    out = torch.empty_like(bucket, dtype=torch.float16)
    ops.clip_bucket_(bucket, math.inf, out=out, residual=residual)
    assert out[0] == math.inf
    assert residual[0] == 0
    assert float(residual[1]) == pytest.approx(0.0001, rel=1e-2)


@pytest.mark.parametrize(
    "size",
    [
        20_005,
        pytest.param(200_000, marks=pytest.mark.backends("cpu")),
        pytest.param(1_000_003, marks=pytest.mark.backends("cuda")),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_every_time(backend: Backend, dtype: torch.dtype, size: int) -> None:
    backend.assume(multiprocessors=1)
    drawn = backend.put(draw(size, dtype))

    def run() -> list[Tensor]:
        bucket = drawn.clone()
        return [ops.clip_bucket_(bucket, 1.0), bucket]

    backend.assert_same_bits(run)


@pytest.mark.backends("cuda")
def test_agrees_with_the_cpu(backend: Backend) -> None:
    on_cpu = draw(100_001, torch.float32)
    bucket = backend.put(on_cpu.clone())
    norm, want = ops.clip_bucket_(bucket, 1.0), ops.clip_bucket_(on_cpu, 1.0)
    torch.testing.assert_close(norm.cpu(), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(bucket.cpu(), on_cpu, rtol=1e-5, atol=0)


@pytest.mark.backends("cpu", "cuda")
def test_opcheck(backend: Backend) -> None:
    f = torch.ops.bert_unpad
    bound, x = torch.tensor(0.5), torch.randn(50)
    out, residual = torch.empty(50, dtype=torch.bfloat16), torch.zeros(50)
    for operator, arguments in [
        (f.clip_bucket_, (x, 1.0, None, 0.5)),
        (f.clip_bucket_, (torch.randn(5, 7).half(), 1.0, bound, 0.5)),
        (f.clip_bucket_into, (x, out, None, 1.0, bound, 0.5)),
        (f.clip_bucket_into, (x, out, residual, 1.0, None, 0.5)),
    ]:
        opcheck(operator, backend.put(arguments))


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


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bucket": BUCKET.double()}, "bucket must be float32, bfloat16 or float16"),
        ({"bucket": torch.randn(20, 2).t()}, "bucket must be contiguous"),
        ({"out": HALF[:19]}, "out must have as many elements as bucket, 20, got 19"),
        ({"out": HALF.long()}, "out must be float32, bfloat16 or float16"),
        ({"bucket": HALF.bfloat16(), "out": HALF}, "out must have the bucket's dtype, or one of"),
        ({"out": HALF, "residual": torch.zeros(19)}, "residual must have as many elements"),
        ({"out": HALF, "residual": HALF.clone()}, "residual must be float32"),
        ({"out": torch.empty(20), "residual": torch.zeros(20)}, "residual needs a float32 bucket"),
        ({"max_norm": -1.0}, "max_norm must be at least 0, got -1"),
        ({"max_norm": torch.ones(2)}, r"bound must have one element, got \[2\]"),
        ({"max_norm": torch.ones(1).double()}, "bound must be float32"),
        ({"factor": 0.0}, "factor must be positive and finite, got 0"),
    ],
)
def test_bad_input_is_named(backend: Backend, change: dict, message: str) -> None:
    good = {"bucket": BUCKET, "max_norm": 1.0}
    with pytest.raises(RuntimeError, match=message):
        ops.clip_bucket_(**backend.put(good | change))


@pytest.mark.backends("cpu", "cuda")
def test_an_output_in_the_buckets_memory_is_refused(backend: Backend) -> None:
    bucket = backend.put(BUCKET)
    with pytest.raises(RuntimeError, match="memory apart from it"):
        ops.clip_bucket_(bucket, 1.0, out=bucket.view(torch.bfloat16)[:20])


@pytest.mark.backends("cuda")
@pytest.mark.parametrize(("name", "said"), [("max_norm", "bound"), ("out", "out")])
def test_another_device_is_named(backend: Backend, name: str, said: str) -> None:
    given = {"bucket": backend.put(BUCKET), "max_norm": 1.0}
    other = torch.ones(()) if name == "max_norm" else HALF
    with pytest.raises(RuntimeError, match=f"{said} must be on the same device"):
        ops.clip_bucket_(**given | {name: other})


def test_a_residual_needs_an_output() -> None:
    with pytest.raises(ValueError, match="residual needs out"):
        ops.clip_bucket_(BUCKET, 1.0, residual=torch.zeros(20))
