"""The CUDA attention kernels with position biases, on the model of a block."""

from __future__ import annotations

import pytest
import torch

from bert_unpad import ops
from gpu_model.block_model import POLICIES, Model
from gpu_model.build import compiler
from tests.support.attention_cases import PARTS, random_buckets, random_positions
from tests.support.model_attention import (
    FUSED,
    MMA,
    NAMES,
    WGMMA,
    attention,
    bias_terms,
    compare,
    model,
)
from tests.support.model_checks import assert_every_site_is_needed
from tests.support.op_checks import RNG
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

Parts, Capability = tuple[str, ...], tuple[int, int]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Kernels of head dimension 64: dtypes, and devices that they run on.
KINDS = [
    pytest.param(FP32, MMA, id="float32"),
    pytest.param(BF16, MMA, id="bfloat16"),
    pytest.param(BF16, WGMMA, id="bfloat16-wgmma"),
]
FP16_KINDS = [
    pytest.param(FP16, MMA, id="float16"),
    pytest.param(FP16, WGMMA, id="float16-wgmma"),
]
OF_KIND = pytest.mark.parametrize(("dtype", "device"), KINDS)
OF_ANY_KIND = pytest.mark.parametrize(("dtype", "device"), [*KINDS, *FP16_KINDS])
DISENTANGLED = ("query", "key")
COMBINATIONS = [("table",), ("query",), ("key",), DISENTANGLED, PARTS]


@pytest.fixture(autouse=True)
def kernels():
    kernels = model()
    kernels.configure()
    kernels.set_device(MMA, FUSED)
    return kernels


def lengths_for(dtype: torch.dtype) -> list[int]:
    """Several tiles, a part of one, one token, none."""
    return [70, 0, 1, 33] if dtype == FP32 else [150, 0, 1, 17, 66]


@pytest.mark.parametrize("parts", COMBINATIONS, ids="+".join)
@OF_ANY_KIND
def test_parts(kernels: Model, dtype: torch.dtype, device: Capability, parts: Parts) -> None:
    torch.manual_seed(derived(0))
    kernels.set_device(device, FUSED)
    compare(dtype, lengths_for(dtype), buckets=random_buckets(30, 9), parts=parts, p=0.1)


@pytest.mark.parametrize("head_dim", [32, 96, 128])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_other_head_dims(dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(derived(head_dim))
    options = {"buckets": random_buckets(12, 7), "parts": PARTS, "kv_heads": 1, "p": 0.1}
    compare(dtype, [70, 0, 5], head_dim=head_dim, **options)


@pytest.mark.parametrize("reach", [1, 200])
@pytest.mark.parametrize("window", [(-1, 0), (20, 33), (0, -1)])
@OF_ANY_KIND
def test_windows(
    kernels: Model, dtype: torch.dtype, device: Capability, window: tuple[int, int], reach: int
) -> None:
    torch.manual_seed(derived(1))
    kernels.set_device(device, FUSED)
    buckets = (torch.arange(2 * reach + 1) % 3).int()  # no window sees distances of one bucket only
    options = {"buckets": buckets, "parts": PARTS, "scale": -0.3}
    compare(dtype, lengths_for(dtype), heads=1, window=window, **options)


@OF_KIND
def test_buckets_of_models(kernels: Model, dtype: torch.dtype, device: Capability) -> None:
    torch.manual_seed(derived(2))
    kernels.set_device(device, FUSED)
    lengths = [150] if dtype == FP32 else [300, 40]
    compare(dtype, lengths, heads=1, buckets=ops.t5_buckets(), parts=["table"])
    compare(dtype, lengths, heads=1, buckets=ops.deberta_buckets(64, 32), parts=DISENTANGLED)


@pytest.mark.parametrize("window", [(-1, -1), (40, 10)])
@pytest.mark.parametrize("given", [False, True])
@OF_ANY_KIND
def test_cross_attention(
    kernels: Model, dtype: torch.dtype, device: Capability, given: bool, window: tuple[int, int]
) -> None:
    torch.manual_seed(derived(3))
    kernels.set_device(device, FUSED)
    q_lengths, k_lengths = [3, 0, 90, 17, 4, 30], [70, 5, 33, 129, 0, 80]
    if dtype == FP32:
        q_lengths, k_lengths = [3, 0, 40, 17, 4], [70, 5, 33, 50, 0]
    positions = random_positions(q_lengths, k_lengths) if given else None
    options = {"buckets": random_buckets(25, 9), "parts": PARTS, "positions": positions}
    compare(dtype, q_lengths, k_lengths, kv_heads=1, window=window, p=0.1, **options)


@OF_KIND
def test_positions_as_far_as_they_go(
    kernels: Model, dtype: torch.dtype, device: Capability
) -> None:
    torch.manual_seed(derived(4))
    kernels.set_device(device, FUSED)
    far = 2**31
    positions = torch.tensor([-far, far - 1, 7, 0], dtype=torch.int32)
    compare(dtype, [4], [9], positions=positions, buckets=random_buckets(5, 6), parts=PARTS)


@OF_KIND
def test_large_biases(kernels: Model, dtype: torch.dtype, device: Capability) -> None:
    """exp of a bias alone would be infinite, as it is of rows of a tile that are no queries."""
    torch.manual_seed(derived(5))
    kernels.set_device(device, FUSED)
    q, k, v, dout = (torch.randn(20, 1, 64).to(dtype) for _ in range(4))
    buckets, table = torch.zeros(3, dtype=torch.int32), torch.full((1, 1), 300.0)
    high = attention(q, k, v, dout, [20], [20], bias=(buckets, table, None, None))
    plain = attention(q, k, v, dout, [20], [20])
    for name in NAMES:
        torch.testing.assert_close(high[name], plain[name], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(high["lse"], plain["lse"] + 300)


@OF_KIND
def test_distances_that_must_not_be_seen(
    kernels: Model, dtype: torch.dtype, device: Capability
) -> None:
    torch.manual_seed(derived(6))
    kernels.set_device(device, FUSED)
    q, k, v, dout = (torch.randn(200, 1, 64).to(dtype) for _ in range(4))
    buckets = torch.zeros(2 * 50 + 3, dtype=torch.int32)
    buckets[0] = buckets[-1] = 1
    bias = (buckets, torch.tensor([[0.0], [-torch.inf]]), None, None)
    found = attention(q, k, v, dout, [200], [200], bias=bias)
    expected = attention(q, k, v, dout, [200], [200], window=(50, 50))
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name], rtol=2e-2, atol=2e-2)
    assert found["dtable"][1] == 0


@OF_KIND
def test_queries_without_keys_and_keys_without_queries(
    kernels: Model, dtype: torch.dtype, device: Capability
) -> None:
    torch.manual_seed(derived(7))
    kernels.set_device(device, FUSED)
    q, dout = (torch.randn(5, 2, 64).to(dtype) for _ in range(2))
    kv, buckets = torch.randn(4, 2, 2, 64).to(dtype), random_buckets(3, 4)
    terms = bias_terms(dtype, q, kv, buckets, PARTS)
    bias = (buckets, *(terms[name] for name in PARTS))
    results = attention(q, *kv.unbind(1), dout, [5, 0], [0, 4], bias=bias)
    for name in [*NAMES, "dtable", "dquery", "dkey"]:
        assert torch.equal(results[name], torch.zeros_like(results[name])), name


def test_a_batch_without_tokens() -> None:
    empty, buckets = torch.empty(0, 2, 64, dtype=BF16), torch.zeros(1, dtype=torch.int32)
    bias = (buckets, torch.randn(1, 2), None, None)
    results = attention(empty, empty, empty, empty, [0], [0], bias=bias)
    assert torch.equal(results["dtable"], torch.zeros(1, 2))


@OF_KIND
def test_strided_parts(kernels: Model, dtype: torch.dtype, device: Capability) -> None:
    torch.manual_seed(derived(8))
    kernels.set_device(device, FUSED)
    q, k, v, dout = (torch.randn(49, 2, 64).to(dtype) for _ in range(4))
    buckets = random_buckets(12, 5)
    query, key = torch.randn(2, 49, 3, 2, 7).to(dtype)[:, :, 1, :, 1:6]
    run = [q, k, v, dout, [40, 9], [40, 9]]
    strided = attention(*run, bias=(buckets, None, query, key))
    plain = attention(*run, bias=(buckets, None, query.contiguous(), key.contiguous()))
    assert all(torch.equal(strided[name], x) for name, x in plain.items())


@pytest.mark.parametrize("entry", [-1, 3])
@pytest.mark.parametrize("parts", [("table",), DISENTANGLED], ids="+".join)
def test_impossible_buckets_stop_the_kernel(parts: tuple[str, ...], entry: int) -> None:
    x, good = torch.randn(20, 2, 64, dtype=BF16), torch.tensor([0, 1, 2], dtype=torch.int32)
    terms = bias_terms(BF16, x, x[:, None], good, parts)
    bad = torch.tensor([0, 1, entry], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="bias_buckets must be at least 0 and below"):
        attention(x, x, x, None, [20], [20], bias=(bad, *(terms.get(name) for name in PARTS)))


def inputs(dtype: torch.dtype, lengths: list[int], head_dim: int) -> tuple[list, dict]:
    total = sum(lengths)
    q, dout = (torch.randn(total, 2, head_dim).to(dtype) for _ in range(2))
    kv, buckets = torch.randn(total, 2, 1, head_dim).to(dtype), random_buckets(20, 6)
    terms = bias_terms(dtype, q, kv, buckets, PARTS)
    options = {"window": (60, 70), "bias": (buckets, *(terms[name] for name in PARTS))}
    return [q, *kv.unbind(1), dout, lengths, lengths], options


@OF_KIND
def test_same_bits_from_every_order_of_threads(
    kernels: Model, dtype: torch.dtype, device: Capability
) -> None:
    torch.manual_seed(derived(9))
    kernels.set_device(device, FUSED)
    lengths = [50, 16] if dtype == FP32 else [129, 16, 70]
    run, options = inputs(dtype, lengths, 64 if device == WGMMA else 32)
    first = attention(*run, p=0.1, rng=RNG, **options)
    for policy in POLICIES:
        kernels.configure(policy, 1)
        again = attention(*run, p=0.1, rng=RNG, **options)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(("device", "head_dim"), [(MMA, 32), (WGMMA, 64)], ids=["mma", "wgmma"])
def test_same_bits_from_every_schedule(kernels: Model, device: Capability, head_dim: int) -> None:
    torch.manual_seed(derived(10))
    kernels.set_device(device, FUSED)
    lengths = [20, 140, 0, 64, 100, 7, 65]
    run, options = inputs(BF16, lengths, head_dim)
    as_they_lie = attention(*run, p=0.1, rng=RNG, **options)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups = [(1, 140, 140), (1, 100, 100), (2, 65, 65), (3, 20, 20)]
    other = attention(*run, p=0.1, rng=RNG, order=order, groups=groups, **options)
    assert all(torch.equal(x, other[name]) for name, x in as_they_lie.items())


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_every_barrier_and_wait_is_needed(kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(11))
    run, options = inputs(dtype, [70, 20] if dtype == FP32 else [200, 40], 32)
    sites = assert_every_site_is_needed(
        kernels, lambda: attention(*run, **options), policies=["in_order"]
    )
    assert len(sites) >= 9


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_operands_are_read_without_bank_conflicts(kernels, head_dim: int) -> None:
    x, buckets = torch.randn(130, 1, head_dim, dtype=BF16), torch.zeros(3, dtype=torch.int32)
    kernels.statistics(reset=True)
    attention(x, x, x, x, [130], [130], bias=(buckets, torch.randn(1, 1), None, None))
    assert kernels.statistics().load_matrices > 0
    assert kernels.statistics().bank_conflict_cycles == 0
