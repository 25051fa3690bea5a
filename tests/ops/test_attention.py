"""Variable-length attention against the plain reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from tests.support import reference
from tests.support.op_checks import (
    RNG,
    assert_all_isas_agree,
    assert_compiles_to_the_same_bits,
    compare_attention,
    compare_cross_attention,
    cu_seqlens,
)
from tests.support.seeds import derived

LENGTHS = [200, 0, 1, 15, 16, 17, 63, 64, 65, 129]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(dtype: torch.dtype, p: float) -> None:
    torch.manual_seed(derived(0))
    compare_attention(dtype, LENGTHS, p=p)


@pytest.mark.parametrize("head_dim", [1, 5, 32, 100, 128, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_head_dim(dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(derived(head_dim))
    compare_attention(dtype, [33, 0, 70, 5], head_dim=head_dim, p=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1], [512], [511, 513], [1] * 9, [0, 0, 3]])
def test_lengths_at_the_edges(dtype: torch.dtype, lengths: list[int]) -> None:
    torch.manual_seed(derived(1))
    compare_attention(dtype, lengths, p=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.7, -0.3])
def test_scale_is_applied_before_the_softmax(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(derived(2))
    compare_attention(dtype, [40, 3], head_dim=16, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sequence(dtype: torch.dtype) -> None:
    # Longer than one strip of scores allows: the smallest block of rows.
    torch.manual_seed(derived(3))
    compare_attention(dtype, [4100], head_dim=8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(4))
    compare_cross_attention(dtype, [3, 0, 40, 17, 0], [70, 5, 33, 129, 0], p=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_without_keys_give_zeros(dtype: torch.dtype) -> None:
    q = torch.randn(3, 2, 8, dtype=dtype, requires_grad=True)
    kv = torch.randn(4, 2, 2, 8, dtype=dtype, requires_grad=True)
    out = ops.varlen_cross_attention(q, kv, cu_seqlens([2, 1]), cu_seqlens([0, 4]), 2, 4)
    out.sum().backward()
    assert torch.equal(out[:2], torch.zeros(2, 2, 8, dtype=dtype))
    assert torch.equal(q.grad[:2], torch.zeros(2, 2, 8, dtype=dtype))
    assert torch.isfinite(kv.grad).all()


def test_empty_batch() -> None:
    qkv = torch.randn(0, 3, 2, 16, requires_grad=True)
    out = ops.varlen_attention(qkv, torch.zeros(1, dtype=torch.int32), 0)
    out.sum().backward()
    assert out.shape == (0, 2, 16)
    assert qkv.grad.shape == qkv.shape


def results(qkv: Tensor, batch: VarlenBatch | Tensor, *args, **options) -> tuple[Tensor, Tensor]:
    x = qkv.detach().requires_grad_()
    out = ops.varlen_attention(x, batch, *args, dropout_p=0.1, rng=RNG, **options)
    out.square().sum().backward()
    return out.detach(), x.grad


def test_the_schedule_changes_no_bit() -> None:
    torch.manual_seed(derived(7))
    qkv, batch = torch.randn(sum(LENGTHS), 3, 2, 16), VarlenBatch.from_lengths(LENGTHS)
    expected = results(qkv, batch.cu_seqlens, batch.max_seqlen)
    for schedule in ("list", "groups"):
        for got, want in zip(results(qkv, batch, schedule=schedule), expected, strict=True):
            assert torch.equal(got, want)


def test_cross_attention_takes_an_order() -> None:
    q, kv, cu_q = torch.randn(5, 2, 16), torch.randn(20, 2, 2, 16), cu_seqlens([2, 0, 3])
    keys = VarlenBatch.from_lengths([7, 0, 13])
    args = (q, kv, cu_q, keys.cu_seqlens, 3, 13)
    expected = ops.varlen_cross_attention(*args)
    assert torch.equal(ops.varlen_cross_attention(*args, order=keys.order), expected)
    with pytest.raises(RuntimeError, match="order must be a permutation"):
        ops.varlen_cross_attention(*args, order=keys.order.clamp(max=1))
    with pytest.raises(RuntimeError, match=r"order must have shape \[3\]"):
        ops.varlen_cross_attention(*args, order=keys.order_table.view(-1, 4))


def test_schedule_must_be_known() -> None:
    with pytest.raises(ValueError, match="schedule must be 'list' or 'groups', got 'best'"):
        ops.varlen_attention(torch.randn(2, 3, 1, 8), cu_seqlens([2]), 2, schedule="best")


@pytest.mark.parametrize(
    ("order", "groups", "message"),
    [
        ([0, 1], None, r"order must have shape \[3\], one entry a sequence, got \[2\]"),
        (torch.tensor([0, 1, 2]), None, "order must be int32"),
        (torch.zeros(6, dtype=torch.int32)[::2], None, "order must be contiguous"),
        ([0, 1, 3], None, r"order must be a permutation of 0 .. 2, but entry 2 is 3"),
        ([0, -1, 2], None, "entry 1 is -1"),
        ([2, 0, 2], None, "entry 2 is 2"),
        ([[2, 7, 13, 0], [0, 0, 7, 0], [1, 7, 1, 0]], None, r"row 2 is \[1, 7, 1, 0\] .* 0 tokens"),
        ([[2, 7, 13, 0], [0, 1, 7, 0], [1, 7, 0, 0]], None, r"row 1 is \[0, 1, 7, 0\]"),
        ([[2, 7, 13, 0], [0, 0, 7, 0], [0, 0, 7, 0]], None, "entry 2 is 0"),
        ([[2, 7, 13], [0, 0, 7], [1, 7, 0]], None, r"shape \[3\], .* got \[3, 3\]"),
        (None, [[3, 13, 13]], "needs order"),
        ([2, 0, 1], [3, 13, 13], r"groups must have shape \[1 to 4, 3\]"),
        ([2, 0, 1], [[1, 13, 13]] * 5, r"groups must have shape .* got \[5, 3\]"),
        ([2, 0, 1], torch.tensor([[3, 13, 13]]), "groups must be int32"),
        ([2, 0, 1], [[1, 13, 13], [1, 7, 7]], "sequences must add up to 3, got 2"),
        ([2, 0, 1], [[4, 13, 13], [-1, 7, 7]], r"must not be negative, but row 1 is \[-1, 7, 7\]"),
        ([2, 0, 1], [[1, 13, 13], [2, 6, 7]], "6 queries and 7 keys where sequence 0 has 7 and 7"),
        ([2, 0, 1], [[1, 13, 12], [2, 7, 7]], "sequence 2 has 13 and 13"),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_bad_schedules_are_named(order, groups, message: str, backward: bool) -> None:
    def int32(x) -> Tensor | None:
        return torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x

    qkv, cu = torch.randn(20, 3, 2, 16), cu_seqlens([7, 0, 13])
    op = torch.ops.bert_unpad
    good = (cu, 13, 0.25, 0.0, None)
    out, lse = op.varlen_attention(qkv, *good)
    call, saved = (
        (op.varlen_attention_backward, (out, qkv, out, lse))
        if backward
        else (op.varlen_attention, (qkv,))
    )
    with pytest.raises(RuntimeError, match=message):
        call(*saved, *good, int32(order), int32(groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_input_and_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(5))
    wide = torch.randn(
        30, 2, 3, 24, dtype=dtype
    )  # heads before q, k, v, and only 16 of 24 columns used
    qkv = wide.transpose(1, 2)[..., :16]
    batch = VarlenBatch.from_lengths([30])
    a, b = qkv.clone().requires_grad_(), qkv.detach().requires_grad_()
    dout = torch.randn(30, 16, 2, dtype=dtype).transpose(
        1, 2
    )  # its last dimension is not contiguous
    for x in (a, b):
        ops.varlen_attention(x, batch).backward(dout)
    assert not b.is_contiguous()
    assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [100, 1e6])
def test_large_scores_stay_finite(dtype: torch.dtype, factor: float) -> None:
    qkv = torch.randn(50, 3, 1, 64)
    qkv[:, :2] *= factor
    qkv = qkv.to(dtype)
    out = ops.varlen_attention(qkv, VarlenBatch.from_lengths([50]))
    q, k, v = qkv.double()[:, :, 0].unbind(1)
    scores = q @ k.T / 8
    expected = scores.softmax(-1) @ v
    # A score is a sum of 64 products in fp32. Its rounding moves the result between the values of
    # keys whose weights are alike, and hardly where one key has all the weight.
    rounding = 128 * torch.finfo(torch.float32).eps * (q.abs() @ k.abs().T / 8).amax(-1, True)
    most = (scores - scores.amax(-1, True) + rounding).clamp(max=0).exp()  # of a key's weight
    moved = (-torch.expm1(-rounding) * most)[:, :, None] * (v - expected[:, None]).abs()
    limit = 4 * torch.finfo(dtype).eps * v.abs().max() + 1e-6
    assert ((out.double()[:, 0] - expected).abs() <= limit + moved.sum(1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_nan_comes_out_as_nan(dtype: torch.dtype, part: int) -> None:
    qkv = torch.randn(40, 3, 1, 64, dtype=dtype)
    qkv[7, part, 0, 3] = float("nan")
    out = ops.varlen_attention(qkv, VarlenBatch.from_lengths([20, 20]))
    reference_nan = reference.varlen_attention(qkv, [20, 20]).isnan()
    assert torch.equal(out.isnan(), reference_nan)
    assert reference_nan.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_whatever_the_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(6))
    qkv = torch.randn(sum(LENGTHS), 3, 4, 64, dtype=dtype)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            x = qkv.clone().requires_grad_()
            out = ops.varlen_attention(x, VarlenBatch.from_lengths(LENGTHS), dropout_p=0.1, rng=RNG)
            out.sum().backward()
            results.append((out.detach(), x.grad))
    finally:
        torch.set_num_threads(threads)
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_opcheck(p: float) -> None:
    rng = RNG if p else None
    qkv = torch.randn(20, 3, 2, 16, requires_grad=True)
    cu = cu_seqlens([7, 0, 13])
    opcheck(torch.ops.bert_unpad.varlen_attention, (qkv, cu, 13, 0.25, p, rng))
    q = torch.randn(5, 2, 16, requires_grad=True)
    kv = torch.randn(20, 2, 2, 16, requires_grad=True)
    args = (q, kv, cu_seqlens([2, 0, 3]), cu, 3, 13, 0.25, p, rng)
    opcheck(torch.ops.bert_unpad.varlen_cross_attention, args)
    order = torch.tensor([2, 0, 1], dtype=torch.int32)
    groups = torch.tensor([[1, 13, 13], [2, 7, 7]], dtype=torch.int32)
    opcheck(torch.ops.bert_unpad.varlen_attention, (qkv, cu, 13, 0.25, p, rng, order, groups))
    opcheck(torch.ops.bert_unpad.varlen_cross_attention, (*args, order, groups))


def test_compiles_without_graph_breaks() -> None:
    qkv = torch.randn(20, 3, 2, 16, requires_grad=True)
    cu = cu_seqlens([7, 13])

    def f(x: Tensor) -> Tensor:
        return ops.varlen_attention(x * 2, cu, 13, dropout_p=0.1, rng=RNG).square().sum()

    assert_compiles_to_the_same_bits(f, [qkv])


# The second graph lets the token count vary, the third the number of groups.
@pytest.mark.parametrize(("schedule", "graphs"), [("list", 2), ("groups", 3)])
def test_compiles_to_one_graph_for_any_lengths(schedule: str, graphs: int) -> None:
    def f(x: Tensor, batch: VarlenBatch) -> Tensor:
        out = ops.varlen_attention(x * 2, batch, dropout_p=0.1, rng=RNG, schedule=schedule)
        return out.square().sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, fullgraph=True, backend=counter)
    for lengths in ([70, 13, 200], [7, 90, 131], [6, 300, 2], [9, 140, 80]):
        batch = VarlenBatch.from_lengths(lengths)
        assert batch.group_sizes.shape[0] > 1  # torch.compile makes a graph of its own for size 1
        qkv = torch.randn(batch.total, 3, 2, 16, requires_grad=True)
        (got,) = torch.autograd.grad(compiled(qkv, batch), qkv)
        (want,) = torch.autograd.grad(f(qkv, batch), qkv)
        assert torch.equal(got, want)
    assert counter.frame_count <= graphs


def _good() -> dict:
    return {"qkv": torch.randn(20, 3, 2, 16), "batch": cu_seqlens([7, 13]), "max_seqlen": 13}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.randn(20, 2, 2, 16)}, r"qkv must have shape \[tokens, 3, heads, head_dim\]"),
        ({"qkv": torch.randn(20, 3, 2, 16).double()}, "float32, bfloat16 or float16"),
        ({"qkv": torch.randn(20, 3, 2, 260)}, "head_dim must be between 1 and 256, got 260"),
        ({"qkv": torch.randn(20, 3, 16, 2).transpose(2, 3)}, "contiguous in its last dimension"),
        ({"batch": torch.tensor([0, 7, 20])}, "cu_seqlens must be int32"),
        ({"batch": cu_seqlens([7, 12])}, "must end at the number of tokens, 20, but ends at 19"),
        ({"batch": torch.tensor([0, 9, 7, 20], dtype=torch.int32)}, "must not decrease"),
        ({"batch": torch.tensor([1, 7, 20], dtype=torch.int32)}, "must start with 0, got 1"),
        ({"batch": torch.zeros(2, 2, dtype=torch.int32)}, r"shape \[sequences \+ 1\]"),
        ({"batch": torch.zeros(0, dtype=torch.int32)}, r"shape \[sequences \+ 1\]"),
        ({"max_seqlen": 12}, "longer than max_seqlen, 12, but sequence 1 has 13"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\)"),
        ({"dropout_p": -0.1}, r"dropout_p must be in \[0, 1\)"),
        ({"dropout_p": 0.1, "rng": torch.zeros(3, dtype=torch.int64)}, "rng must have shape"),
        ({"dropout_p": 0.1, "rng": torch.zeros(2)}, "rng must be int64"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.varlen_attention(**(_good() | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.randn(20, 3, 32)}, r"qkv must have shape .*, got \[20, 3, 32\]"),
        ({"max_seqlen": None}, "max_seqlen: expected .* got None; VarlenBatch.from_cu_seqlens"),
    ],
)
def test_input_without_a_meaning_is_named(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.varlen_attention(**(_good() | change))


def test_lengths_are_no_batch() -> None:
    expected = (
        r"^varlen_attention: batch: expected a VarlenBatch, such as VarlenBatch.from_lengths makes "
        r"of lengths, or an int32 tensor cu_seqlens, got \[7, 13\] \(list\)$"
    )
    with pytest.raises(TypeError, match=expected):
        ops.varlen_attention(_good()["qkv"], [7, 13])


def test_bad_cross_input_is_named() -> None:
    q, kv = torch.randn(5, 2, 16), torch.randn(20, 2, 2, 16)
    with pytest.raises(RuntimeError, match="as many sequences, got 1 and 2"):
        ops.varlen_cross_attention(q, kv, cu_seqlens([5]), cu_seqlens([7, 13]), 5, 13)
    with pytest.raises(RuntimeError, match="kv must have the dtype of q"):
        ops.varlen_cross_attention(q, kv.half(), cu_seqlens([5]), cu_seqlens([20]), 5, 20)
    with pytest.raises(RuntimeError, match="kv must have shape"):
        ops.varlen_cross_attention(q, kv[:, :1], cu_seqlens([5]), cu_seqlens([20]), 5, 20)


def compute() -> list[Tensor]:
    torch.manual_seed(derived(0))
    results = []
    for dtype in DTYPES:
        qkv = torch.randn(180, 3, 2, 40).to(dtype).requires_grad_()
        batch = VarlenBatch.from_lengths([3, 0, 77, 100])
        out = ops.varlen_attention(qkv, batch, dropout_p=0.1, rng=torch.tensor([1, 2]))
        out.float().square().sum().backward()
        results += [out.detach(), qkv.grad]
    return results


def test_all_instruction_sets_agree() -> None:
    assert_all_isas_agree(compute, 20, 3)
