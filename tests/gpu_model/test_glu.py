"""The CUDA kernels of gated linear units, run on the model of a block."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from gpu_model.block_model import POLICIES
from gpu_model.build import compiler
from tests.support import reference
from tests.support.model_checks import DTYPES, assert_every_site_is_needed, load_kernels
from tests.support.model_norm import Buffers
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

KINDS = list(reference.GATES)


class GluCudaParams(ctypes.Structure):
    """Of csrc/gelu/glu_cuda.h."""

    _fields_ = (
        ("dtype", ctypes.c_int),
        ("bias_dtype", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("kind", "rows", "width")),
        *((name, ctypes.c_void_p) for name in ("x", "bias", "dy", "y", "dx", "dbias", "partials")),
        ("tickets", ctypes.c_void_p),
    )


@pytest.fixture(scope="module")
def kernels():
    return load_kernels("glu", "glu_params_size", GluCudaParams)


def run_glu(kernels, x: Tensor, bias: Tensor | None, dy: Tensor, kind: str) -> list[Tensor]:
    """y, dx and, with a bias, dbias."""
    buffers = Buffers(kernels)
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    dbias = None if bias is None else torch.empty_like(bias)
    params = GluCudaParams(
        DTYPES[x.dtype], 0 if bias is None else DTYPES[bias.dtype], KINDS.index(kind), *dy.shape,
        *(buffers.read(t) for t in (x, bias, dy)), *(buffers.write(t) for t in (y, dx, dbias)),
    )  # fmt: skip
    kernels.call("glu_forward", ctypes.byref(params))
    scratch = (ctypes.c_int64 * 2)()
    if bias is not None:
        kernels.call("glu_scratch", ctypes.byref(params), scratch)
    rows, tickets = scratch
    if bias is not None:
        params.partials = buffers.write(torch.empty(rows, x.shape[1]))
    with buffers.tickets(tickets) as params.tickets:
        kernels.call("glu_backward", ctypes.byref(params))
    return [t for t in (y, dx, dbias) if t is not None]


def draw(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, bias and the gradient of y."""
    torch.manual_seed(derived(width))
    x, dy = (2 * torch.randn(rows, 2 * width)).to(dtype), torch.randn(rows, width).to(dtype)
    return x, torch.randn(2 * width), dy


# Narrow, with several rows in a block; wide; not a multiple of a 16-byte vector; nothing.
SHAPES = [(37, 24), (3, 1040), (19, 13), (0, 24), (5, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_the_reference(kernels, shape, dtype, kind):
    x, bias, dy = draw(*shape, dtype)
    for given in (None, bias, bias.to(dtype)):
        wide = [None if t is None else t.double().requires_grad_() for t in (x, given)]
        want = reference.glu(wide[0], kind, wide[1])
        want.backward(dy.double())
        wanted = [want.detach(), *(t.grad for t in wide if t is not None)]
        runs = []
        for policy in POLICIES:
            kernels.configure(policy, seed=2)
            kernels.set_device(multiprocessors=1 + POLICIES.index(policy))
            runs.append(run_glu(kernels, x, given, dy, kind))
        for got, exact in zip(runs[0], wanted, strict=True):
            rtol = 1e-5 + torch.finfo(got.dtype).eps / 2
            torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=1e-4)
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(run[:2], runs[0][:2], strict=True))


def test_sums_over_many_blocks(kernels):
    """More than are added up at once."""
    x, bias, dy = draw(5000, 4, torch.float32)
    wide = [t.double().requires_grad_() for t in (x, bias)]
    reference.glu(wide[0], "silu", wide[1]).backward(dy.double())
    kernels.set_device(multiprocessors=7)
    results = []
    for policy in POLICIES:
        kernels.configure(policy, seed=3)
        results.append(run_glu(kernels, x, bias, dy, "silu")[2])
        torch.testing.assert_close(results[-1].double(), wide[1].grad, rtol=1e-5, atol=1e-3)
    assert all(torch.equal(result, results[0]) for result in results)


def test_addresses_that_do_not_allow_vector_loads(kernels):
    x, bias, dy = draw(5, 16, torch.bfloat16)
    want = run_glu(kernels, x, bias, dy, "silu")
    shifted = torch.empty(5 * 32 + 1, dtype=torch.bfloat16)[1:].view(5, 32).copy_(x)
    assert shifted.data_ptr() % 16 != 0
    for got, exact in zip(run_glu(kernels, shifted, bias, dy, "silu"), want, strict=True):
        torch.testing.assert_close(got, exact)


def test_every_barrier_is_needed(kernels):
    kernels.set_device()
    x, bias, dy = draw(37, 24, torch.bfloat16)
    sites = assert_every_site_is_needed(
        kernels, lambda: run_glu(kernels, x, bias, dy, "gelu"), seeds=range(5)
    )
    assert [site.kind for site in sites] == ["sync_block"] * 3
