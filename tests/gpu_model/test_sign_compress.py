"""The CUDA kernels of the sign_* operators, run on the model of a block."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from gpu_model import build
from gpu_model.block_model import POLICIES, Model
from tests.support.model_checks import DTYPES, assert_every_site_is_needed
from tests.support.seeds import derived
from tests.support.signs import pack, rms, signs

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
# Nothing; less than a warp takes; a warp and a bit; more than a device of one multiprocessor takes
# at once, which is 8192.
SIZES = [0, 5, 300, 10_001]
KINDS = [*DTYPES, None]


@pytest.fixture(scope="module")
def model():
    return Model(build.load(build.KERNELS / "sign_compress.cpp"))


def draw(size: int, dtype: torch.dtype | None, shift: int = 0) -> tuple[Tensor | None, Tensor]:
    """Value and error; with a shift their addresses are no multiples of 16."""
    generator = torch.Generator().manual_seed(derived(size))
    error = torch.randn(size + shift, generator=generator)[shift:]
    value = torch.randn(size + shift, generator=generator)[shift:]
    return None if dtype is None else value.to(dtype), error


def scale_of(model: Model, value: Tensor | None, error: Tensor) -> Tensor:
    model.clear()
    blocks = ctypes.c_int64()
    model.call("sign_blocks", error.numel(), ctypes.byref(blocks))
    scale, partials = torch.full((1,), math.nan), torch.full((blocks.value,), math.nan)
    for tensor in (value, error):
        if tensor is not None and tensor.numel():
            model.register(tensor, writable=False)
    model.register(scale)
    model.register(partials)
    kind = DTYPES[torch.float32 if value is None else value.dtype]
    model.call("sign_scale", kind, error.numel(), value, error, scale, partials)
    return scale


def pack_(model: Model, value: Tensor | None, error: Tensor, scale: Tensor, guard=None) -> Tensor:
    model.clear()
    bits = torch.full((-(-error.numel() // 8),), 255, dtype=torch.uint8)
    for tensor in (value, scale, guard):
        if tensor is not None and tensor.numel():
            model.register(tensor, writable=False)
    for tensor in (error, bits):
        if tensor.numel():
            model.register(tensor)
    kind = DTYPES[torch.float32 if value is None else value.dtype]
    model.call("sign_pack", kind, error.numel(), value, error, bits, scale, guard)
    return bits


def mean(model, bits, scales, out, factor, add=False, follow=False, guard=None) -> None:
    model.clear()
    for tensor in (bits, scales, guard):
        if tensor is not None:
            model.register(tensor, writable=False)
    if out.numel():
        model.register(out)
    model.call(
        *("sign_mean", bits, *bits.shape, out.numel(), scales, out, factor, add, follow, guard)
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", KINDS)
def test_scale_bits_and_error(model, dtype, size):
    for shift in (0, 1):
        results = []
        for policy in POLICIES:
            model.configure(policy, seed=2)
            model.set_device(multiprocessors=1)
            value, error = draw(size, dtype, shift)
            before = error.clone()
            scale = scale_of(model, value, error)
            whole = before if value is None else value.float() + before
            assert float(scale) == pytest.approx(float(rms(whole)), rel=1e-5)
            bits = pack_(model, value, error, scale)
            want_bits, want_error = pack(value, before, scale[0])
            assert torch.equal(bits, want_bits)
            assert torch.equal(error, want_error)
            results.append(scale)
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("multiprocessors", [1, 4])
def test_grids_of_any_size_agree(model, multiprocessors):
    model.configure("uniform", seed=1)
    model.set_device(multiprocessors=multiprocessors)
    value, error = draw(40_001, torch.float32)
    whole = value + error
    assert float(scale_of(model, value, error)) == pytest.approx(float(rms(whole)), rel=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_mean(model, size, rows):
    model.configure("uniform", seed=3)
    model.set_device(multiprocessors=1)
    generator = torch.Generator().manual_seed(derived(size))
    shape = (rows, -(-size // 8) + 1)
    bits = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, generator=generator)
    want = torch.zeros(size)
    for row, scale in zip(signs(bits), scales * torch.tensor(0.3), strict=True):
        want = want + row[:size] * scale
    for shift in (0, 1):
        start = torch.randn(size + shift, generator=generator)[shift:]
        for add in (False, True):
            out = start.clone() if shift == 0 else torch.cat([start[:1], start])[1:]
            mean(model, bits, scales, out, 0.3, add)
            assert torch.equal(out, start + want if add else want)


@pytest.mark.parametrize("size", [3 * 8 * 130, 3 * 8 * 130 - 9, 7])
def test_parts_follow_each_other(model, size):
    model.configure()
    model.set_device(multiprocessors=1)
    bits, scales = torch.randint(256, (3, 130), dtype=torch.uint8), torch.rand(3)
    out = torch.full((size,), math.nan)
    mean(model, bits, scales, out, 1.0, follow=True)
    assert torch.equal(out, (signs(bits) * scales[:, None]).flatten()[:size])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_where_the_guard_is_not_finite_nothing_changes(model, bad):
    model.configure()
    guard, scale = torch.tensor([bad]), torch.ones(1)
    value, error = draw(300, torch.float32)
    before = error.clone()
    bits = pack_(model, value, error, scale, guard)
    assert torch.equal(error, before)
    assert (bits == 255).all()
    mean(model, bits[None], scale, error, 1.0, guard=guard)
    assert torch.equal(error, before)
    mean(model, bits[None], scale, error, 1.0, guard=torch.ones(1))
    assert torch.equal(error, torch.full((300,), -1.0))


def test_every_barrier_is_needed(model):
    model.set_device()
    value, error = draw(3000, torch.float32)
    sites = assert_every_site_is_needed(
        model, lambda: scale_of(model, value, error), seeds=range(3)
    )
    assert [site.kind for site in sites] == ["sync_block"]  # that of sum_over_y, in both kernels
