"""flash-attention's functions against the formula in float64."""

import inspect
import math

import pytest
import torch
from torch import Tensor

from bert_unpad import flash
from tests.support.seeds import derived

LENGTHS_Q, LENGTHS_K = [5, 1, 12, 7], [9, 4, 12, 7]
WINDOWS = [(-1, -1), (3, 2), (0, -1), (-1, 4)]


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(derived(3))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def formula(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int], scale: float | None
) -> tuple[Tensor, Tensor]:
    """One sequence, [tokens, heads, head_dim]; the output and the log-sum-exp [heads, queries]."""
    q, k, v = (x.double() for x in (q, k, v))
    factor = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(factor, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    place = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    distance = torch.arange(k.shape[0]) - place
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1)


def by_sequence(tensors, lengths_q, lengths_k, *options) -> tuple[Tensor, Tensor]:
    q, k, v = tensors
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    outs, lses = zip(*(formula(*part, *options) for part in parts), strict=True)
    return torch.cat(outs), torch.cat(lses, 1)


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def bound(dtype: torch.dtype) -> float:
    """Of sums of at most 12 products of numbers of size 1, in float32 and rounded to dtype."""
    return 40 * torch.finfo(torch.float32).eps + 4 * torch.finfo(dtype).eps * (
        dtype != torch.float32
    )


def agrees(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    scale = want[want.isfinite()].abs().max().clamp(min=1).item()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=bound(dtype) * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("same", [True, False], ids=["self", "cross"])
def test_packed_sequences(same: bool, causal: bool, window: tuple[int, int], dtype) -> None:
    lengths_q = LENGTHS_K if same else LENGTHS_Q
    q, k, v, dout = draw(
        *((sum(lengths), h, 16) for lengths, h in
          ((lengths_q, 4), (LENGTHS_K, 2), (LENGTHS_K, 2), (lengths_q, 4))), dtype=dtype,
    )  # fmt: skip
    cu_k = starts(LENGTHS_K)
    cu_q = cu_k if same else starts(lengths_q)
    ours, theirs = leaves([q, k, v]), leaves([x.double() for x in (q, k, v)])
    out, lse, nothing = flash.flash_attn_varlen_func(
        *ours, cu_q, cu_k, max(lengths_q), max(LENGTHS_K), causal=causal, window_size=window,
        return_attn_probs=True,
    )  # fmt: skip
    want, want_lse = by_sequence(theirs, lengths_q, LENGTHS_K, causal, window, None)
    agrees(out, want, dtype)
    assert nothing is None
    seen = want_lse.isfinite()
    agrees(lse[seen], want_lse[seen].detach(), torch.float32 if dtype == torch.float32 else dtype)
    out.backward(dout)
    want.backward(dout.double())
    for a, b in zip(ours, theirs, strict=True):
        agrees(a.grad, b.grad, dtype)


@pytest.mark.parametrize("queries", [6, 11])
@pytest.mark.parametrize("causal", [False, True])
def test_batches_of_one_length(queries: int, causal: bool) -> None:
    q, k, v = draw((3, queries, 4, 8), (3, 11, 4, 8), (3, 11, 4, 8))
    out, lse, _ = flash.flash_attn_func(
        q, k, v, softmax_scale=0.3, causal=causal, return_attn_probs=True
    )
    assert out.shape == q.shape
    assert lse.shape == (3, 4, queries)
    for row in range(3):
        want, want_lse = formula(q[row], k[row], v[row], causal, (-1, -1), 0.3)
        agrees(out[row], want, torch.float32)
        agrees(lse[row], want_lse, torch.float32)
    kv = torch.stack([k, v], 2)
    again = flash.flash_attn_kvpacked_func(q, kv, softmax_scale=0.3, causal=causal)
    assert torch.equal(again, out)
    if queries == 11:
        qkv = torch.stack([q, k, v], 2)
        packed = flash.flash_attn_qkvpacked_func(qkv, softmax_scale=0.3, causal=causal)
        assert torch.equal(packed, out)


def test_packed_operands_give_the_same_bits() -> None:
    q, k, v = draw(*[(33, 4, 16)] * 3)
    cu, longest = starts([20, 13]), 20
    want = flash.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest)
    qkv = torch.stack([q, k, v], 1)
    assert torch.equal(flash.flash_attn_varlen_qkvpacked_func(qkv, cu, longest), want)
    kv = torch.stack([k, v], 1)
    got = flash.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, longest, longest)
    assert torch.equal(got, want)


def test_dropout_keeps_the_mean_and_follows_the_generator() -> None:
    q, k = (torch.zeros(1, 64, 2, 8) for _ in range(2))
    v = torch.ones(1, 64, 2, 8)
    torch.manual_seed(derived(1))
    first = flash.flash_attn_func(q, k, v, dropout_p=0.25)
    torch.manual_seed(derived(1))
    assert torch.equal(flash.flash_attn_func(q, k, v, dropout_p=0.25), first)
    assert not torch.equal(flash.flash_attn_func(q, k, v, dropout_p=0.25), first)
    # Each row is a mean of 64 kept weights, of 128 rows: 5 standard deviations.
    deviation = math.sqrt(0.25 / 0.75 / (64 * 128))
    assert abs(first[..., 0].mean().item() - 1) < 5 * deviation


def test_compiles() -> None:
    q, k, v = draw(*[(2, 9, 4, 16)] * 3)
    compiled = torch.compile(flash.flash_attn_func, fullgraph=True, backend="aot_eager")
    ours, theirs = leaves([q, k, v]), leaves([q, k, v])
    out, want = compiled(*ours, causal=True), flash.flash_attn_func(*theirs, causal=True)
    assert torch.equal(out, want)
    out.sum().backward()
    want.sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


def test_signatures_are_those_of_flash_attention() -> None:
    """As of its version 2.8, whose README and source list them."""
    shared = [
        "dropout_p",
        "softmax_scale",
        "causal",
        "window_size",
        "softcap",
        "alibi_slopes",
        "deterministic",
        "return_attn_probs",
    ]
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    expected = {
        "flash_attn_func": ["q", "k", "v", *shared],
        "flash_attn_kvpacked_func": ["q", "kv", *shared],
        "flash_attn_qkvpacked_func": ["qkv", *shared],
        "flash_attn_varlen_func": ["q", "k", "v", *lengths, *shared, "block_table"],
        "flash_attn_varlen_kvpacked_func": ["q", "kv", *lengths, *shared],
        "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *shared],
    }
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(flash, name)).parameters) == parameters, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"softcap": 30.0}, "softcap: expected none"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes: expected none"),
        ({"block_table": torch.ones(1, 1)}, "block_table: expected none"),
        ({"window_size": (1, 2, 3)}, "window_size: expected a pair"),
        ({"v": torch.zeros(10, 4, 8)}, "v: expected k's shape"),
        ({"q": torch.zeros(10, 4)}, "q: expected shape"),
        ({"dropout_p": 1.5}, "dropout_p must be in"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 9], dtype=torch.int32)}, "cu_seqlens"),
    ],
)
def test_what_is_wrong_is_named(change: dict, message: str) -> None:
    q, k, v = draw(*[(10, 4, 16)] * 3)
    cu = starts([4, 6])
    given = {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 6,
        "max_seqlen_k": 6,
    }  # fmt: skip
    with pytest.raises((ValueError, RuntimeError), match=message):
        flash.flash_attn_varlen_func(**given | change)


def test_no_tensor_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"qkv: expected a tensor \[batch, tokens, 3"):
        flash.flash_attn_qkvpacked_func([1.0])
