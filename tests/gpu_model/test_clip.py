"""The CUDA kernels of clip_bucket_, run on the model of a block."""

import ctypes
import math

import pytest
import torch

from gpu_model import build
from gpu_model.block_model import POLICIES, Model
from tests.support.model_checks import DTYPES, assert_every_site_is_needed
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
F32, BF16, F16 = DTYPES
# Bucket, wire, with a residual.
CASES = [
    *((dtype, dtype, False) for dtype in DTYPES),
    *((F32, BF16, False), (F32, F16, False), (BF16, F32, False), (F16, F32, False)),
    *((F32, BF16, True), (F32, F16, True)),
]


@pytest.fixture(scope="module")
def model():
    return Model(build.load(build.KERNELS / "clip.cpp"))


def run(model, case, size, share, *, factor=0.5, shift=0, poison=None):
    """bucket + residual in fp64 before; norm, result and residual after.

    The bound is `share` of the norm; with a `shift` addresses are no multiples of 16."""
    dtype, wire, with_residual = case
    generator = torch.Generator().manual_seed(derived(size))
    bucket = torch.randn(size + shift, generator=generator).to(dtype)[shift:]
    if poison is not None:
        bucket[size // 2] = poison
    residual = 0.01 * torch.randn(size, generator=generator) if with_residual else None
    u = bucket.double() if residual is None else (bucket + residual).double()
    bound = torch.tensor([share]) if math.isfinite(share) else None
    max_norm = math.inf if bound is None else float(u.norm())
    out = bucket if wire == dtype else torch.full((size,), torch.nan, dtype=wire)
    norm = torch.full((1,), torch.nan)
    model.clear()
    model.register(bucket, writable=out is bucket)
    for tensor in (residual, norm):
        if tensor is not None:
            model.register(tensor)
    if out is not bucket:
        model.register(out)
    if bound is not None:
        model.register(bound, writable=False)
    common = (DTYPES[dtype], DTYPES[wire], size, bucket, out, residual)
    blocks = ctypes.c_int64()
    model.call("clip_blocks", *common, ctypes.byref(blocks))
    partials = model.register(torch.full((blocks.value,), torch.nan))
    model.call("clip_bucket", *common, bound, max_norm, factor, partials, norm)
    return u, norm, out, residual


# Nothing; less than a vector; vectors and single elements; several blocks, of which each passes its
# loop more than once on a small device.
SIZES = [0, 3, 1029, 20_005]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_values(model, size, case):
    wire = case[1]
    for share, shift in ((0.3, 0), (2.0, 1)):
        results = []
        for policy in POLICIES:
            model.configure(policy, seed=2)
            model.set_device(multiprocessors=1)
            u, norm, out, residual = run(model, case, size, share, shift=shift)
            exact = u * min(1.0, share) * 0.5
            assert float(norm) == pytest.approx(float(u.norm()), rel=1e-5)
            rtol = 1e-5 + torch.finfo(wire).eps / 2
            torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=1e-7)
            if residual is not None:
                total = out.double() + 0.5 * residual.double()
                torch.testing.assert_close(total, exact, rtol=1e-5, atol=1e-9)
            results.append(torch.cat([out.float(), norm]))
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("multiprocessors", [1, 4])
def test_grids_of_any_size_agree(model, multiprocessors):
    model.configure("uniform", seed=1)
    model.set_device(multiprocessors=multiprocessors)
    u, norm, out, _ = run(model, (F32, F32, False), 20_005, 0.3)
    torch.testing.assert_close(out.double(), u * 0.15, rtol=1e-5, atol=0)
    assert float(norm) == pytest.approx(float(u.norm()), rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("case", [(F32, F32, False), (F16, F16, False), (F32, BF16, True)])
def test_what_is_not_finite_spreads_over_the_bucket(model, case, value):
    model.set_device()
    model.configure()
    _, norm, out, residual = run(model, case, 5000, math.inf, poison=value)
    assert not norm.isfinite().any()
    assert out.isnan().all()
    if residual is not None:
        assert residual.isfinite().all()


def test_what_is_within_the_bound_keeps_its_bits(model):
    model.set_device()
    model.configure()
    u, _, out, _ = run(model, (F32, F32, False), 5000, math.inf, factor=1.0)
    assert torch.equal(out.double(), u)


def test_every_barrier_is_needed(model):
    model.set_device()
    arguments = ((F32, BF16, False), 1029, 0.3)
    sites = assert_every_site_is_needed(model, lambda: run(model, *arguments), seeds=range(3))
    assert [site.kind for site in sites] == ["sync_block", "sync_block"]
