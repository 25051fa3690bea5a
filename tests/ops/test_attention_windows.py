"""Attention with windows, grouped heads and positions of queries, against the plain reference."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from tests.support.attention_cases import Case, compare, random_positions, with_gradients
from tests.support.op_checks import (
    RNG,
    assert_all_isas_agree,
    assert_compiles_to_the_same_bits,
    assert_same_bits_whatever_the_threads,
    cu_seqlens,
)
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [200, 0, 1, 17, 129]
WINDOWS = [(-1, 0), (0, -1), (0, 1), (5, 9), (64, 64), (-1, 30), (31, -1), (500, 500)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows(dtype: torch.dtype, window: tuple[int, int]) -> None:
    torch.manual_seed(derived(0))
    compare(Case(LENGTHS, window=window, p=0.1), dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (4, 2), (6, 3), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    torch.manual_seed(derived(1))
    case = Case([40, 3, 0, 90], heads=heads, kv_heads=kv_heads, window=(20, -1), p=0.1)
    compare(case, dtype)


@pytest.mark.parametrize("head_dim", [1, 33, 128, 200, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dims(dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(derived(head_dim))
    compare(Case([33, 0, 70], kv_heads=1, head_dim=head_dim, window=(8, 8)), dtype)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 10), (7, -1)])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_attention(dtype: torch.dtype, given: bool, window: tuple[int, int]) -> None:
    torch.manual_seed(derived(2))
    q_lengths, k_lengths = [3, 0, 90, 17, 4, 30], [70, 5, 33, 129, 0, 200]
    positions = random_positions(q_lengths, k_lengths) if given else None
    case = Case(k_lengths, q_lengths, kv_heads=1, window=window, p=0.1, positions=positions)
    compare(case, dtype)


@pytest.mark.parametrize("window", [(-1, -1), (100, 3), (-1, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_of_several_parts(dtype: torch.dtype, window: tuple[int, int]) -> None:
    torch.manual_seed(derived(3))
    compare(Case([1700, 30, 769], window=window, kv_heads=1, p=0.1), dtype)
    q_lengths, k_lengths = [900, 5, 40], [100, 1500, 2000]
    positions = random_positions(q_lengths, k_lengths)
    compare(Case(k_lengths, q_lengths, window=window, positions=positions), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_only_itself(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(8))
    qkv = torch.randn(60, 3, 2, 16).to(dtype).requires_grad_()
    dout = torch.randn(60, 2, 16).to(dtype)
    out = ops.varlen_attention(qkv, VarlenBatch.from_lengths([20, 0, 40]), window=(0, 0))
    out.backward(dout)
    assert torch.equal(out, qkv[:, 2])
    expected = torch.zeros_like(qkv)
    expected[:, 2] = dout
    torch.testing.assert_close(qkv.grad, expected, atol=32 * torch.finfo(dtype).eps, rtol=0)


def test_queries_that_see_no_key_give_zeros() -> None:
    # The first two queries lie before all keys, the last one behind.
    q, kv = torch.randn(3, 2, 16, requires_grad=True), torch.randn(5, 2, 2, 16, requires_grad=True)
    positions = torch.tensor([-9, -1, 6], dtype=torch.int32)
    out = ops.varlen_cross_attention(
        q, kv, cu_seqlens([3]), cu_seqlens([5]), 3, 5, window=(1, 0), query_positions=positions
    )
    out.sum().backward()
    for x in (out, q.grad, kv.grad):
        assert torch.equal(x, torch.zeros_like(x))


def test_a_window_that_holds_everything_changes_no_bit() -> None:
    torch.manual_seed(derived(4))
    qkv, batch = torch.randn(330, 3, 2, 64), VarlenBatch.from_lengths([200, 130])
    whole = ops.varlen_attention(qkv, batch, dropout_p=0.1, rng=RNG)
    wide = ops.varlen_attention(qkv, batch, dropout_p=0.1, rng=RNG, window=(199, 2**40))
    assert torch.equal(whole, wide)


def test_grouped_form_of_equal_heads_is_the_other_form() -> None:
    torch.manual_seed(derived(5))
    qkv, batch = torch.randn(90, 3, 2, 64), VarlenBatch.from_lengths([20, 70])
    grouped = ops.varlen_attention(qkv.flatten(1, 2), batch, num_heads=2, window=(9, 9))
    assert torch.equal(grouped, ops.varlen_attention(qkv, batch, window=(9, 9)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_are_those_without_a_window(dtype: torch.dtype) -> None:
    # Keys of one-hot values: an output is the row of dropped weights, of which a window sees some.
    size, p = 64, 0.5
    qkv = torch.zeros(size, 3, 1, size, dtype=dtype)
    qkv[:, 2, 0] = torch.eye(size)
    batch = VarlenBatch.from_lengths([size])

    def kept(**options) -> Tensor:
        return ops.varlen_attention(qkv, batch, dropout_p=p, rng=RNG, **options)[:, 0] != 0

    distance = torch.arange(size) - torch.arange(size)[:, None]
    inside = (distance >= -10) & (distance <= 20)
    assert torch.equal(kept(window=(10, 20)), kept() & inside)


def test_strided_input() -> None:
    torch.manual_seed(derived(6))
    qkv = torch.randn(30, 2, 4, 8)[:, 1, :, :5]
    batch = VarlenBatch.from_lengths([30])
    results = []
    for x in (qkv.contiguous().requires_grad_(), qkv.detach().requires_grad_()):
        out = ops.varlen_attention(x, batch, num_heads=2, window=(3, 4))
        out.square().sum().backward()
        results.append((out, x.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_whatever_the_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(7))
    case = Case([1600, 40, 900], heads=4, window=(-1, 200), p=0.1)
    inputs, dout = case.inputs(dtype), torch.randn(2540, 4, 16).to(dtype)
    assert_same_bits_whatever_the_threads(lambda: with_gradients(case.ours, inputs, dout))


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_opcheck(p: float) -> None:
    rng, cu = RNG if p else None, cu_seqlens([7, 0, 13])
    qkv = torch.randn(20, 4, 16, requires_grad=True)
    tail = (None, None, 2, 3, 0)
    opcheck(torch.ops.bert_unpad.varlen_attention, (qkv, cu, 13, 0.25, p, rng, *tail))
    q = torch.randn(5, 4, 16, requires_grad=True)
    kv = torch.randn(20, 2, 2, 16, requires_grad=True)
    positions = torch.tensor([1, 6, 0, 5, 12], dtype=torch.int32)
    args = (q, kv, cu_seqlens([2, 0, 3]), cu, 3, 13, 0.25, p, rng, None, None, 4, -1, positions)
    opcheck(torch.ops.bert_unpad.varlen_cross_attention, args)


def test_compiles_without_graph_breaks() -> None:
    qkv, cu = torch.randn(20, 4, 16, requires_grad=True), cu_seqlens([7, 13])
    positions = torch.tensor([1, 6, 0, 5, 12], dtype=torch.int32)

    def f(x: Tensor) -> Tensor:
        out = ops.varlen_attention(x * 2, cu, 13, num_heads=2, window=(3, 3))
        last = ops.varlen_cross_attention(
            out[:5], x[:, 2:].unflatten(1, (2, 1)), cu_seqlens([2, 3]), cu, 3, 13, window=(3, 0),
            query_positions=positions,
        )  # fmt: skip
        return last.square().sum()

    assert_compiles_to_the_same_bits(f, [qkv])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": (-2, 0)}, r"window must be two numbers of tokens, .* got \(-2, 0\)"),
        ({"window": (0, -7)}, r"window must be .* got \(0, -7\)"),
        ({"num_heads": 6}, "num_heads must be a multiple of kv_heads"),  # no keys are left
        ({"num_heads": 3}, "num_heads must be a multiple of kv_heads"),  # an odd number is left
        ({"qkv": torch.randn(20, 8, 16)}, "kv_heads, .* got num_heads = 2"),  # 3 heads of keys
        ({"qkv": torch.randn(20, 6, 257)}, "head_dim must be between 1 and 256, got 257"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    good = {"qkv": torch.randn(20, 6, 16), "batch": cu_seqlens([7, 13]), "max_seqlen": 13}
    with pytest.raises(RuntimeError, match=message):
        ops.varlen_attention(**(good | {"num_heads": 2} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": (1, 2, 3)}, r"window must be a pair \(left, right\), got \(1, 2, 3\)"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"qkv": torch.randn(20, 3, 2, 16)}, r"qkv must have shape \[tokens, num_heads \+ 2"),
    ],
)
def test_input_without_a_meaning_is_named(change: dict, message: str) -> None:
    good = {"qkv": torch.randn(20, 6, 16), "batch": cu_seqlens([7, 13]), "max_seqlen": 13}
    with pytest.raises(ValueError, match=message):
        ops.varlen_attention(**(good | {"num_heads": 2} | change))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.zeros(4, dtype=torch.int32), r"query_positions must have shape \[5\]"),
        (torch.zeros(5, dtype=torch.int64), "query_positions must be int32"),
        (torch.zeros(10, dtype=torch.int32)[::2], "query_positions must be contiguous"),
    ],
)
def test_bad_positions_are_named(positions: Tensor, message: str) -> None:
    q, kv, cu = torch.randn(5, 4, 16), torch.randn(20, 2, 2, 16), cu_seqlens([20])
    with pytest.raises(RuntimeError, match=message):
        ops.varlen_cross_attention(q, kv, cu_seqlens([5]), cu, 5, 20, query_positions=positions)
    with pytest.raises(RuntimeError, match="heads of q must be a multiple of those of kv, got 3"):
        ops.varlen_cross_attention(q[:, :3], kv, cu_seqlens([5]), cu, 5, 20)


def compute() -> list[Tensor]:
    torch.manual_seed(derived(0))
    results = []
    for dtype in DTYPES:
        for window in ((-1, 0), (20, 33)):
            case = Case([3, 0, 77, 800], heads=4, head_dim=40, window=window, p=0.1)
            dout = torch.randn(880, 4, 40).to(dtype)
            results += with_gradients(case.ours, case.inputs(dtype), dout)
    return results


def test_all_instruction_sets_agree() -> None:
    assert_all_isas_agree(compute, 20, 3)


@pytest.mark.parametrize("window", [(-1, sys.maxsize), (sys.maxsize, -1), (sys.maxsize,) * 2])
def test_bounds_far_beyond_the_sequence_are_none(window):
    qkv = torch.randn(40, 3, 2, 16)
    batch = VarlenBatch.from_lengths([33, 7])
    whole = ops.varlen_attention(qkv, batch)
    assert torch.equal(ops.varlen_attention(qkv, batch, window=window), whole)
