"""Calls of attention: schedules, torch.compile, and errors that name what is wrong."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from tests.support.attention_cases import MODELS, Kernels, kinds
from tests.support.backends import Backend
from tests.support.op_checks import RNG, assert_compiles_to_the_same_bits, cu_seqlens
from tests.support.seeds import derived

MANY = pytest.mark.backends("cpu", "cuda")


def test_cross_attention_takes_an_order(backend: Backend) -> None:
    torch.manual_seed(derived(5))
    keys = VarlenBatch.from_lengths([70, 5, 0, 130], backend.device)
    q, kv = torch.randn(12, 2, 64).bfloat16(), torch.randn(keys.total, 2, 2, 64).bfloat16()
    cu_q = cu_seqlens([4, 1, 3, 4], backend.device)
    args = (*backend.put((q, kv)), cu_q, keys.cu_seqlens, 4, 130)
    expected = ops.varlen_cross_attention(*args)
    assert torch.equal(ops.varlen_cross_attention(*args, order=keys.order), expected)


@pytest.mark.backends("cpu", "cuda")
def test_wrong_orders_are_named(backend: Backend) -> None:
    q, kv = backend.put((torch.randn(5, 2, 32), torch.randn(20, 2, 2, 32)))
    keys = VarlenBatch.from_lengths([7, 0, 13], backend.device)
    args = (q, kv, cu_seqlens([2, 0, 3], backend.device), keys.cu_seqlens, 3, 13)
    with pytest.raises(RuntimeError, match=r"order must have shape \[3\]"):
        ops.varlen_cross_attention(*args, order=keys.order_table.view(-1, 4))
    if backend.name == "cpu":  # a GPU's kernel stops: tests/cuda/test_attention.py
        with pytest.raises(RuntimeError, match="order must be a permutation"):
            ops.varlen_cross_attention(*args, order=keys.order.clamp(max=1))


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


@MANY
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_opcheck(backend: Backend, p: float) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=backend.device, requires_grad=True)

    rng, batch = backend.put(RNG) if p else None, VarlenBatch.from_lengths([7, 0, 13])
    batch, op = batch.to(backend.device), torch.ops.bert_unpad
    scheduled = (0.25, p, rng, batch.order, batch.group_sizes)
    cu_q, (q, kv) = cu_seqlens([2, 0, 3], backend.device), (random(5, 2, 32), random(20, 2, 2, 32))
    for tail in (scheduled[:3], scheduled):
        opcheck(op.varlen_attention, (random(20, 3, 2, 32), batch.cu_seqlens, 13, *tail))
        opcheck(op.varlen_cross_attention, (q, kv, cu_q, batch.cu_seqlens, 3, 13, *tail))


@MANY
@pytest.mark.parametrize("schedule", ["list", "groups"])
def test_compiles_without_graph_breaks(backend: Backend, schedule: str) -> None:
    qkv = torch.randn(137, 3, 2, 64, device=backend.device, requires_grad=True)
    batch = VarlenBatch.from_lengths([7, 0, 130], backend.device)
    assert batch.group_sizes.device.type == "cpu"

    def f(x: Tensor) -> Tensor:
        rng = RNG.to(backend.device)
        out = ops.varlen_attention(x * 2, batch, dropout_p=0.1, rng=rng, schedule=schedule)
        return out.square().sum()

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
    return {"qkv": torch.randn(20, 3, 2, 32), "batch": cu_seqlens([7, 13]), "max_seqlen": 13}


def on_cpu(change: dict, message: str):
    """What a GPU cannot check on the host, or allows otherwise."""
    return pytest.param(change, message, marks=pytest.mark.backends("cpu"))


@MANY
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.randn(20, 2, 2, 32)}, r"qkv must have shape \[tokens, 3, heads, head_dim\]"),
        ({"qkv": torch.randn(20, 3, 2, 32).double()}, "float32, bfloat16 or float16"),
        on_cpu({"qkv": torch.randn(20, 3, 2, 260)}, "head_dim must be between 1 and 256, got 260"),
        ({"qkv": torch.randn(20, 3, 32, 2).transpose(2, 3)}, "contiguous in its last dimension"),
        ({"batch": torch.tensor([0, 7, 20])}, "cu_seqlens must be int32"),
        on_cpu({"batch": cu_seqlens([7, 12])}, "must end at the number of tokens, 20, but .* 19"),
        on_cpu({"batch": torch.tensor([0, 9, 7, 20], dtype=torch.int32)}, "must not decrease"),
        on_cpu({"batch": torch.tensor([1, 7, 20], dtype=torch.int32)}, "must start with 0, got 1"),
        ({"batch": torch.zeros(2, 2, dtype=torch.int32)}, r"shape \[sequences \+ 1\]"),
        ({"batch": torch.zeros(0, dtype=torch.int32)}, r"shape \[sequences \+ 1\]"),
        on_cpu({"max_seqlen": 12}, "longer than max_seqlen, 12, but sequence 1 has 13"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\)"),
        ({"dropout_p": -0.1}, r"dropout_p must be in \[0, 1\)"),
        ({"dropout_p": 0.1, "rng": torch.zeros(3, dtype=torch.int64)}, "rng must have shape"),
        ({"dropout_p": 0.1, "rng": torch.zeros(2)}, "rng must be int64"),
    ],
)
def test_bad_input_is_named(backend: Backend, change: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.varlen_attention(**backend.put(_good() | change))


@pytest.mark.backends("cpu", "block", "ptx")
@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 30, 20, 40], "must not decrease|race: writes"),  # others write rows 20 to 29 first
        ([1, 10, 20, 40], "must start with 0"),
        ([0, 10, 20, 39], "must end at the number of tokens"),
        ([0, 10, 20, 41], "must end at the number of tokens"),
        ([0, 5, 36, 40], "longer than max_seqlen|31 tokens, more than max_seqlen"),
        ([0, -5, 20, 40], "must not decrease|must end at the number of tokens"),  # by another block
    ],
)
@kinds("fused", "wgmma_fused", dtypes=[torch.float32, torch.bfloat16])
def test_impossible_cu_seqlens(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, cu: list[int], message: str
) -> None:
    """A GPU's kernels stop; on a GPU itself in tests/cuda/test_attention.py."""
    if kernels.wgmma and backend.name == "ptx":
        message = f"{message}|trap$"  # compiled, these kernels stop without a message
    qkv = torch.randn(40, 3, 2, 64, dtype=dtype)
    with pytest.raises(RuntimeError, match=message):
        ops.varlen_attention(qkv, torch.tensor(cu, dtype=torch.int32), 30)


@pytest.mark.backends(*MODELS)
@pytest.mark.parametrize("order", [[0, 2], [(0, 0, 10, 0), (2, 10, 10, 0)]])
def test_impossible_orders_stop_the_kernel(backend: Backend, order: list) -> None:
    qkv, cu = torch.randn(20, 3, 2, 64).bfloat16(), cu_seqlens([10, 10])
    given = torch.tensor(order, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="order must hold sequence numbers"):
        torch.ops.bert_unpad.varlen_attention(qkv, cu, 10, 0.125, 0.0, None, given)


# Of sequences of 10, 10 and 20 tokens. The first three would read rows of others, or beyond all.
WRONG_ROWS = [(1, 0, 10, 0), (1, 10, 11, 0), (2, 20, 21, 0), (1, 10, 9, 0), (1, 10, 10, 1)]


@pytest.mark.backends("cpu", *MODELS)
@pytest.mark.parametrize("row", WRONG_ROWS, ids=str)
@kinds("fused", "split", "wgmma_fused", "wgmma_split", dtypes=[torch.float32, torch.bfloat16])
def test_tables_that_differ_from_cu_seqlens(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, row: tuple[int, ...]
) -> None:
    """Also where only the backward pass gets them."""
    right = [(2, 20, 20, 0), (0, 0, 10, 0), (1, 10, 10, 0)]
    wrong = [row if row[0] == good[0] else good for good in right]
    table = partial(torch.tensor, dtype=torch.int32)
    qkv, op = torch.randn(40, 3, 2, 64, dtype=dtype), torch.ops.bert_unpad
    settings = (cu_seqlens([10, 10, 20]), 20, 0.125, 0.0, None)
    # Another block may say first that a row is too long, or write what one has written.
    message = "(order must hold sequence, first token, length and 0|longer than max_seqlen|race: )"
    if kernels.wgmma and backend.name == "ptx":
        message = f"({message}|trap$)"
    out, lse = op.varlen_attention(qkv, *settings, table(right))
    with pytest.raises(RuntimeError, match=rf"varlen_attention_backward: .*{message}"):
        op.varlen_attention_backward(out, qkv, out, lse, *settings, table(wrong))
    with pytest.raises(RuntimeError, match=rf"varlen_attention: .*{message}"):
        op.varlen_attention(qkv, *settings, table(wrong))


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
