"""Compression to signs, and the mean of what was compressed, against plain PyTorch."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support.backends import Backend, unaligned
from tests.support.op_checks import assert_same_bits_whatever_the_threads, results_of_every_isa
from tests.support.seeds import derived
from tests.support.signs import pack, rms, signs

DTYPES = [torch.float32, torch.bfloat16, torch.float16, None]
# Nothing; tails of all widths; less than a warp takes, a warp and a bit; more than a device of one
# multiprocessor takes at once, which is 8192; several chunks of 16384, of which the last is short.
SIZES = [0, 1, 5, 7, 8, 9, 31, 63, 64, 65, 300, 1000, 10_001]
LARGE = [
    *(pytest.param(size, marks=pytest.mark.backends("cpu", "cuda")) for size in (16384, 50_001)),
    pytest.param(3_000_001, marks=pytest.mark.backends("cuda")),
]


def draw(size: int, dtype: torch.dtype | None = torch.float32) -> Tensor | None:
    return None if dtype is None else torch.randn(size).to(dtype)


def byte_count(size: int) -> int:
    return -(-size // 8)


def compress(value: Tensor | None, error: Tensor) -> tuple[Tensor, Tensor]:
    """Bits and scale; the error is changed in place."""
    scale = ops.sign_scale(value, error)
    bits = torch.full_like(error[: byte_count(error.numel())], 255, dtype=torch.uint8)
    ops.sign_pack_(value, error, bits, scale)
    return bits, scale


@pytest.mark.sanitizer
@pytest.mark.parametrize("size", [*SIZES, *LARGE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_bits_and_error(backend: Backend, dtype: torch.dtype | None, size: int) -> None:
    backend.assume(multiprocessors=1)
    value, before = backend.put((draw(size, dtype), torch.randn(size)))
    whole = before if value is None else value.float() + before
    for shift in (0, 1):
        error = unaligned(before, shift)
        bits, scale = compress(None if value is None else unaligned(value, shift), error)
        assert scale.dtype == torch.float32
        assert scale.shape == ()
        assert float(scale) == pytest.approx(float(rms(whole)), rel=1e-5)
        want_bits, want_error = pack(value, before, scale)
        assert torch.equal(bits, want_bits)
        assert torch.equal(error, want_error)


@pytest.mark.parametrize("multiprocessors", [1, 4])
def test_grids_of_any_size_agree(backend: Backend, multiprocessors: int) -> None:
    backend.assume(multiprocessors=multiprocessors)
    value, error = backend.put(torch.randn(2, 40_001)).unbind()
    want = float(rms(value + error))
    assert float(ops.sign_scale(value, error)) == pytest.approx(want, rel=2e-6)


def test_what_is_sent_and_what_is_kept_add_up_and_have_the_norm_of_the_value(
    backend: Backend,
) -> None:
    value, error = backend.put((torch.randn(5003), 0.1 * torch.randn(5003)))
    out = torch.empty_like(value)
    whole = value + error
    bits, scale = compress(value, error)
    ops.sign_unpack_(bits[None], scale[None], out)
    torch.testing.assert_close(out + error, whole, rtol=0, atol=1e-6)
    assert float(out.norm()) == pytest.approx(float(whole.norm()), rel=1e-5)


def test_the_mean_of_a_constant_arrives_over_many_rounds() -> None:
    """Error feedback: what is lost in a round is sent in a later one."""
    value = torch.randn(1000)
    error, out, total = torch.zeros(1000), torch.empty(1000), torch.zeros(1000)
    for _ in range(400):
        bits, scale = compress(value, error)
        ops.sign_unpack_(bits[None], scale[None], out)
        total += out
    assert float((total / 400 - value).abs().max()) <= float(error.abs().max()) / 400 + 1e-5
    assert float(error.norm()) < 0.05 * 400 * float(value.norm())


def test_negative_zero_is_negative(backend: Backend) -> None:
    error = backend.put(torch.tensor([0.0, -0.0, 1.0, -1.0]))
    bits, _ = compress(None, error)
    assert bits.tolist() == [0b1010]


@pytest.mark.sanitizer
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
@pytest.mark.parametrize("size", [*SIZES[1:], *LARGE[:-1]])
def test_mean(backend: Backend, rows: int, size: int) -> None:
    bits = torch.randint(256, (rows, byte_count(size) + 2), dtype=torch.uint8)
    scales, start = torch.rand(rows), torch.randn(size)
    want = torch.zeros(size)
    for row, scale in zip(signs(bits), scales * torch.tensor(1 / rows), strict=True):
        want = want + row[:size] * scale
    bits, scales, start, want = backend.put((bits, scales, start, want))
    for shift, add in product((0, 1), (False, True)):
        out = unaligned(start, shift)
        ops.sign_mean_(bits, scales, out, add=add)
        assert torch.equal(out, start + want if add else want)


def test_factor_of_a_mean(backend: Backend) -> None:
    bits, out = backend.put((torch.tensor([[1], [3]], dtype=torch.uint8), torch.empty(3)))
    ops.sign_mean_(bits, backend.put(torch.tensor([1.0, 4.0])), out, factor=10.0)
    assert out.tolist() == [-50.0, -30.0, 50.0]


@pytest.mark.parametrize("columns", [1, 16, 130, 2048, 3001])
def test_parts_follow_each_other(backend: Backend, columns: int) -> None:
    bits, scales = torch.randint(256, (3, columns), dtype=torch.uint8), torch.rand(3)
    bits, scales = backend.put((bits, scales))
    whole = (signs(bits) * scales[:, None]).flatten()
    for size in (24 * columns, 24 * columns - 5, 8 * columns + 1, 3, 0):
        for shift in (0, 1):
            out = unaligned(torch.full_like(whole[:size], math.nan), shift)
            ops.sign_unpack_(bits, scales, out)
            assert torch.equal(out, whole[:size])


def test_large_results_and_addresses_that_are_no_multiples() -> None:
    """Beyond 4 MiB results are written past the caches, where addresses allow it."""
    size = (1 << 20) + 77
    bits = torch.randint(256, (1, byte_count(size)), dtype=torch.uint8)
    want = signs(bits)[0, :size] * 0.5
    for shift in (0, 1):
        out = torch.full((size + 1,), math.nan)[shift : shift + size]
        ops.sign_unpack_(bits, torch.tensor([0.5]), out)
        assert torch.equal(out, want)
        ops.sign_mean_(bits, torch.tensor([0.5]), out)
        assert torch.equal(out, want)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_where_the_guard_is_not_finite_nothing_changes(backend: Backend, value: float) -> None:
    guard, scale, finite = backend.put((torch.tensor(value), torch.tensor(2.0), torch.tensor(0.0)))
    error, own = backend.put(torch.randn(2, 300)).unbind()
    bits = backend.put(torch.zeros(38, dtype=torch.uint8))
    before = error.clone()
    ops.sign_pack_(own, error, bits, scale, guard=guard)
    assert torch.equal(error, before)
    assert not bits.any()
    ops.sign_mean_(bits[None], scale[None], error, add=True, guard=guard)
    assert torch.equal(error, before)
    ops.sign_mean_(bits[None], scale[None], error, guard=finite)
    assert torch.equal(error, torch.full_like(error, 2.0))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e30])
def test_a_scale_shows_what_is_not_finite(backend: Backend, bad: float) -> None:
    value, error = backend.put((torch.randn(40_000), torch.zeros(40_000)))
    value[20_000] = bad
    assert not ops.sign_scale(value, error).isfinite()


def _run() -> list[Tensor]:
    torch.manual_seed(derived(0))
    results = []
    for size in (5, 203, 200_003):
        for dtype in DTYPES:
            value, error = draw(size, dtype), torch.randn(size)
            scale = ops.sign_scale(value, error)
            bits = torch.empty(byte_count(size), dtype=torch.uint8)
            ops.sign_pack_(value, error, bits, torch.tensor(0.75))
            out = torch.empty(size)
            ops.sign_mean_(bits.expand(3, -1).contiguous(), torch.rand(3), out)
            results += [scale, bits, error, out]
    return results


def test_same_bits_every_time(backend: Backend) -> None:
    value, error = backend.put(torch.randn(2, 20_001)).unbind()
    backend.assert_same_bits(lambda: [ops.sign_scale(value, error)])


def test_same_bits_whatever_the_threads() -> None:
    assert_same_bits_whatever_the_threads(_run)


def test_all_instruction_sets_agree() -> None:
    """The order of a scale's sum depends on the width of vectors, and nothing else does."""
    results = results_of_every_isa(_run)
    first = results.pop("generic")
    for others in results.values():
        for number, (a, b) in enumerate(zip(first, others, strict=True)):
            if number % 4 == 0:
                torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
            else:
                assert torch.equal(a, b)


@pytest.mark.backends("cpu", "cuda")
def test_opcheck(backend: Backend) -> None:
    f, bits = torch.ops.bert_unpad, torch.zeros(3, dtype=torch.uint8)
    two, guard = torch.randint(256, (2, 3), dtype=torch.uint8), torch.tensor(1.0)
    calls = []
    for dtype in DTYPES:
        value = draw(20, dtype)
        calls.append((f.sign_scale, (value, torch.randn(20))))
        calls.append((f.sign_pack_, (value, torch.randn(20), bits.clone(), guard, None)))
        calls.append((f.sign_pack_, (value, torch.randn(20), bits.clone(), guard, guard)))
    calls.append((f.sign_mean_, (two, torch.rand(2), torch.randn(20), 0.5, True, None)))
    calls.append((f.sign_mean_, (two, torch.rand(2), torch.randn(20), 0.5, False, guard)))
    calls.append((f.sign_unpack_, (two, torch.rand(2), torch.randn(40))))
    for operator, arguments in calls:
        opcheck(operator, backend.put(arguments))


def test_compiles_without_graph_breaks() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        error, bits = x * 0.5, torch.empty(13, dtype=torch.uint8)
        scale = ops.sign_scale(x, error)
        ops.sign_pack_(x, error, bits, scale)
        out = torch.empty_like(x)
        ops.sign_unpack_(bits[None], scale[None], out)
        return error, out

    x = torch.randn(100)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for a, b in zip(f(x), compiled(x), strict=True):
        assert torch.equal(a, b)


def test_a_scale_has_no_gradient() -> None:
    with pytest.raises(NotImplementedError, match="sign_scale: gradients are not supported"):
        ops.sign_scale(torch.randn(8, requires_grad=True), torch.zeros(8)).backward()


ERROR = torch.randn(20)
BITS = torch.zeros(3, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": ERROR[:19]}, "value must have as many elements as error, 20, got 19"),
        ({"value": ERROR.double()}, "value must be float32, bfloat16 or float16"),
        ({"value": torch.randn(20, 2)[:, 0]}, "value must be contiguous"),
        ({"error": ERROR.half()}, "error must be float32"),
        ({"bits": BITS[:2]}, r"bits must have shape \[ceil\(elements of error / 8\)\], got \[2\]"),
        ({"bits": BITS.long()}, "bits must be uint8"),
        ({"scale": torch.ones(2)}, r"scale must have one element, got \[2\]"),
        ({"guard": torch.ones(()).double()}, "guard must be float32"),
    ],
)
def test_bad_input_of_packing_is_named(change: dict, message: str) -> None:
    good = {"value": ERROR, "error": ERROR.clone(), "bits": BITS, "scale": torch.ones(())}
    with pytest.raises(RuntimeError, match=f"sign_pack_: {message}"):
        ops.sign_pack_(**good | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": BITS}, r"bits must have shape \[rows, bytes\], got \[3\]"),
        ({"bits": BITS[None].int()}, "bits must be uint8"),
        ({"bits": torch.zeros(0, 3, dtype=torch.uint8)}, "bits must have at least one row"),
        ({"scales": torch.ones(2)}, r"scales must have shape \[rows of bits\], got \[2\]"),
        ({"scales": torch.ones(1).half()}, "scales must be float32"),
        ({"out": torch.ones(25)}, "out must have at most 24 elements, .* got 25"),
        ({"out": torch.ones(20).half()}, "out must be float32"),
        ({"factor": math.inf}, "factor must be finite, got inf"),
    ],
)
def test_bad_input_of_means_is_named(change: dict, message: str) -> None:
    good = {"bits": BITS[None], "scales": torch.ones(1), "out": torch.ones(20)}
    with pytest.raises(RuntimeError, match=f"sign_mean_: {message}"):
        ops.sign_mean_(**good | change)
    if "factor" not in change:
        with pytest.raises(RuntimeError, match=f"sign_unpack_: {message}"):
            ops.sign_unpack_(**good | change)
