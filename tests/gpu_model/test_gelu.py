"""The CUDA kernels of bias_gelu, run on the model of a block."""

import ctypes

import pytest
import torch
import torch.nn.functional as F

from gpu_model import build
from gpu_model.block_model import POLICIES, Model
from tests.support.model_checks import DTYPES, assert_every_site_is_needed
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def gelu():
    return Model(build.load(build.KERNELS / "gelu.cpp"))


def run_gelu(model, dtype, bias_dtype, shape, tanh, seed=0):
    """x, dy, bias and the kernels' y, dx, dbias."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(derived(seed))
    x, dy = (torch.randn(shape, generator=generator).mul(2).to(dtype) for _ in range(2))
    bias = torch.randn(columns, generator=generator).to(bias_dtype)
    y, dx = (torch.full_like(x, torch.nan) for _ in range(2))
    dbias = torch.full_like(bias, torch.nan)
    model.clear()
    for tensor in (x, dy, bias):
        model.register(tensor, writable=False)
    for tensor in (y, dx, dbias):
        model.register(tensor)
    scratch = (ctypes.c_int64 * 2)()
    model.call("gelu_scratch", DTYPES[dtype], rows, columns, x, dy, dx, scratch)
    partials = model.register(torch.full((scratch[0], columns), torch.nan))
    tickets = model.register(torch.zeros(scratch[1], dtype=torch.int32))
    common = (DTYPES[dtype], DTYPES[bias_dtype], rows, columns, tanh, x, bias)
    model.call("gelu_forward", *common, y)
    model.call("gelu_backward", *common, dy, dx, dbias, partials, tickets)
    assert not tickets.any()
    return x, dy, bias, y, dx, dbias


# Narrow, with several rows in a block; wide; not a multiple of a 16-byte vector; nothing.
SHAPES = [(37, 24), (3, 1040), (19, 13), (0, 24)]


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_gelu_kernels(gelu, shape, dtype, tanh):
    for bias_dtype in {dtype, torch.float32}:
        results = []
        for policy in POLICIES:
            gelu.configure(policy, seed=2)
            gelu.set_device(multiprocessors=1 + POLICIES.index(policy))
            x, dy, bias, y, dx, dbias = run_gelu(gelu, dtype, bias_dtype, shape, tanh)
            u, b = (t.double().requires_grad_() for t in (x, bias))
            want = F.gelu(u + b, approximate="tanh" if tanh else "none")
            want.backward(dy.double())
            # One rounding of results of up to 10.
            close = {"rtol": 1e-5 + torch.finfo(dtype).eps / 2, "atol": 1e-5}
            for got, exact in ((y, want.detach()), (dx, u.grad)):
                torch.testing.assert_close(got.double(), exact, **close)
            rtol = 1e-5 + torch.finfo(bias_dtype).eps / 2
            torch.testing.assert_close(dbias.double(), b.grad, rtol=rtol, atol=1e-4)
            results.append(torch.cat([y, dx]))
        assert all(torch.equal(result, results[0]) for result in results)


def test_sums_over_many_blocks(gelu):
    """More than are added up at once."""
    gelu.set_device(multiprocessors=7)
    results = []
    for policy in POLICIES:
        gelu.configure(policy, seed=3)
        x, dy, bias, _, _, dbias = run_gelu(gelu, torch.float32, torch.float32, (5000, 4), True)
        u, b = (t.double().requires_grad_() for t in (x, bias))
        F.gelu(u + b, approximate="tanh").backward(dy.double())
        torch.testing.assert_close(dbias.double(), b.grad, rtol=1e-5, atol=1e-4)
        results.append(dbias)
    assert all(torch.equal(result, results[0]) for result in results)


def test_scratch_memory_of_a_large_layer(gelu):
    """The counts of docs/development/column-sums.md."""
    gelu.set_device(multiprocessors=132)
    sizes = (ctypes.c_int64 * 2)()
    gelu.call("gelu_scratch", DTYPES[torch.bfloat16], 12288, 4096, None, None, None, sizes)
    assert list(sizes) == [24, 32 * 2]


def test_every_barrier_of_bias_gelu_is_needed(gelu):
    gelu.set_device()
    arguments = (torch.bfloat16, torch.float32, (37, 24), False)
    sites = assert_every_site_is_needed(gelu, lambda: run_gelu(gelu, *arguments), seeds=range(5))
    assert [site.kind for site in sites] == ["sync_block"] * 3
