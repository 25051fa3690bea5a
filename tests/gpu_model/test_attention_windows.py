"""The CUDA attention kernels with windows, grouped heads and positions, on the model of a block."""

from __future__ import annotations

import pytest
import torch

from gpu_model.block_model import POLICIES
from gpu_model.build import compiler
from tests.support.attention_cases import random_positions
from tests.support.model_attention import FUSED, MMA, NAMES, SPLIT, WGMMA, attention, compare, model
from tests.support.model_checks import assert_every_site_is_needed
from tests.support.op_checks import RNG
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

# A batch that would fill the device: windows and groups take the same kernels there.
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [FP32, BF16, FP16]
# Kernels of head dimension 64: dtypes, and devices that they run on.
KINDS = [
    pytest.param(FP32, MMA, id="float32"),
    pytest.param(BF16, MMA, id="bfloat16"),
    pytest.param(BF16, WGMMA, id="bfloat16-wgmma"),
]
OF_KIND = pytest.mark.parametrize(("dtype", "device"), KINDS)
# Around tiles of 64 keys and steps of 16 and 32, and without bounds.
WINDOWS = [(-1, 0), (0, -1), (0, 1), (5, 9), (64, 64), (-1, 30), (31, -1), (500, 500)]


@pytest.fixture(autouse=True)
def kernels():
    kernels = model()
    kernels.configure()
    kernels.set_device(MMA, FUSED)
    kernels.statistics(reset=True)
    return kernels


def lengths_for(dtype: torch.dtype) -> list[int]:
    """Several tiles, a part of one, one token, none."""
    return [70, 0, 1, 33] if dtype == FP32 else [200, 0, 1, 17, 129]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows(dtype, window):
    torch.manual_seed(derived(20))
    compare(dtype, lengths_for(dtype), window=window, p=0.1)


@pytest.mark.parametrize("window", [(80, 1), (-1, 0), (70, -1)])
def test_windows_that_end_anywhere_in_a_tile(window):
    """Queries are the last keys, and see at least one full tile of them or nearly so."""
    torch.manual_seed(derived(21))
    sizes = list(range(120, 185))
    compare(BF16, [17] * len(sizes), sizes, heads=1, head_dim=32, window=window, p=0.1)


@pytest.mark.parametrize("head_dim", [32, 96, 128])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_other_head_dims(dtype, head_dim):
    torch.manual_seed(derived(head_dim))
    compare(dtype, lengths_for(dtype), kv_heads=1, head_dim=head_dim, window=(20, 40), p=0.1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (10, 30)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads(dtype, window, heads, kv_heads):
    torch.manual_seed(derived(1))
    lengths = [40, 0, 5] if dtype == FP32 else [130, 0, 5]
    compare(dtype, lengths, heads=heads, kv_heads=kv_heads, head_dim=32, window=window, p=0.1)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 10), (7, -1)])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("dtype", "device"), [*KINDS, pytest.param(FP16, MMA, id="float16")])
def test_cross_attention(kernels, dtype, device, given, window):
    torch.manual_seed(derived(2))
    kernels.set_device(device, SPLIT)
    q_lengths, k_lengths = [3, 0, 90, 17, 4, 70], [70, 5, 33, 129, 0, 150]
    if dtype == FP32:
        q_lengths, k_lengths = [3, 0, 40, 17, 4], [70, 5, 33, 50, 0]
    positions = random_positions(q_lengths, k_lengths) if given else None
    options = {"window": window, "positions": positions}
    compare(dtype, q_lengths, k_lengths, kv_heads=1, p=0.1, **options)


@OF_KIND
def test_queries_that_see_no_key(kernels, dtype, device):
    """Positions before all keys, after all keys, and as far away as they can be."""
    kernels.set_device(device, FUSED)
    far = 2**31
    positions = torch.tensor([-9, -1, 6, far - 1, -far, 4], dtype=torch.int32)
    q, dout = (torch.randn(6, 2, 64).to(dtype) for _ in range(2))
    k, v = (torch.randn(5, 2, 64).to(dtype) for _ in range(2))
    options = {"window": (1, 0), "positions": positions}
    results = attention(q, k, v, dout, [6], [5], **options)
    assert results["out"][:5].eq(0).all()
    assert results["dq"][:5].eq(0).all()
    assert results["lse"][:, :5].eq(-torch.inf).all()
    assert results["dv"][:3].eq(0).all()
    assert torch.isfinite(results["out"]).all()
    torch.manual_seed(derived(3))
    compare(dtype, [6], [5], **options)


@OF_KIND
def test_windows_as_far_as_they_go(kernels, dtype, device):
    """The binding hands on at most 2^32."""
    kernels.set_device(device, FUSED)
    torch.manual_seed(derived(4))
    far = 2**31
    positions = torch.tensor([-far, far - 1, 7, 0], dtype=torch.int32)
    for window in ((2**32, 2**32), (2**32, 0), (far - 1, far)):
        compare(dtype, [4], [9], window=window, positions=positions)


@OF_KIND
def test_a_query_that_sees_only_itself(kernels, dtype, device):
    torch.manual_seed(derived(5))
    kernels.set_device(device, FUSED)
    q, k, v, dout = (torch.randn(80, 1, 64).to(dtype) for _ in range(4))
    results = attention(q, k, v, dout, [20, 60], [20, 60], window=(0, 0))
    assert torch.equal(results["out"], v)
    torch.testing.assert_close(results["dv"], dout)


@OF_KIND
def test_masks_are_those_without_a_window(kernels, dtype, device):
    """Values are one-hot: an output is the row of kept weights, of which a window sees some."""
    torch.manual_seed(derived(6))
    kernels.set_device(device, FUSED)
    size = 64
    q, k = (torch.zeros(size, 1, size, dtype=dtype) for _ in range(2))
    v = torch.eye(size, dtype=dtype)[:, None]

    def kept(**options):
        return attention(q, k, v, None, [size], [size], p=0.5, rng=RNG, **options)["out"][:, 0] != 0

    distance = torch.arange(size) - torch.arange(size)[:, None]
    inside = (distance >= -10) & (distance <= 20)
    assert torch.equal(kept(window=(10, 20)), kept() & inside)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@OF_KIND
def test_keys_outside_of_all_windows_are_not_read(kernels, dtype, device, backward):
    """They are NaN here, and so are the queries that no key of the rest meets."""
    torch.manual_seed(derived(7))
    kernels.set_device(device, FUSED)
    q, k, v, dout = (torch.randn(400, 1, 64).to(dtype) for _ in range(4))
    # The tiles of queries from 128 on are NaN; they see keys from 118 on, in tiles from 64 on.
    for x in (q, dout) if backward else (k, v):
        x[128:] = torch.nan
    results = attention(q, k, v, dout if backward else None, [400], [400], window=(10, 10))
    if backward:
        assert all(torch.isfinite(results[name][:64]).all() for name in NAMES)
    else:
        assert torch.isfinite(results["out"][:64]).all()


@pytest.mark.parametrize(
    ("device", "head_dim", "share"),
    # A warp skips steps of 16 keys or queries, a warpgroup tiles of 64.
    [pytest.param(MMA, 32, 0.15, id="warps"), pytest.param(WGMMA, 64, 0.3, id="warpgroups")],
)
def test_work_follows_the_window(kernels, device, head_dim, share):
    kernels.set_device(device, FUSED)
    q, k, v, dout = (torch.randn(600, 1, head_dim).to(BF16) for _ in range(4))

    def products(window: tuple[int, int], passes: object) -> int:
        kernels.statistics(reset=True)
        attention(q, k, v, passes, [600], [600], window=window)
        return kernels.statistics().mma

    for passes in (None, dout):
        whole, causal = products((600, 600), passes), products((-1, 0), passes)
        narrow = products((16, 16), passes)
        assert causal < 0.6 * whole
        assert narrow < share * whole


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_same_bits_from_every_order_of_threads(kernels, dtype):
    torch.manual_seed(derived(8))
    lengths = [50, 16] if dtype == FP32 else [129, 16, 70]
    total = sum(lengths)
    q, dout = (torch.randn(total, 2, 32).to(dtype) for _ in range(2))
    k, v = (torch.randn(total, 1, 32).to(dtype) for _ in range(2))
    positions = random_positions(lengths, lengths)
    for given in (None, positions):
        options = {"p": 0.1, "rng": RNG, "window": (20, 40), "positions": given}
        kernels.configure()
        first = attention(q, k, v, dout, lengths, lengths, **options)
        for policy in POLICIES:
            kernels.configure(policy, 1)
            again = attention(q, k, v, dout, lengths, lengths, **options)
            assert all(torch.equal(first[name], again[name]) for name in first)


def test_same_bits_from_every_schedule():
    torch.manual_seed(derived(9))
    lengths = [20, 140, 0, 64, 100, 7, 65]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    q, dout = (torch.randn(sum(lengths), 2, 32).to(BF16) for _ in range(2))
    k, v = (torch.randn(sum(lengths), 1, 32).to(BF16) for _ in range(2))
    options = {"p": 0.1, "rng": RNG, "window": (30, 40)}
    as_they_lie = attention(q, k, v, dout, lengths, lengths, **options)
    groups = [(1, 140, 140), (1, 100, 100), (2, 65, 65), (3, 20, 20)]
    other = attention(q, k, v, dout, lengths, lengths, order=order, groups=groups, **options)
    assert all(torch.equal(x, other[name]) for name, x in as_they_lie.items())


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_every_barrier_and_wait_is_needed(kernels, dtype):
    torch.manual_seed(derived(10))
    lengths = [70, 20] if dtype == FP32 else [200, 40]
    q, dout = (torch.randn(sum(lengths), 2, 32).to(dtype) for _ in range(2))
    k, v = (torch.randn(sum(lengths), 1, 32).to(dtype) for _ in range(2))
    sites = assert_every_site_is_needed(
        kernels,
        lambda: attention(q, k, v, dout, lengths, lengths, window=(70, 60)),
        policies=["in_order"],
    )
    assert len(sites) >= 4
