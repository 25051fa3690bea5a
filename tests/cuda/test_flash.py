"""PyTorch's `varlen_attn` on a GPU: by our kernels for what they compute, else by PyTorch's."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import attention

from bert_unpad import flash
from tests.flash.test_functions import by_sequence, draw, leaves, starts
from tests.support.cuda_checks import DTYPES, GPU_ONLY

varlen = pytest.importorskip("torch.nn.attention.varlen")
pytestmark = GPU_ONLY
LENGTHS = [300, 64, 1, 129]
CROSS = [70, 200, 5, 128]
BOUND = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}  # relative error


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    flash.register()
    attention.activate_flash_attention_impl("bert_unpad")
    yield
    attention.restore_flash_attention_impl()


def agrees(got: Tensor, want: Tensor) -> None:
    assert (got.double() - want).norm() <= BOUND[got.dtype] * want.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 20)])
@pytest.mark.parametrize("keys", [LENGTHS, CROSS], ids=["self", "cross"])
def test_agrees_with_the_formula(
    keys: list[int], window: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    queries = LENGTHS
    q, k = ((sum(lengths), 4, head_dim) for lengths in (queries, keys))
    *tensors, dout = (x.cuda() for x in draw(q, k, k, q, dtype=dtype))
    cu_q = starts(queries).cuda()
    cu_k = cu_q if keys is queries else starts(keys).cuda()
    ours, theirs = leaves(tensors), leaves([x.double() for x in tensors])

    out = varlen.varlen_attn(*ours, cu_q, cu_k, max(queries), max(keys), window_size=list(window))
    want, _ = by_sequence([x.cpu() for x in theirs], queries, keys, False, window, None)
    agrees(out.cpu(), want)
    out.backward(dout)
    want.backward(dout.double().cpu())
    for a, b in zip(ours, theirs, strict=True):
        agrees(a.grad.cpu(), b.grad.cpu())


def test_pytorch_computes_what_we_do_not() -> None:
    """Other head dimensions; and scaled dot products of batches that are not packed."""
    shape = (sum(LENGTHS), 4, 80)
    *tensors, dout = (x.cuda() for x in draw(*[shape] * 4, dtype=torch.bfloat16))
    cu = starts(LENGTHS).cuda()
    ours, theirs = leaves(tensors), leaves([x.double() for x in tensors])

    out = varlen.varlen_attn(*ours, cu, cu, max(LENGTHS), max(LENGTHS))
    want, _ = by_sequence([x.cpu() for x in theirs], LENGTHS, LENGTHS, False, (-1, -1), None)
    agrees(out.cpu(), want)
    out.backward(dout)
    want.backward(dout.double().cpu())
    for a, b in zip(ours, theirs, strict=True):
        agrees(a.grad.cpu(), b.grad.cpu())

    dense = leaves([x.cuda() for x in draw(*[(2, 4, 64, 64)] * 3, dtype=torch.bfloat16)])
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        got = torch.nn.functional.scaled_dot_product_attention(*dense)
        got.sum().backward()
    attention.restore_flash_attention_impl()
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        assert torch.equal(got, torch.nn.functional.scaled_dot_product_attention(*dense))
    attention.activate_flash_attention_impl("bert_unpad")


@pytest.mark.parametrize(("head_dim", "ours"), [(64, True), (80, False)])
def test_whose_kernels_compute(head_dim: int, ours: bool) -> None:
    q, k, v = (x.cuda() for x in draw(*[(sum(LENGTHS), 4, head_dim)] * 3, dtype=torch.bfloat16))
    cu = starts(LENGTHS).cuda()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        varlen.varlen_attn(q, k, v, cu, cu, max(LENGTHS), max(LENGTHS))
        torch.cuda.synchronize()
    assert any("bert_unpad" in event.name for event in profile.events()) == ours
