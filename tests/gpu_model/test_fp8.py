"""Rounding to 8 bits on the model of a block (the conversion, barriers), and 8-bit products on a
model of cuBLASLt that refuses epilogues. Values are in tests/ops, for every backend."""

import itertools

import pytest
import torch
from torch import Tensor

from bert_unpad.ops.fp8 import quantize_fp8  # on a CPU: by PyTorch
from tests.support import model_fp8
from tests.support.model_checks import assert_every_site_is_needed
from tests.support.seeds import derived

BIAS_EPILOGUE = 4  # as in csrc/linear/cublaslt.h
FORMATS = {False: torch.float8_e4m3fn, True: torch.float8_e5m2}  # by `e5m2`


@pytest.fixture(autouse=True)
def fp8():
    kernels = model_fp8.model()
    kernels.set_device(multiprocessors=1)
    return kernels


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


def test_every_barrier_is_needed(fp8):
    x = torch.randn(130, 144)
    run = lambda: model_fp8.quantize_fp8(x, False, True)  # noqa: E731
    sites = assert_every_site_is_needed(fp8, run, seeds=range(3))
    assert [site.kind for site in sites] == ["sync_block"] * 3


def scaled(x: Tensor, e5m2: bool, transpose: bool, sum: bool) -> None:
    given = (torch.tensor(0.01), torch.zeros(1024))
    model_fp8.quantize_fp8_scaled(x, e5m2, transpose, *given, sum)


def test_every_barrier_of_a_given_scale_is_needed(fp8):
    x = torch.randn(260, 144)
    run = lambda: scaled(x, False, True, False)  # noqa: E731
    sites = assert_every_site_is_needed(fp8, run, seeds=range(3))
    assert [site.kind for site in sites] == ["sync_block"] * 3


def test_every_barrier_of_sums_is_needed(fp8):
    """Where the transposed matrix, whose barriers part the tiles too, is not wanted."""
    x = torch.randn(260, 144)
    run = lambda: scaled(x, True, False, True)  # noqa: E731
    sites = assert_every_site_is_needed(fp8, run, seeds=range(3))
    assert [site.kind for site in sites] == ["sync_block"] * 4  # one of them column_sum's


def test_every_barrier_of_a_list_is_needed(fp8):
    weights = [torch.randn(128, 144).abs().repeat(1, 3) for _ in range(2)]
    results = [quantize_fp8(weight, False) for weight in weights]
    kept = [list(tensors) for tensors in zip(*results, strict=True)]
    run = lambda: model_fp8.quantize_weights_fp8_(weights, *kept)  # noqa: E731
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
        out = before.clone()
        operands = (qa, qb, a_scale, b_scale)
        if addend == "add":
            model_fp8.product(*operands, None, sum_over_tokens, out, True)
        else:
            given = bias if addend == "bias" else None
            out = model_fp8.fp8_product(*operands, given, out_dtype, sum_over_tokens)
        exact = want + {"bias": bias, "add": before, "": torch.zeros(1)}[addend].double()
        tolerance = 2 * torch.finfo(out_dtype).eps
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    fp8.call("refuse_epilogue", 0)
