"""Position biases of attention: the kernels against the reference, buckets against transformers."""

from functools import partial

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
    DTYPES,
    MODELS,
    PARTS,
    Case,
    Kernels,
    compare,
    kinds,
    random_buckets,
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

CPU, ALL_BUT_MODELS = pytest.mark.backends("cpu"), pytest.mark.backends("cpu", "cuda")
DISENTANGLED = ("query", "key")
COMBINATIONS = [*((part,) for part in PARTS), DISENTANGLED, PARTS]
# A bias takes the same kernels in a batch of any size.
OF_ANY_KIND = kinds("fused", "wgmma_fused")
OF_KIND = kinds("fused", "wgmma_fused", dtypes=DTYPES[:2])


def lengths_for(backend: Backend, dtype: torch.dtype) -> list[int]:
    """Several tiles, a part of one, one token, none."""
    if backend.name == "cuda":
        return [200, 0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513]
    on_the_model = backend.name in MODELS and dtype == torch.float32
    return [70, 0, 1, 33] if on_the_model else [130, 0, 1, 17, 70]


@pytest.mark.parametrize("parts", COMBINATIONS, ids="+".join)
@OF_ANY_KIND
def test_parts(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, parts: tuple[str, ...]
) -> None:
    torch.manual_seed(derived(0))
    options = {"buckets": random_buckets(40, 11), "parts": parts, "p": 0.1}
    compare(Case(lengths_for(backend, dtype), **options), dtype, backend.device)


@pytest.mark.sanitizer
@pytest.mark.parametrize("head_dim", [32, 96, 128, pytest.param(16, marks=CPU)])
@kinds("fused")
def test_head_dims_and_grouped_heads(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, head_dim: int
) -> None:
    torch.manual_seed(derived(head_dim))
    heads = {"heads": 4, "kv_heads": 2} if backend.name == "cuda" else {"heads": 2, "kv_heads": 1}
    options = {"buckets": random_buckets(12, 7), "parts": PARTS, "p": 0.1, **heads}
    compare(Case([70, 0, 5], head_dim=head_dim, **options), dtype, backend.device)


@pytest.mark.sanitizer
@pytest.mark.parametrize("reach", [1, 200, pytest.param(0, marks=ALL_BUT_MODELS)])
@pytest.mark.parametrize(
    "window", [(-1, 0), (20, 33), (0, -1), pytest.param((-1, -1), marks=ALL_BUT_MODELS)]
)
@OF_ANY_KIND
def test_reach_and_window(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, window: tuple[int, int], reach: int
) -> None:
    torch.manual_seed(derived(1))
    buckets, parts = (torch.arange(2 * reach + 1) % 3).int(), PARTS
    # No window sees distances of one bucket only: a constant, which the softmax does not see, and
    # whose gradient is all rounding; the key's part differs from key to key.
    if reach == 0:
        parts = ("key",)
    lengths = lengths_for(backend, dtype)
    options = {"heads": 1, "window": window, "buckets": buckets, "parts": parts, "scale": -0.3}
    compare(Case(lengths, **options), dtype, backend.device)


@OF_KIND
def test_buckets_of_models(backend: Backend, kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(2))
    lengths = [150] if dtype == torch.float32 else [300, 40]
    for buckets, parts in (
        (ops.t5_buckets(), ["table"]),
        (ops.deberta_buckets(64, 32), DISENTANGLED),
    ):
        compare(Case(lengths, heads=1, buckets=buckets, parts=parts), dtype, backend.device)


@pytest.mark.sanitizer
@pytest.mark.parametrize("window", [(-1, -1), (40, 10)])
@pytest.mark.parametrize("given", [False, True])
@OF_ANY_KIND
def test_cross_attention(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, given: bool, window: tuple[int, int]
) -> None:
    torch.manual_seed(derived(2))
    q_lengths, k_lengths = [3, 0, 90, 17, 4, 30], [70, 5, 33, 129, 0, 80]
    if backend.name in MODELS and dtype == torch.float32:
        q_lengths, k_lengths = [3, 0, 40, 17, 4], [70, 5, 33, 50, 0]
    positions = random_positions(q_lengths, k_lengths) if given else None
    options = {"buckets": random_buckets(25, 9), "parts": PARTS, "positions": positions}
    case = Case(k_lengths, q_lengths, kv_heads=1, window=window, p=0.1, **options)
    compare(case, dtype, backend.device)


@OF_KIND
def test_positions_as_far_as_they_go(
    backend: Backend, kernels: Kernels, dtype: torch.dtype
) -> None:
    torch.manual_seed(derived(4))
    far = 2**31
    positions = torch.tensor([-far, far - 1, 7, 0], dtype=torch.int32)
    case = Case([9], [4], positions=positions, buckets=random_buckets(5, 6), parts=PARTS)
    compare(case, dtype, backend.device)


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_of_several_parts(backend: Backend, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(3))
    options = {"buckets": random_buckets(60, 9), "parts": PARTS, "kv_heads": 1}
    compare(Case([900, 30], head_dim=16, **options), dtype)


@pytest.mark.slow
@pytest.mark.backends("cuda")
@OF_ANY_KIND
def test_long_sequences(backend: Backend, kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(2))
    options = {"buckets": ops.t5_buckets(), "parts": ("table",)}
    compare(Case([8192, 3, 700], heads=1, kv_heads=1, **options), dtype, backend.device)


@OF_KIND
def test_large_biases(backend: Backend, kernels: Kernels, dtype: torch.dtype) -> None:
    """exp of a bias alone would be infinite, as it is of rows of a tile that are no queries."""
    torch.manual_seed(derived(5))
    qkv, cu = backend.put((torch.randn(20, 3, 1, 64).to(dtype), cu_seqlens([20])))
    bias = backend.put((torch.zeros(3, dtype=torch.int32), torch.full((1, 1), 300.0), None, None))
    dout = backend.put(torch.randn(20, 1, 64).to(dtype))
    settings, op, found = (
        (cu, 20, 0.125, 0.0, None, None, None, 0, -1, -1),
        torch.ops.bert_unpad,
        [],
    )
    for parts, of_table in ((bias, True), (bias, False), ([None] * 4, False)):
        out, lse = op.varlen_attention(qkv, *settings, *parts)
        more = (*settings, *parts, of_table)
        dqkv, dtable, *_ = op.varlen_attention_backward(dout, qkv, out, lse, *more)
        assert not of_table or dtable.isfinite().all()
        found.append((out, dqkv, lse))
    *biased, (*plain, plain_lse) = found
    for *high, high_lse in biased:
        for a, b in zip(high, plain, strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(high_lse, plain_lse + 300)


@pytest.mark.parametrize("tokens", [200, *(pytest.param(n, marks=CPU) for n in (600, 1700, 2500))])
@OF_KIND
def test_distances_that_must_not_be_seen(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, tokens: int
) -> None:
    """Where the keys come in parts, whole parts of a row may be minus infinity."""
    torch.manual_seed(derived(6))
    buckets = torch.zeros(2 * 50 + 3, dtype=torch.int32)
    buckets[0] = buckets[-1] = 1
    head_dim = 64 if tokens == 200 else 16
    hidden = Case([tokens], heads=1, head_dim=head_dim, buckets=buckets, parts=("table",))
    window = Case([tokens], heads=1, head_dim=head_dim, window=(50, 50))
    inputs = backend.put(window.inputs(dtype))
    dout = backend.put(window.dout(dtype))
    table = backend.put(torch.tensor([[0.0], [-torch.inf]]))
    *found, dtable = with_gradients(hidden.ours, {**inputs, "table": table}, dout)
    assert dtable[1] == 0
    for a, b in zip(found, with_gradients(window.ours, inputs, dout), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@OF_KIND
def test_queries_without_keys_and_keys_without_queries(
    backend: Backend, kernels: Kernels, dtype: torch.dtype
) -> None:
    torch.manual_seed(derived(7))
    case = Case([0, 4], [5, 0], buckets=random_buckets(3, 4), parts=PARTS)
    inputs, dout = backend.put((case.inputs(dtype), case.dout(dtype)))
    for x in with_gradients(case.ours, inputs, dout):
        assert torch.equal(x, torch.zeros_like(x))


def test_a_batch_without_tokens(backend: Backend) -> None:
    case = Case([0], buckets=torch.zeros(1, dtype=torch.int32), parts=("table",))
    inputs, dout = backend.put((case.inputs(torch.float32), case.dout(torch.float32)))
    *_, dtable = with_gradients(case.ours, inputs, dout)
    assert torch.equal(dtable, torch.zeros_like(dtable))


def test_a_bias_of_zeros_is_none(backend: Backend) -> None:
    torch.manual_seed(derived(4))
    batch = VarlenBatch.from_lengths([70, 0, 17], backend.device)
    qkv = backend.put(torch.randn(87, 3, 2, 32))
    bias = ops.PositionBias(*backend.put((ops.t5_buckets(), torch.zeros(32, 2))))
    plain = ops.varlen_attention(qkv, batch)
    assert torch.equal(ops.varlen_attention(qkv, batch, position_bias=bias), plain)


@OF_KIND
def test_strided_parts(backend: Backend, kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(8))
    case = Case([40, 9], buckets=random_buckets(12, 5), parts=PARTS)
    inputs, dout = backend.put((case.inputs(dtype), case.dout(dtype)))
    spread = dict(inputs)
    for name in PARTS[1:]:  # between other columns and rows
        wide = inputs[name].new_full((49, 3, 2, 7), torch.nan)
        spread[name] = wide[:, 1, :, 1:6].copy_(inputs[name])
    spread["table"] = inputs["table"].repeat_interleave(2, dim=-1)[:, ::2]
    assert not any(spread[name].is_contiguous() for name in PARTS)
    apart, together = (with_gradients(case.ours, x, dout) for x in (spread, inputs))
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))
    # Columns that lie apart are copied.
    spread |= {n: inputs[n].repeat_interleave(2, dim=-1)[..., ::2] for n in PARTS[1:]}
    assert torch.equal(case.ours(spread), together[0])


def test_a_table_of_another_dtype(backend: Backend) -> None:
    torch.manual_seed(derived(6))
    case = Case([40, 9], buckets=random_buckets(12, 5), parts=("table",))
    inputs, dout = backend.put((case.inputs(torch.float32), case.dout(torch.float32)))
    low = inputs["table"].bfloat16()
    got = with_gradients(case.ours, {**inputs, "table": low}, dout)
    want = with_gradients(case.ours, {**inputs, "table": low.float()}, dout)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[2], want[2].bfloat16())


@OF_KIND
def test_same_bits_every_time(backend: Backend, kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(9))
    lengths = [1600, 40, 900]
    if backend.name in MODELS:
        lengths = [50, 16] if dtype == torch.float32 else [129, 16, 70]
    options = {"buckets": random_buckets(20, 6), "parts": PARTS, "window": (60, 70), "p": 0.1}
    head_dim = 64 if kernels.wgmma else 32
    case = Case(lengths, kv_heads=1, head_dim=head_dim, **options)
    inputs, dout = backend.put((case.inputs(dtype), case.dout(dtype)))
    backend.assert_same_bits(partial(with_gradients, case.ours, inputs, dout))


@pytest.mark.parametrize("schedule", ["list", "groups"])
@OF_KIND
def test_the_schedule_changes_no_bit(
    backend: Backend, kernels: Kernels, dtype: torch.dtype, schedule: str
) -> None:
    torch.manual_seed(derived(10))
    lengths = lengths_for(backend, dtype)
    batch = VarlenBatch.from_lengths(lengths, backend.device)
    options = {"buckets": random_buckets(20, 6), "parts": PARTS, "window": (60, 70), "p": 0.1}
    case = Case(lengths, kv_heads=1, **options)
    inputs, dout = backend.put((case.inputs(dtype), case.dout(dtype)))
    run = partial(case.ours, batch=batch, schedule=schedule)
    expected = with_gradients(case.ours, inputs, dout)
    for a, b in zip(with_gradients(run, inputs, dout), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.backends(*MODELS)
@pytest.mark.parametrize("entry", [-1, 3])
@pytest.mark.parametrize("parts", [("table",), DISENTANGLED], ids="+".join)
def test_impossible_buckets_stop_the_kernel(
    backend: Backend, parts: tuple[str, ...], entry: int
) -> None:
    bad = torch.tensor([0, 1, 2], dtype=torch.int32)
    case = Case([20], buckets=bad, parts=parts)
    inputs = case.inputs(torch.bfloat16)
    bad[2] = entry
    with pytest.raises(RuntimeError, match="bias_buckets must be at least 0 and below"):
        case.ours(inputs)


@ALL_BUT_MODELS
@pytest.mark.parametrize("parts", [("table",), PARTS], ids="+".join)
def test_opcheck(backend: Backend, parts: tuple[str, ...]) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=backend.device, requires_grad=True)

    cu, op = cu_seqlens([7, 0, 13], backend.device), torch.ops.bert_unpad
    cu_q, buckets, rng = backend.put((cu_seqlens([2, 0, 3]), random_buckets(4, 3), RNG))
    rows = {"table": (3, 2), "query": (20, 2, 3), "key": (20, 2, 3)}
    bias = [random(*rows[n]) if n in parts else None for n in PARTS]
    args = (random(20, 3, 2, 32), cu, 13, 0.25, 0.1, rng, None, None, 0, -1, 5, buckets, *bias)
    opcheck(op.varlen_attention, args)
    if "query" in parts:
        bias[1] = random(5, 2, 3)
    args = (random(5, 2, 32), random(20, 2, 2, 32), cu_q, cu, 3, 13, 0.25, 0.1, rng, None, None)
    positions = backend.put(torch.tensor([1, 6, 0, 5, 12], dtype=torch.int32))
    opcheck(op.varlen_cross_attention, (*args, -1, -1, positions, buckets, *bias))


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
