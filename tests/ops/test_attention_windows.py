"""Attention with windows, grouped heads and positions of queries, against the plain reference."""

import sys
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from tests.support.attention_cases import (
    DTYPES,
    MODELS,
    Case,
    Kernels,
    compare,
    kinds,
    random_positions,
    with_gradients,
)
from tests.support.backends import Backend
from tests.support.op_checks import (
    RNG,
    assert_compiles_to_the_same_bits,
    cu_seqlens,
)
from tests.support.seeds import derived

CPU, CUDA = pytest.mark.backends("cpu"), pytest.mark.backends("cuda")
# Around tiles of 64 keys and steps of 16 and 32, and without bounds.
WINDOWS = [(-1, 0), (0, -1), (0, 1), (5, 9), (64, 64), (-1, 30), (31, -1), (600, 600)]
FP32_AND_BF16 = {"dtypes": DTYPES[:2]}
# Windows and grouped heads take the same kernels in a batch of any size.
OF_ANY_KIND = kinds("fused", "wgmma_fused")
OF_KIND = kinds("fused", "wgmma_fused", **FP32_AND_BF16)


def lengths_for(backend: Backend, dtype: torch.dtype) -> list[int]:
    """Several tiles, a part of one, one token, none."""
    if backend.name == "cuda":
        return [200, 0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513]
    on_the_model = backend.name in MODELS and dtype == torch.float32
    return [70, 0, 1, 33] if on_the_model else [200, 0, 1, 17, 129]


@pytest.mark.parametrize("window", WINDOWS)
@OF_ANY_KIND
def test_windows(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, window: tuple[int, int]
) -> None:
    torch.manual_seed(derived(0))
    compare(Case(lengths_for(backend, dtype), window=window, p=0.1), dtype, backend.device)


@pytest.mark.parametrize("window", [(80, 1), (-1, 0), (70, -1)])
def test_windows_that_end_anywhere_in_a_tile(backend: Backend, window: tuple[int, int]) -> None:
    """Queries are the last keys, and see at least one full tile of them or nearly so."""
    torch.manual_seed(derived(21))
    sizes = list(range(120, 185))
    case = Case(sizes, [17] * len(sizes), heads=1, head_dim=32, window=window, p=0.1)
    compare(case, torch.bfloat16, backend.device)


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "head_dim", [32, 96, 128, *(pytest.param(n, marks=CPU) for n in (1, 33, 200, 256))]
)
@kinds("fused", **FP32_AND_BF16)
def test_head_dims(backend: Backend, kernels: Kernels, dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(derived(head_dim))
    lengths = lengths_for(backend, dtype)
    case = Case(lengths, kv_heads=1, head_dim=head_dim, window=(20, 40), p=0.1)
    compare(case, dtype, backend.device)


@pytest.mark.sanitizer
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (10, 30)])
@kinds("fused")
def test_grouped_heads(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, window: tuple[int, int], heads: int,
    kv_heads: int,
) -> None:  # fmt: skip
    torch.manual_seed(derived(1))
    several = 40 if backend.name in MODELS and dtype == torch.float32 else 130
    case = Case([several, 0, 5], heads=heads, kv_heads=kv_heads, head_dim=32, window=window, p=0.1)
    compare(case, dtype, backend.device)


@pytest.mark.sanitizer
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 10), (7, -1)])
@pytest.mark.parametrize("given", [False, True])
@kinds("split", "wgmma_split")
def test_cross_attention(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, given: bool, window: tuple[int, int]
) -> None:
    torch.manual_seed(derived(2))
    q_lengths, k_lengths = [3, 0, 90, 17, 4, 70], [70, 5, 33, 129, 0, 150]
    if backend.name in MODELS and dtype == torch.float32:
        q_lengths, k_lengths = [3, 0, 40, 17, 4], [70, 5, 33, 50, 0]
    positions = random_positions(q_lengths, k_lengths) if given else None
    case = Case(k_lengths, q_lengths, kv_heads=1, window=window, p=0.1, positions=positions)
    compare(case, dtype, backend.device)


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("window", [(-1, -1), (100, 3), (-1, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_of_several_parts(
    backend: Backend, dtype: torch.dtype, window: tuple[int, int]
) -> None:
    torch.manual_seed(derived(3))
    compare(Case([1700, 30, 769], window=window, kv_heads=1, head_dim=16, p=0.1), dtype)
    q_lengths, k_lengths = [900, 5, 40], [100, 1500, 2000]
    positions = random_positions(q_lengths, k_lengths)
    compare(Case(k_lengths, q_lengths, head_dim=16, window=window, positions=positions), dtype)
    # The forward pass in bf16 has parts from 2,049 keys on; with (-1, 0) what a block of queries
    # sees ends where a part does.
    compare(Case([2112], [1408], heads=1, kv_heads=1, head_dim=16, window=window), dtype)


@pytest.mark.slow
@pytest.mark.backends("cuda")
@pytest.mark.parametrize("window", [(64, 64), (-1, 0)])
@OF_ANY_KIND
def test_long_sequences(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, window: tuple[int, int]
) -> None:
    torch.manual_seed(derived(2))
    compare(Case([8192, 3, 700], heads=1, kv_heads=1, window=window), dtype, backend.device)


@OF_ANY_KIND
def test_a_query_that_sees_only_itself(
    backend: Backend, kernels: Kernels, dtype: torch.dtype
) -> None:
    torch.manual_seed(derived(8))
    case = Case([20, 0, 60], window=(0, 0))
    inputs, dout = case.inputs(dtype), case.dout(dtype)
    out, dqkv = with_gradients(case.ours, backend.put(inputs), backend.put(dout))
    assert torch.equal(out.cpu(), inputs["qkv"][:, 2])
    expected = torch.zeros_like(dqkv)
    expected[:, 2] = dout
    torch.testing.assert_close(dqkv, expected, atol=32 * torch.finfo(dtype).eps, rtol=0)


@OF_KIND
def test_queries_that_see_no_key_give_zeros(
    backend: Backend, kernels: Kernels, dtype: torch.dtype
) -> None:
    """Positions before all keys, after all keys, and as far away as they can be; then some that see
    keys, as the score gradients of one query alone may cancel to less than their roundings."""
    far = 2**31
    for last in ([], [8, 9, 10, 11]):
        positions = torch.tensor([-9, -1, 15, far - 1, -far, *last], dtype=torch.int32)
        case = Case([12], [len(positions)], window=(3, 0), positions=positions)
        inputs, dout = backend.put((case.inputs(dtype), case.dout(dtype)))
        out, dq, dkv = with_gradients(case.ours, inputs, dout)
        seen = 5 if last else 12
        for zeros in (out[:5], dq[:5], dkv[:seen]):
            assert torch.equal(zeros, torch.zeros_like(zeros))
        settings = (12, 1.0, 0.0, None, None, None, 3, 0, backend.put(positions))
        lengths = [cu_seqlens([n], backend.device) for n in (len(positions), 12)]
        run = torch.ops.bert_unpad.varlen_cross_attention
        _, lse = run(inputs["q"], inputs["kv"], *lengths, len(positions), *settings)
        assert (lse[:, :5] == -torch.inf).all()
    torch.manual_seed(derived(3))
    compare(case, dtype, backend.device)


@OF_KIND
def test_windows_as_far_as_they_go(backend: Backend, kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(4))
    far = 2**31
    positions = torch.tensor([-far, far - 1, 7, 0], dtype=torch.int32)
    for window in ((2**62, 2**62), (2**62, 0), (far - 1, far)):
        compare(Case([9], [4], window=window, positions=positions), dtype, backend.device)


@OF_KIND
def test_a_window_that_holds_everything_is_none(
    backend: Backend, kernels: Kernels, dtype: torch.dtype
) -> None:
    torch.manual_seed(derived(4))
    lengths = [70, 30] if backend.name in MODELS else [200, 130]
    batch = VarlenBatch.from_lengths(lengths, backend.device)
    qkv = backend.put(torch.randn(batch.total, 3, 2, 64).to(dtype))
    run = partial(ops.varlen_attention, qkv, batch, dropout_p=0.1, rng=backend.put(RNG))
    # Some of a GPU's kernels take other tiles, in which weights are rounded otherwise.
    limit = 0 if backend.name == "cpu" else 3 * torch.finfo(dtype).eps * qkv[:, 2].abs().max()
    most = max(lengths) - 1
    for window in ((most, 2**40), (-1, sys.maxsize), (sys.maxsize, -1), (sys.maxsize,) * 2):
        assert ((run(window=window) - run()).abs() <= limit).all(), window


def test_grouped_form_of_equal_heads_is_the_other_form(backend: Backend) -> None:
    torch.manual_seed(derived(5))
    batch = VarlenBatch.from_lengths([20, 70], backend.device)
    qkv = backend.put(torch.randn(90, 3, 2, 64))
    grouped = ops.varlen_attention(qkv.flatten(1, 2), batch, num_heads=2, window=(9, 9))
    assert torch.equal(grouped, ops.varlen_attention(qkv, batch, window=(9, 9)))


@OF_KIND
def test_masks_are_those_without_a_window(
    backend: Backend, kernels: Kernels, dtype: torch.dtype
) -> None:
    """Values are one-hot: an output is the row of kept weights, of which a window sees some."""
    size = 64
    qkv = torch.zeros(size, 3, 1, size, dtype=dtype)
    qkv[:, 2, 0] = torch.eye(size)
    batch, rng = VarlenBatch.from_lengths([size], backend.device), backend.put(RNG)
    run = partial(ops.varlen_attention, backend.put(qkv), batch, dropout_p=0.5, rng=rng)
    distance = torch.arange(size) - torch.arange(size)[:, None]
    inside = backend.put((distance >= -10) & (distance <= 20))
    assert torch.equal(run(window=(10, 20))[:, 0] != 0, (run()[:, 0] != 0) & inside)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@OF_KIND
def test_keys_outside_of_all_windows_are_not_read(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, backward: bool
) -> None:
    """They are NaN here, and so are the queries that no key of the rest meets."""
    torch.manual_seed(derived(7))
    case = Case([400], [400], heads=1, window=(10, 10))
    inputs, dout = case.inputs(dtype), case.dout(dtype)
    # The tiles of queries from 128 on are NaN; they see keys from 118 on, in tiles from 64 on.
    for x in (inputs["q"], dout) if backward else (inputs["kv"],):
        x[128:] = torch.nan
    if backward:
        results = with_gradients(case.ours, backend.put(inputs), backend.put(dout))
    else:
        results = [case.ours(backend.put(inputs))]
    assert all(x[:64].isfinite().all() for x in results)


def test_strided_input(backend: Backend) -> None:
    torch.manual_seed(derived(6))
    width, head_dim = (8, 5) if backend.name == "cpu" else (48, 32)
    qkv = backend.put(torch.randn(30, 2, 4, width))[:, 1, :, :head_dim]
    batch = VarlenBatch.from_lengths([30], backend.device)
    results = []
    for x in (qkv.contiguous().requires_grad_(), qkv.detach().requires_grad_()):
        out = ops.varlen_attention(x, batch, num_heads=2, window=(3, 4))
        out.square().sum().backward()
        results.append((out, x.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("given", [False, True])
@OF_KIND
def test_same_bits_every_time(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, given: bool
) -> None:
    torch.manual_seed(derived(8))
    lengths = [1600, 40, 900]
    if backend.name in MODELS:
        lengths = [50, 16] if dtype == torch.float32 else [129, 16, 70]
    positions = random_positions(lengths, lengths) if given else None
    heads = {"heads": 2, "kv_heads": 1, "head_dim": 64 if kernels.wgmma else 32}
    case = Case(lengths, lengths, window=(20, 40), p=0.1, positions=positions, **heads)
    inputs, dout = backend.put((case.inputs(dtype), case.dout(dtype)))
    backend.assert_same_bits(partial(with_gradients, case.ours, inputs, dout))


@pytest.mark.parametrize("schedule", ["list", "groups"])
@OF_ANY_KIND
def test_the_schedule_changes_no_bit(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, schedule: str
) -> None:
    torch.manual_seed(derived(9))
    lengths = lengths_for(backend, dtype)
    batch = VarlenBatch.from_lengths(lengths, backend.device)
    case = Case(lengths, heads=2, kv_heads=1, window=(30, 40), p=0.1)
    inputs, dout = backend.put((case.inputs(dtype), case.dout(dtype)))
    run = partial(case.ours, batch=batch, schedule=schedule)
    expected = with_gradients(case.ours, inputs, dout)
    for a, b in zip(with_gradients(run, inputs, dout), expected, strict=True):
        assert torch.equal(a, b)


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
