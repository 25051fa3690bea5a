"""Quantisation to 8 bits on the model of a block, and 8-bit products on a model of cuBLASLt."""

from __future__ import annotations

import ctypes
import itertools
from functools import partial

import pytest
import torch

from bert_unpad.ops.delayed_scaling import DelayedScale
from bert_unpad.ops.fp8 import quantize_by, quantize_fp8  # on a CPU: by PyTorch
from gpu_model import build
from gpu_model.block_model import POLICIES, Model
from tests.support.model_checks import DTYPES, assert_every_site_is_needed
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
BIAS_EPILOGUE = 4  # as in csrc/linear/cublaslt.h
FORMATS = {False: torch.float8_e4m3fn, True: torch.float8_e5m2}  # by `e5m2`


@pytest.fixture(scope="module")
def fp8():
    return Model(build.load(build.KERNELS / "fp8.cpp"))


def aligned(values: torch.Tensor) -> torch.Tensor:
    """A copy that begins at a multiple of 16 bytes."""
    memory = torch.empty(values.numel() + 16, dtype=values.dtype)
    first = -(memory.data_ptr() // memory.element_size()) % 16
    return memory[first : first + values.numel()].view(values.shape).copy_(values)


@pytest.mark.parametrize("e5m2", FORMATS)
def test_conversion_is_that_of_pytorch(fp8, e5m2):
    """All upper halves of a float32, with lower halves on both sides of a tie."""
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    x = torch.cat([upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(
        torch.float32
    )
    got = torch.empty(len(x), dtype=torch.uint8)
    fp8.call("fp8_convert", x, len(x), e5m2, got)
    got = got.view(FORMATS[e5m2])
    largest = torch.finfo(FORMATS[e5m2]).max
    want = x.clamp(-largest, largest).to(FORMATS[e5m2])
    nan = x.isnan()
    assert got[nan].float().isnan().all()
    assert torch.equal(got[~nan].view(torch.uint8), want[~nan].view(torch.uint8))


def quantize(model, x, e5m2, transpose=True):
    rows, columns = x.shape
    padded = (rows + 15) // 16 * 16
    count = ctypes.c_int64()
    model.call("fp8_partials", DTYPES[x.dtype], rows, columns, ctypes.byref(count))
    x = aligned(x)
    q = aligned(torch.full((rows, columns), 0x55, dtype=torch.uint8))
    kept = aligned(torch.full((columns, padded), 0x55, dtype=torch.uint8)) if transpose else None
    scale, partials = torch.full((1,), torch.nan), torch.full((count.value,), torch.nan)
    model.clear()
    model.register(x, writable=False)
    for tensor in (q, kept, scale, partials):
        if tensor is not None:
            model.register(tensor)
    model.call("fp8_quantize", DTYPES[x.dtype], e5m2, rows, columns, x, q, kept, scale, partials)
    dtype = FORMATS[e5m2]
    return q.view(dtype), None if kept is None else kept.view(dtype), scale


# One row; a tile and a bit; several tiles for a block.
SHAPES = [(1, 16), (66, 80), (200, 144)]


@pytest.mark.parametrize("e5m2", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantisation(fp8, shape, dtype, e5m2):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(derived(1))) * 3).to(dtype)
    want, want_kept, want_scale = quantize_fp8(x, e5m2)
    largest = x.float().abs().max()
    assert (want_scale * torch.finfo(FORMATS[e5m2]).max - largest).abs() <= 2**-22 * largest
    for number, policy in enumerate(POLICIES):
        fp8.configure(policy, seed=3)
        fp8.set_device(multiprocessors=1 + number)
        q, kept, scale = quantize(fp8, x, e5m2)
        assert torch.equal(scale[0], want_scale)
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(kept.view(torch.uint8), want_kept.view(torch.uint8))
    q, kept, _ = quantize(fp8, x, e5m2, transpose=False)
    assert kept is None
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("value", [0.0, 1e-44, torch.inf, -torch.inf, torch.nan])
def test_quantisation_of_odd_values(fp8, value):
    fp8.configure()
    x = torch.zeros(3, 16)
    x[1, 5] = value
    got, want = quantize(fp8, x, False), quantize_fp8(x, False)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float().flatten(), b.float().flatten(), equal_nan=True)
    back = got[0].float() * got[2]
    assert back[1, 5].isfinite() == torch.tensor(value).isfinite()
    assert not torch.isfinite(torch.tensor(value)) or back.count_nonzero() <= 1


def test_every_barrier_is_needed(fp8):
    fp8.set_device(multiprocessors=1)
    x = torch.randn(130, 144)
    sites = assert_every_site_is_needed(fp8, lambda: quantize(fp8, x, False), seeds=range(3))
    assert [site.kind for site in sites] == ["sync_block"] * 3


def quantize_scaled(model, x, e5m2, scale, transpose=True, sum=False):
    rows, columns = x.shape
    x = aligned(x)
    q = aligned(torch.full((rows, columns), 0x55, dtype=torch.uint8))
    padded = (rows + 15) // 16 * 16
    kept = aligned(torch.full((columns, padded), 0x55, dtype=torch.uint8)) if transpose else None
    scale, largest = torch.tensor([scale]), torch.zeros(1024)
    sums = [torch.full((count, columns), torch.nan) for count in (1, (padded + 63) // 64) if sum]
    model.clear()
    for tensor in (x, scale):
        model.register(tensor, writable=False)
    for tensor in (q, kept, largest, *sums):
        if tensor is not None:
            model.register(tensor)
    sums = sums or [None, None]
    model.call(
        "fp8_scaled", DTYPES[x.dtype], e5m2, rows, columns, x, q, kept, scale, largest, *sums
    )
    return q, kept, largest, sums[0]


@pytest.mark.parametrize("e5m2", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rounding_by_a_scale_that_is_given(fp8, shape, dtype, e5m2):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(derived(1))) * 3).to(dtype)
    x[0, 3], x[0, 5], x[0, 7] = torch.inf, torch.nan, 6e4
    scale = 1e-5 if e5m2 else 2e-3  # too small for some
    noted = DelayedScale(torch.tensor(scale), torch.zeros(1024))
    want, want_kept, _ = quantize_by(x, e5m2, True, noted)
    for number, policy in enumerate(POLICIES):
        fp8.configure(policy, seed=3)
        fp8.set_device(multiprocessors=1 + number)
        q, kept, largest, _ = quantize_scaled(fp8, x, e5m2, scale)
        assert_same_numbers(q.view(FORMATS[e5m2]), want)
        assert_same_numbers(kept.view(FORMATS[e5m2]), want_kept)
        assert largest.max() == torch.inf
    q, *_ = quantize_scaled(fp8, x, e5m2, scale, transpose=False)
    assert_same_numbers(q.view(FORMATS[e5m2]), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_columns(fp8, shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(derived(3))).to(dtype)
    bound = x.double().abs().sum(0) * shape[0] * torch.finfo(torch.float32).eps
    for number, policy in enumerate(POLICIES):
        fp8.configure(policy, seed=3)
        fp8.set_device(multiprocessors=1 + number)
        q, kept, largest, sums = quantize_scaled(fp8, x, True, 1e-4, sum=True)
        assert ((sums[0].double() - x.double().sum(0)).abs() <= bound).all()
        want, want_kept, want_largest, _ = quantize_scaled(fp8, x, True, 1e-4)
        assert torch.equal(q, want)
        assert torch.equal(kept, want_kept)
        assert largest.max() == want_largest.max()  # whichever block has noted it


def assert_same_numbers(got, want):
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)


def test_every_barrier_of_a_given_scale_is_needed(fp8):
    fp8.set_device(multiprocessors=1)
    x = torch.randn(260, 144)
    sites = assert_every_site_is_needed(
        fp8, lambda: quantize_scaled(fp8, x, False, 0.01), seeds=range(3)
    )
    assert [site.kind for site in sites] == ["sync_block"] * 3


def test_every_barrier_of_sums_is_needed(fp8):
    """Where the transposed matrix, whose barriers part the tiles too, is not wanted."""
    fp8.set_device(multiprocessors=1)
    x = torch.randn(260, 144)
    run = partial(quantize_scaled, fp8, x, True, 0.01, transpose=False, sum=True)
    sites = assert_every_site_is_needed(fp8, run, seeds=range(3))
    assert [site.kind for site in sites] == ["sync_block"] * 4  # one of them column_sum's


def pointers(tensors):
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def quantize_weights(model, weights):
    weights = [aligned(weight) for weight in weights]
    results = [
        [aligned(torch.full(w.shape, 0x55, dtype=torch.uint8)) for w in weights],
        [aligned(torch.full(w.shape[::-1], 0x55, dtype=torch.uint8)) for w in weights],
        [torch.full((1,), torch.nan) for _ in weights],
    ]
    sizes = [size for weight in weights for size in weight.shape]
    lists = (len(weights), (ctypes.c_int64 * len(sizes))(*sizes), pointers(weights))
    lists += tuple(pointers(tensors) for tensors in results)
    count = ctypes.c_int64()
    model.call("fp8_weights", *lists, None, ctypes.byref(count))
    partials = torch.full((count.value,), torch.nan)
    model.clear()
    for weight in weights:
        model.register(weight, writable=False)
    for tensor in (*itertools.chain(*results), partials):
        model.register(tensor)
    model.call("fp8_weights", *lists, partials, ctypes.byref(count))
    return list(zip(*results, strict=True))


def assert_quantized(weights, results):
    for weight, got in zip(weights, results, strict=True):
        for a, b in zip(got, quantize_fp8(weight, False), strict=True):
            assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def test_a_list_of_weights(fp8):
    """Several tiles and several blocks for a weight; a weight of zeros; values that differ in
    size, so that one's scale is not another's."""
    generator = torch.Generator().manual_seed(derived(4))
    shapes = [(16, 16), (80, 144), (128, 400), (48, 16)]
    weights = [torch.randn(shape, generator=generator) * 10**i for i, shape in enumerate(shapes)]
    weights.append(torch.zeros(32, 16))
    for policy in POLICIES:
        fp8.configure(policy, seed=3)
        assert_quantized(weights, quantize_weights(fp8, weights))


def test_more_weights_than_a_launch_takes(fp8):
    fp8.configure()
    weights = [torch.full((16, 16), float(i)) for i in range(1, 67)]
    weights[63] = torch.randn(128, 256)  # two blocks
    assert_quantized(weights, quantize_weights(fp8, weights))


def test_every_barrier_of_a_list_is_needed(fp8):
    weights = [torch.randn(130, 144).abs().repeat(1, 3)[:128] for _ in range(2)]
    run = partial(quantize_weights, fp8, weights)
    sites = assert_every_site_is_needed(fp8, run, seeds=range(3))
    assert [site.kind for site in sites] == ["sync_block"] * 3


@pytest.mark.parametrize("sum_over_tokens", [False, True])
@pytest.mark.parametrize("b_e5m2", [False, True])
def test_product(fp8, b_e5m2, sum_over_tokens):
    generator = torch.Generator().manual_seed(derived(2))
    a, b = (torch.randn(s, generator=generator) for s in ((32, 48), (21, 48)))
    qa, _, a_scale = quantize_fp8(a, False)
    qb, _, b_scale = quantize_fp8(b, b_e5m2)
    bias = torch.randn(32, generator=generator).bfloat16()
    want = (qb.double() * b_scale.double()) @ (qa.double() * a_scale.double()).T
    choices = itertools.product(("bias", "add", ""), (torch.bfloat16, torch.float32), (0, 1))
    for addend, out_dtype, refused in choices:
        fp8.call("refuse_epilogue", BIAS_EPILOGUE * refused)
        before = torch.randn(21, 32, generator=generator).to(out_dtype)
        out = before.clone() if addend == "add" else torch.full_like(before, torch.nan)
        fp8.clear()
        for tensor in (qa, qb, bias):
            fp8.register(tensor, writable=False)
        fp8.register(out)
        fp8.call(
            "fp8_product",
            *(False, b_e5m2, 32, 21, 48, sum_over_tokens, qa, qb, a_scale, b_scale),
            *(bias if addend == "bias" else None, out, DTYPES[out_dtype], addend == "add"),
        )
        exact = want + {"bias": bias, "add": before, "": torch.zeros(1)}[addend].double()
        tolerance = 2 * torch.finfo(out_dtype).eps
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    fp8.call("refuse_epilogue", 0)
