"""Position biases of attention: the kernels against the reference, buckets against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from transformers.models.bloom import modeling_bloom
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.mpnet import modeling_mpnet
from transformers.models.t5 import modeling_t5

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from tests.support import reference
from tests.support.attention_cases import (
    PARTS,
    Case,
    compare,
    random_buckets,
    random_positions,
    with_gradients,
)
from tests.support.op_checks import (
    RNG,
    assert_all_isas_agree,
    assert_compiles_to_the_same_bits,
    assert_same_bits_whatever_the_threads,
    cu_seqlens,
)
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [130, 0, 1, 17, 70]


@pytest.mark.parametrize("parts", [*((part,) for part in PARTS), PARTS], ids="+".join)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts(dtype: torch.dtype, parts: tuple[str, ...]) -> None:
    torch.manual_seed(derived(0))
    case = Case(LENGTHS, heads=4, buckets=random_buckets(40, 11), parts=parts, p=0.1)
    compare(case, dtype)


@pytest.mark.parametrize("reach", [0, 3, 200])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 33)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reach_and_window(dtype: torch.dtype, window: tuple[int, int], reach: int) -> None:
    torch.manual_seed(derived(1))
    buckets = random_buckets(reach, 7)
    if reach == 0:  # a constant, which the softmax does not see; the gradient is all rounding
        buckets, parts = torch.zeros(1, dtype=torch.int32), ("key",)
    else:
        parts = PARTS
    compare(Case(LENGTHS, window=window, buckets=buckets, parts=parts, scale=-0.3), dtype)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_attention(dtype: torch.dtype, given: bool) -> None:
    torch.manual_seed(derived(2))
    q_lengths, k_lengths = [3, 0, 90, 17, 4, 30], [70, 5, 33, 129, 0, 200]
    positions = random_positions(q_lengths, k_lengths) if given else None
    case = Case(
        k_lengths, q_lengths, heads=4, buckets=random_buckets(25, 9), parts=PARTS, p=0.1,
        positions=positions,
    )  # fmt: skip
    compare(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_of_several_parts(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(3))
    compare(Case([900, 30], buckets=random_buckets(60, 9), parts=PARTS, kv_heads=1), dtype)


def test_a_bias_of_zeros_is_none() -> None:
    torch.manual_seed(derived(4))
    qkv, batch = torch.randn(218, 3, 2, 32), VarlenBatch.from_lengths(LENGTHS)
    bias = ops.PositionBias(ops.t5_buckets(), torch.zeros(32, 2))
    plain = ops.varlen_attention(qkv, batch)
    assert torch.equal(ops.varlen_attention(qkv, batch, position_bias=bias), plain)


def test_strided_parts() -> None:
    torch.manual_seed(derived(5))
    case = Case([40, 9], buckets=random_buckets(12, 5), parts=PARTS)
    inputs = case.inputs(torch.float32)
    spread = {name: x.repeat_interleave(2, dim=-1)[..., ::2] for name, x in inputs.items()}
    spread["qkv"] = inputs["qkv"]
    spread["query"] = torch.stack([inputs["query"]] * 3, dim=1)[:, 1]
    assert not any(spread[name].is_contiguous() for name in PARTS)
    assert torch.equal(case.ours(spread), case.ours(inputs))


def test_a_table_of_another_dtype() -> None:
    torch.manual_seed(derived(6))
    case = Case([40, 9], buckets=random_buckets(12, 5), parts=("table",))
    inputs = case.inputs(torch.float32)
    inputs["table"] = inputs["table"].bfloat16()
    dout = torch.randn(49, 2, 16)
    got = with_gradients(case.ours, inputs, dout)
    inputs["table"] = inputs["table"].float()
    want = with_gradients(case.ours, inputs, dout)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[2], want[2].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_whatever_the_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(7))
    case = Case([1600, 40, 900], heads=2, buckets=random_buckets(30, 6), parts=PARTS, p=0.1)
    inputs, dout = case.inputs(dtype), torch.randn(2540, 2, 16).to(dtype)
    assert_same_bits_whatever_the_threads(lambda: with_gradients(case.ours, inputs, dout))


@pytest.mark.parametrize("parts", [("table",), PARTS], ids="+".join)
def test_opcheck(parts: tuple[str, ...]) -> None:
    cu, buckets = cu_seqlens([7, 0, 13]), random_buckets(4, 3)
    rows = {"table": (3, 2), "query": (20, 2, 3), "key": (20, 2, 3)}
    bias = [torch.randn(rows[n], requires_grad=True) if n in parts else None for n in PARTS]
    qkv = torch.randn(20, 3, 2, 16, requires_grad=True)
    args = (qkv, cu, 13, 0.25, 0.1, RNG, None, None, 0, -1, 5, buckets, *bias)
    opcheck(torch.ops.bert_unpad.varlen_attention, args)
    if "query" in parts:
        bias[1] = torch.randn(5, 2, 3, requires_grad=True)
    q = torch.randn(5, 2, 16, requires_grad=True)
    kv = torch.randn(20, 2, 2, 16, requires_grad=True)
    args = (q, kv, cu_seqlens([2, 0, 3]), cu, 3, 13, 0.25, 0.1, RNG, None, None, -1, -1)
    positions = torch.tensor([1, 6, 0, 5, 12], dtype=torch.int32)
    opcheck(torch.ops.bert_unpad.varlen_cross_attention, (*args, positions, buckets, *bias))


def test_compiles_without_graph_breaks() -> None:
    qkv, cu = torch.randn(20, 3, 2, 16, requires_grad=True), cu_seqlens([7, 13])
    table = torch.randn(32, 2, requires_grad=True)

    def f(x: Tensor, table: Tensor) -> Tensor:
        bias = ops.PositionBias(ops.t5_buckets(), table)
        return ops.varlen_attention(x * 2, cu, 13, position_bias=bias).square().sum()

    assert_compiles_to_the_same_bits(f, [qkv, table])


def test_a_table_without_gradient_gets_none() -> None:
    qkv = torch.randn(20, 3, 2, 16, requires_grad=True)
    bias = ops.alibi_bias(2, 13)
    out = ops.varlen_attention(qkv, cu_seqlens([7, 13]), 13, position_bias=bias)
    out.sum().backward()
    assert bias.table.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buckets": torch.zeros(4, dtype=torch.int32)}, r"shape \[2 \* reach \+ 1\], got \[4\]"),
        ({"buckets": torch.zeros(5, dtype=torch.int64)}, "bias_buckets must be int32"),
        ({"buckets": torch.tensor([0, 1, 3], dtype=torch.int32)}, "below 3, but entry 2 is 3"),
        ({"buckets": torch.tensor([0, -1, 0], dtype=torch.int32)}, "entry 1 is -1"),
        (
            {"table": torch.randn(3, 3)},
            r"bias_table must have shape \[buckets, heads\]",
        ),
        ({"table": torch.randn(4, 2)}, r"bias_query must have shape \[tokens, heads"),
        ({"query": torch.randn(19, 2, 3)}, "bias_query must have shape"),
        ({"key": torch.randn(20, 2, 4)}, "bias_key must have shape"),
        ({"key": torch.randn(20, 2, 3).half()}, "bias_key must have the input's dtype"),
        ({"table": None, "query": None, "key": None}, "must have a table, query or key"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    good = {
        "buckets": torch.zeros(5, dtype=torch.int32),
        "table": torch.randn(3, 2),
        "query": torch.randn(20, 2, 3),
        "key": torch.randn(20, 2, 3),
    }
    with pytest.raises(RuntimeError, match=message):
        ops.varlen_attention(
            torch.randn(20, 3, 2, 16), cu_seqlens([7, 13]), 13,
            position_bias=ops.PositionBias(**(good | change)),
        )  # fmt: skip


@pytest.mark.parametrize(("count", "longest"), [(32, 128), (32, 20), (8, 3), (64, 500), (4, 2)])
def test_t5_buckets(count: int, longest: int) -> None:
    distance = torch.arange(-900, 901)
    got = ops.t5_buckets(count, longest)[distance.clamp(-longest, longest) + longest]
    t5 = modeling_t5.T5Attention._relative_position_bucket
    assert torch.equal(got.long(), t5(distance, True, count, longest))
    mpnet = modeling_mpnet.MPNetEncoder.relative_position_bucket
    assert torch.equal(got.long(), mpnet(distance, count, longest))


@pytest.mark.parametrize(("longest", "span"), [(512, 256), (100, 32), (7, 4), (512, 512), (24, -1)])
def test_deberta_buckets(longest: int, span: int) -> None:
    distance = torch.arange(-900, 901)
    got = ops.deberta_buckets(longest, span)[distance.clamp(-longest, longest) + longest]
    relative, size = -distance, longest if span == -1 else span
    if span != -1:
        relative = modeling_deberta_v2.make_log_bucket_position(relative, span, longest).long()
    assert torch.equal(got.long(), (relative + size).clamp(0, 2 * size - 1))


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 16, 25])
def test_alibi(heads: int) -> None:
    length = 30
    theirs = modeling_bloom.build_alibi_tensor(torch.ones(1, length), heads, torch.float32)
    slopes = ops.alibi_slopes(heads)
    torch.testing.assert_close(slopes, theirs.view(heads, length)[:, 1], atol=0, rtol=1e-6)
    bias = ops.alibi_bias(heads, length)
    got = reference.position_scores(torch.arange(length), length, bias.buckets, bias.table)
    distance = torch.arange(length) - torch.arange(length)[:, None]
    torch.testing.assert_close(got, -slopes[:, None, None] * distance.abs())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.t5_buckets(30), "num_buckets must be a multiple of 4, got 30"),
        (lambda: ops.t5_buckets(32, 8), "max_distance must be more than num_buckets / 4 = 8"),
        (lambda: ops.deberta_buckets(0), "max_position must be at least 1, got 0"),
        (lambda: ops.deberta_buckets(100, 31), "position_buckets must be -1 or an even number"),
        (lambda: ops.deberta_buckets(10, 12), "from 4 to max_position = 10, got 12"),
        (lambda: ops.alibi_slopes(0), "heads must be at least 1, got 0"),
        (lambda: ops.alibi_bias(2, 0), "max_seqlen must be at least 1, got 0"),
    ],
)
def test_bad_numbers_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def compute() -> list[Tensor]:
    torch.manual_seed(derived(0))
    results = []
    for dtype in DTYPES:
        case = Case([3, 0, 77, 800], head_dim=40, buckets=random_buckets(20, 5), parts=PARTS)
        results += with_gradients(case.ours, case.inputs(dtype), torch.randn(880, 2, 40).to(dtype))
    return results


def test_all_instruction_sets_agree() -> None:
    assert_all_isas_agree(compute, 40, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [600, 1700, 2500])
def test_distances_that_must_not_be_seen(dtype: torch.dtype, tokens: int) -> None:
    """Where the keys come in parts, whole parts of a row may be minus infinity."""
    torch.manual_seed(derived(0))
    qkv = torch.randn(tokens, 3, 1, 16).to(dtype)
    reach = 50
    buckets = torch.zeros(2 * reach + 3, dtype=torch.int32)
    buckets[0] = buckets[-1] = 1
    bias = ops.PositionBias(buckets, table=torch.tensor([[0.0], [-torch.inf]]))
    batch = VarlenBatch.from_lengths([tokens])
    found = ops.varlen_attention(qkv, batch, position_bias=bias)
    expected = ops.varlen_attention(qkv, batch, window=(reach, reach))
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
