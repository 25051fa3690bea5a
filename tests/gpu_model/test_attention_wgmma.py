"""The attention kernels with wgmma, on the model of a block, as an H100 would run them.

Values and gradients against the plain reference, dropout masks against the CPU operator, the same
bits from every schedule and every order of threads, and a check that each barrier, wait and fence
is needed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from gpu_model.block_model import POLICIES
from gpu_model.build import compiler
from tests.support.attention_cases import PARTS, random_buckets, random_positions
from tests.support.model_attention import (
    FUSED,
    MMA,
    NAMES,
    SPLIT,
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

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = [BF16, FP16]
# Around tiles of 64 keys and blocks of 64 and 128 queries.
EDGES = [200, 0, 1, 15, 16, 17, 63, 64, 65, 129]


@pytest.fixture(autouse=True)
def kernels():
    kernels = model()
    kernels.configure()
    kernels.set_device(WGMMA, FUSED)
    kernels.statistics(reset=True)
    return kernels


def inputs(lengths: list[int], dtype: torch.dtype = BF16, heads: int = 2):
    """q, k, v as views of one packed qkv, and dout."""
    total = sum(lengths)
    qkv = torch.randn(total, 3, heads, 64).to(dtype)
    return (*qkv.unbind(1), torch.randn(total, heads, 64).to(dtype))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(dtype, p):
    torch.manual_seed(derived(0))
    compare(dtype, EDGES, p=p)


@pytest.mark.parametrize("lengths", [[64, 3], [127, 128], [191, 192, 193], [449]], ids=str)
def test_lengths_of_several_tiles(lengths):
    torch.manual_seed(derived(1))
    compare(BF16, lengths, heads=1, p=0.1)


@pytest.mark.parametrize("p", [0.1, 0.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_backward_kernels_where_whole_heads_leave_multiprocessors_idle(kernels, dtype, p):
    torch.manual_seed(derived(2))
    kernels.set_device(WGMMA, SPLIT)
    compare(dtype, [*EDGES, 330], p=p)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_backward_kernels_for_sequences_that_shared_memory_cannot_hold(dtype):
    torch.manual_seed(derived(2))
    compare(dtype, [580, 3], heads=1, p=0.1)


def test_the_kernels_of_other_gpus_instead(kernels, monkeypatch):
    torch.manual_seed(derived(2))
    monkeypatch.setenv("BERT_UNPAD_WGMMA", "0")
    kernels.forget_sites()
    compare(BF16, [70, 17], p=0.1)
    assert "copy_async_wait" in {site.kind for site in kernels.sites()}
    assert "wgmma_wait" not in {site.kind for site in kernels.sites()}
    monkeypatch.setenv("BERT_UNPAD_WGMMA", "no")
    with pytest.raises(RuntimeError, match="BERT_UNPAD_WGMMA must be 0 or 1, got no"):
        compare(BF16, [3])


@pytest.mark.parametrize("sms", [FUSED, SPLIT])
@pytest.mark.parametrize("scale", [-0.3, 1.0])
def test_any_scale(kernels, scale, sms):
    torch.manual_seed(derived(3))
    kernels.set_device(WGMMA, sms)
    compare(BF16, [70, 12], scale=scale)


@pytest.mark.parametrize("sms", [FUSED, SPLIT])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys_of_different_lengths(kernels, dtype, sms):
    torch.manual_seed(derived(4))
    kernels.set_device(WGMMA, sms)
    compare(dtype, [3, 0, 40, 17, 0, 80, 130], [70, 5, 33, 200, 0, 20, 65], p=0.1)


@pytest.mark.parametrize("sms", [FUSED, SPLIT])
def test_queries_without_keys_and_keys_without_queries(kernels, sms):
    kernels.set_device(WGMMA, sms)
    q, dout = (torch.randn(5, 2, 64).to(BF16) for _ in range(2))
    k, v = (torch.randn(4, 2, 64).to(BF16) for _ in range(2))
    results = attention(q, k, v, dout, [5, 0], [0, 4])
    assert torch.equal(results["lse"], torch.full((2, 5), -torch.inf))
    for name in NAMES:
        assert torch.equal(results[name], torch.zeros_like(results[name])), name


@pytest.mark.parametrize("window", [(-1, 0), (0, 1), (5, 9), (64, 64), (31, -1), (500, 500)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows(dtype, window):
    torch.manual_seed(derived(20))
    compare(dtype, [200, 0, 1, 17, 129], window=window, p=0.1)


@pytest.mark.parametrize("window", [(-1, -1), (40, 10)])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "p"), [(4, 2, 0.1), (3, 1, 0.0)])
def test_grouped_heads_and_positions(heads, kv_heads, p, given, window):
    torch.manual_seed(derived(2))
    q_lengths, k_lengths = [3, 0, 90, 17, 4, 70], [70, 5, 33, 129, 0, 150]
    positions = random_positions(q_lengths, k_lengths) if given else None
    options = {"window": window, "positions": positions, "p": p}
    compare(BF16, q_lengths, k_lengths, heads=heads, kv_heads=kv_heads, **options)


@pytest.mark.parametrize("scale", [-0.3, 1.0])
def test_any_scale_with_a_window(scale):
    torch.manual_seed(derived(3))
    compare(BF16, [70, 12], scale=scale, window=(20, 5), p=0.1)


def test_strides_do_not_matter():
    torch.manual_seed(derived(5))
    lengths = [20, 65]
    wide = torch.randn(85, 4, 3, 80).to(BF16)  # heads and rows far apart
    q, k, v = (wide[:, :2, i, :64] for i in range(3))
    dout = torch.randn(2, 85, 64).to(BF16).transpose(0, 1)
    strided = attention(q, k, v, dout, lengths, lengths, p=0.1, rng=RNG)
    plain = attention(*(x.contiguous() for x in (q, k, v, dout)), lengths, lengths, p=0.1, rng=RNG)
    assert all(torch.equal(strided[name], plain[name]) for name in plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_are_those_of_the_cpu_operator(dtype, p):
    """With one-hot values the output shows which weights were kept, 64 keys at a time."""
    torch.manual_seed(derived(6))
    lengths = [150, 33]
    q, k, _, _ = inputs(lengths, dtype)
    batch = VarlenBatch.from_lengths(lengths)
    for first in range(0, max(lengths), 64):
        v = torch.zeros_like(q)
        for start, length in ((0, 150), (150, 33)):
            keys = torch.arange(length)[first : first + 64]
            v[start + keys, :, keys - first] = 1
        ours = attention(q, k, v, None, lengths, lengths, p=p, rng=RNG)["out"]
        cpu = ops.varlen_attention(torch.stack([q, k, v], 1), batch, dropout_p=p, rng=RNG)
        assert torch.equal(ours == 0, cpu == 0)
        assert (ours == 0).sum() > 0


# Windows and multiprocessors with which each backward pass runs.
KERNELS = pytest.mark.parametrize(
    ("window", "sms"),
    [((-1, -1), FUSED), ((-1, -1), SPLIT), ((70, 40), FUSED)],
    ids=["fused", "two_kernels", "window"],
)


@KERNELS
def test_same_bits_from_every_schedule(kernels, window, sms):
    torch.manual_seed(derived(7))
    kernels.set_device(WGMMA, sms)
    lengths = [20, 140, 0, 64, 100, 7, 65]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    q, k, v, dout = inputs(lengths)

    def run(**schedule: object) -> dict[str, Tensor]:
        options = {"p": 0.1, "rng": RNG, "window": window}
        return attention(q, k, v, dout, lengths, lengths, **options, **schedule)

    as_they_lie = run()
    for schedule in (
        {"order": order},
        {"order": order, "groups": [(1, 140, 140), (1, 100, 100), (2, 65, 65), (3, 20, 20)]},
        {"order": order, "groups": [(0, 0, 0), (7, 140, 140)]},
        {"max_seqlen": 500},
    ):
        other = run(**schedule)
        for name, x in as_they_lie.items():
            assert torch.equal(x, other[name]), (name, schedule)


@KERNELS
def test_same_bits_from_every_order_of_threads(kernels, window, sms):
    torch.manual_seed(derived(8))
    kernels.set_device(WGMMA, sms)
    lengths = [200, 16, 70]
    q, k, v, dout = inputs(lengths, heads=1)
    options = {"p": 0.1, "rng": RNG, "window": window}
    first = attention(q, k, v, dout, lengths, lengths, **options)
    for policy in POLICIES:
        for seed in (1, 2):
            kernels.configure(policy, seed)
            again = attention(q, k, v, dout, lengths, lengths, **options)
            assert all(torch.equal(first[name], again[name]) for name in first)


SYNCHRONISATION = {"copy_async_wait", "fence_shared", "sync_block", "wgmma_wait"}


def fences(level: str | None) -> set[str]:
    """wgmma_fence on the level that wants one for each group of products; compiled kernels need
    fewer."""
    return {"wgmma_fence"} if level is None else set()


@pytest.mark.parametrize("window", [(-1, -1), (70, 0)])
@pytest.mark.parametrize("queries", [64, 130], ids=["one_warpgroup", "two_warpgroups"])
def test_every_barrier_wait_and_fence_is_needed(kernels, level, window, queries):
    torch.manual_seed(derived(9))
    q = torch.randn(queries, 1, 64).to(BF16)
    k, v = (torch.randn(300, 1, 64).to(BF16) for _ in range(2))  # more tiles than stages
    sites = assert_every_site_is_needed(
        kernels,
        lambda: attention(q, k, v, None, [queries], [300], window=window),
        policies=["in_order"],
        but={"wgmma_fence"} - fences(level),
    )
    assert {site.kind for site in sites} == SYNCHRONISATION | fences(level)


@pytest.mark.parametrize(
    ("keys", "heads", "window", "parts", "sms"),
    [
        pytest.param(64, 1, (-1, -1), (), FUSED, id="one_warpgroup"),
        pytest.param(200, 1, (-1, -1), (), FUSED, id="two_warpgroups"),
        pytest.param(200, 1, (-1, -1), (), SPLIT, id="two_kernels"),
        pytest.param(200, 1, (100, 90), (), FUSED, id="window"),
        pytest.param(200, 2, (-1, -1), (), FUSED, id="grouped_heads"),
        pytest.param(200, 1, (-1, -1), PARTS, FUSED, id="bias"),
    ],
)
def test_every_barrier_wait_and_fence_of_the_backward_pass_is_needed(
    kernels, level, keys, heads, window, parts, sms
):
    torch.manual_seed(derived(10))
    kernels.set_device(WGMMA, sms)
    q, dout = (torch.randn(140, heads, 64).to(BF16) for _ in range(2))
    kv, bias = torch.randn(keys, 2, 1, 64).to(BF16), None
    if parts:
        buckets = random_buckets(20, 6)
        terms = bias_terms(BF16, q, kv, buckets, parts)
        bias = (buckets, *(terms[name] for name in parts))
    sites = assert_every_site_is_needed(
        kernels,
        lambda: attention(q, *kv.unbind(1), dout, [140], [keys], window=window, bias=bias),
        policies=["in_order"],
        but={"wgmma_fence"} - fences(level),
    )
    backward = [site for site in sites if "backward" in site.file]
    assert {site.kind for site in backward} == SYNCHRONISATION | fences(level)
    assert ("sync_warp" in {site.kind for site in sites}) == bool(parts)
    split = sms == SPLIT or heads > 1 or window != (-1, -1) or parts
    for file in ("backward_dq_wgmma", "backward_keys_wgmma") if split else ("backward_wgmma",):
        assert {site.kind for site in backward if file in site.file} >= SYNCHRONISATION


@pytest.mark.parametrize("operand", range(3))
def test_reading_beyond_a_buffer_is_caught(kernels, operand, monkeypatch):
    """The last row of an operand is left out of what kernels may read."""
    register, count = kernels.register, iter(range(100))

    def short(x: Tensor, writable: bool = True) -> Tensor:
        return register(x[:-64] if next(count) == operand else x, writable)

    monkeypatch.setattr(kernels, "register", short)
    q, k, v = (torch.randn(40, 1, 64).to(BF16) for _ in range(3))
    with pytest.raises(RuntimeError, match=r"csrc/attention/.*out of bounds"):
        attention(q, k, v, None, [40], [40])


@pytest.mark.parametrize("sms", [FUSED, SPLIT], ids=["fused", "split"])
def test_a_table_that_differs_from_cu_seqlens_stops_the_kernel(kernels, sms):
    kernels.set_device(WGMMA, sms)
    q, k, v, dout = inputs([10, 10])
    right, wrong = [(0, 0, 10, 0), (1, 10, 10, 0)], [(0, 0, 10, 0), (1, 0, 10, 0)]
    # Compiled, these kernels stop without a message.
    message = "(order must hold sequence, first token, length and 0|trap$)"
    with pytest.raises(RuntimeError, match=f"varlen_attention_backward: .*{message}"):
        attention(q, k, v, dout, [10, 10], [10, 10], order=right, backward_order=wrong)
    with pytest.raises(RuntimeError, match=message):
        attention(q, k, v, None, [10, 10], [10, 10], order=wrong)


def test_which_launches_take_it(kernels):
    """Those with ldmatrix are of the other kernels: on other devices, in other head dims."""

    def other_kernels(
        head_dim: int = 64, backward: bool = False, heads: int = 1, **options: object
    ) -> bool:
        q, dout = (torch.randn(5, heads, head_dim).to(BF16) for _ in range(2))
        k, v = (torch.randn(5, 1, head_dim).to(BF16) for _ in range(2))
        kernels.statistics(reset=True)
        attention(q, k, v, dout if backward else None, [5], [5], **options)
        return kernels.statistics().load_matrices > 0

    assert not other_kernels()
    assert not other_kernels(backward=True)
    bias = (torch.zeros(3, dtype=torch.int32), torch.zeros(1, 1), None, None)
    for backward in (False, True):
        assert not other_kernels(window=(1, 1), backward=backward)
        assert not other_kernels(heads=2, backward=backward)
        assert not other_kernels(bias=bias, backward=backward)
    for head_dim in (32, 96, 128):
        assert other_kernels(head_dim)
    assert not other_kernels(backward=True, max_seqlen=5000)
    kernels.set_device(WGMMA, SPLIT)
    assert not other_kernels(backward=True)
    assert not other_kernels(window=(1, 1), backward=True)
    assert not other_kernels(bias=bias, backward=True)
    for device in ((8, 0), MMA):
        kernels.set_device(device, FUSED)
        assert other_kernels()
