"""GELU that writes 8 bits, forward and backward, on the model of a block."""

from __future__ import annotations

import pytest
import torch

from bert_unpad.ops.delayed_scaling import DelayedScale
from bert_unpad.ops.gelu_fp8 import bias_gelu_fp8, bias_gelu_fp8_backward  # on a CPU: by PyTorch
from gpu_model import build
from gpu_model.block_model import POLICIES, Model
from tests.gpu_model.test_fp8 import aligned
from tests.support.model_checks import DTYPES, assert_every_site_is_needed
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
SCALES = {False: 0.02, True: 1e-4}  # by whether it is a gradient


@pytest.fixture(scope="module")
def gelu():
    return Model(build.load(build.KERNELS / "gelu_fp8.cpp"))


def run(model, x, bias, dy, tanh, transpose=True, largest=None):
    """What the operator gives, in the same order, and before it the largest value."""
    (rows, columns), gradient = x.shape, dy is not None
    x, dy = aligned(x), aligned(dy) if gradient else None
    dtype = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
    q = aligned(torch.full((rows, columns), 0x55, dtype=torch.uint8))
    padded = -(-rows // 16) * 16
    kept = aligned(torch.full((columns, padded), 0x55, dtype=torch.uint8)) if transpose else None
    scale, noted = torch.tensor([SCALES[gradient]]), torch.zeros(1024)
    noted[0] = largest or 0.0
    dbias = torch.full_like(bias, torch.nan) if gradient and bias is not None else None
    partials = torch.full((-(-rows // 64), columns), torch.nan)
    model.clear()
    for tensor in (x, dy, bias, scale):
        if tensor is not None:
            model.register(tensor, writable=False)
    for tensor in (q, kept, noted, dbias, partials):
        if tensor is not None:
            model.register(tensor)
    kinds = (DTYPES[x.dtype], DTYPES[x.dtype if bias is None else bias.dtype])
    model.call(
        *("gelu_fp8", *kinds, rows, columns, tanh, x, bias, dy, scale, q, kept, noted),
        *(dbias, partials),
    )
    kept = None if kept is None else kept.view(dtype)
    return noted.max(), q.view(dtype), kept, dbias


def reference(x, bias, dy, tanh):
    noted = DelayedScale(torch.tensor(SCALES[dy is not None]), torch.zeros(1024))
    if dy is None:
        q, _ = bias_gelu_fp8(x, bias, tanh, noted)
        return noted.largest.max(), q, None
    q, _, dbias = bias_gelu_fp8_backward(dy, x, bias, tanh, noted)
    return noted.largest.max(), q, dbias


def assert_close(got, want):
    """Equal but where another last bit before rounding rounds to the next of the 8-bit numbers, or
    where GELU's derivative is near 0."""
    a, b = got.float(), want.float()
    error = 1e-6 / SCALES[got.dtype == torch.float8_e5m2]
    torch.testing.assert_close(a, b, rtol=torch.finfo(got.dtype).eps, atol=error)
    assert (a != b).float().mean() < 0.01


# One row; a tile and a bit; several tiles for a block.
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (66, 80), (200, 144)])
def test_kernels(gelu, shape, dtype, tanh, gradient):
    generator = torch.Generator().manual_seed(derived(1))
    x, dy = (torch.randn(shape, generator=generator).mul(2).to(dtype) for _ in range(2))
    bias = torch.randn(shape[1], generator=generator)
    dy = dy if gradient else None
    want_largest, want, want_dbias = reference(x, bias, dy, tanh)
    results = []
    for number, policy in enumerate(POLICIES):
        gelu.configure(policy, seed=3)
        gelu.set_device(multiprocessors=1 + number)
        largest, q, kept, dbias = run(gelu, x, bias, dy, tanh)
        torch.testing.assert_close(largest, want_largest, rtol=1e-5, atol=0)
        assert_close(q, want)
        rows = shape[0]
        assert torch.equal(kept[:, :rows].float(), q.float().T)
        assert not kept[:, rows:].float().any()
        if gradient:
            torch.testing.assert_close(dbias, want_dbias, rtol=1e-4, atol=1e-4)
        results.append(torch.cat([q.float().flatten(), *([dbias] if gradient else [])]))
    assert all(torch.equal(result, results[0]) for result in results)
    _, q, kept, dbias = run(gelu, x, None, dy, tanh, transpose=False)
    assert kept is dbias is None
    assert_close(q, reference(x, None, dy, tanh)[1])


def test_the_largest_value_is_kept(gelu):
    gelu.configure()
    x = torch.randn(20, 32)
    assert run(gelu, x, None, None, False, largest=50.0)[0] == 50
    assert run(gelu, x, None, None, False, largest=1e-3)[0] > 1e-3


def test_values_that_are_too_large_or_not_finite(gelu):
    gelu.configure()
    x = torch.full((3, 16), 1e4)
    x[0, 3], x[1, 4] = torch.inf, torch.nan
    largest, q, _, _ = run(gelu, x, None, None, False)
    assert largest == torch.inf
    odd = ~x.isfinite()
    assert q.float()[odd].isnan().all()
    assert (q.float()[~odd] == 448).all()


def test_every_barrier_is_needed(gelu):
    gelu.set_device(multiprocessors=1)
    x, bias = torch.randn(300, 144), torch.randn(144)

    def both():
        run(gelu, x, bias, None, False)
        run(gelu, x, bias, x, False, transpose=False)

    sites = assert_every_site_is_needed(gelu, both, seeds=range(3))
    assert {site.kind for site in sites} == {"sync_block"}
