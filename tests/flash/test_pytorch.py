"""`varlen_attn` of PyTorch on a CPU, by our operators."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn

from bert_unpad import flash
from tests.flash.test_functions import LENGTHS_K, agrees, by_sequence, draw, leaves, starts


@pytest.fixture(autouse=True)
def active() -> Iterator[None]:
    flash.register()
    attention.activate_flash_attention_impl("bert_unpad")
    yield
    attention.restore_flash_attention_impl()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 3)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_agrees_with_the_formula(kv_heads: int, window: tuple[int, int], dtype) -> None:
    tokens, cu = sum(LENGTHS_K), starts(LENGTHS_K)
    shapes = [(tokens, 4, 16), (tokens, kv_heads, 16), (tokens, kv_heads, 16), (tokens, 4, 16)]
    *tensors, dout = draw(*shapes, dtype=dtype)
    ours, theirs = leaves(tensors), leaves([x.double() for x in tensors])
    more = {"enable_gqa": True} if kv_heads < 4 else {}
    out = varlen_attn(*ours, cu, cu, max(LENGTHS_K), max(LENGTHS_K), window_size=window, **more)
    want, _ = by_sequence(theirs, LENGTHS_K, LENGTHS_K, False, window, None)
    agrees(out, want, dtype)
    out.backward(dout)
    want.backward(dout.double())
    for a, b in zip(ours, theirs, strict=True):
        agrees(a.grad, b.grad, dtype)


def test_compiles() -> None:
    tokens, cu = sum(LENGTHS_K), starts(LENGTHS_K)
    tensors = draw(*[(tokens, 4, 16)] * 3)

    def attend(q, k, v):
        return varlen_attn(q, k, v, cu, cu, max(LENGTHS_K), max(LENGTHS_K))

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    ours, theirs = leaves(tensors), leaves(tensors)
    out, want = compiled(*ours), attend(*theirs)
    assert torch.equal(out, want)
    out.sum().backward()
    want.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


def test_what_has_no_kernel_raises() -> None:
    q, k, v = draw(*[(10, 4, 16)] * 3)
    cu = starts([4, 6])
    with pytest.raises(ValueError, match="seqused_k: expected None"):
        varlen_attn(q, k, v, cu, cu, 6, 6, seqused_k=torch.tensor([2, 2], dtype=torch.int32))


def test_afterwards_pytorch_has_no_kernel_again() -> None:
    attention.restore_flash_attention_impl()
    q, k, v = draw(*[(10, 4, 16)] * 3)
    cu = starts([4, 6])
    with pytest.raises(NotImplementedError, match="CPU"):
        varlen_attn(q, k, v, cu, cu, 6, 6)
    attention.activate_flash_attention_impl("bert_unpad")
    assert varlen_attn(q, k, v, cu, cu, 6, 6).shape == q.shape
