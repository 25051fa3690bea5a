"""The CUDA attention kernels, run on the model of a block.

Values and gradients against the plain reference, dropout masks against the CPU operator, the same
bits from every schedule and every order of threads, and a check that each barrier is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from gpu_model.block_model import POLICIES, SHARED_BYTES
from gpu_model.build import compiler
from tests.support.model_attention import FUSED, MMA, NAMES, SPLIT, attention, compare, model, plan
from tests.support.model_checks import assert_every_site_is_needed
from tests.support.op_checks import RNG, cu_seqlens
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

# Around the kernels' tiles: of 16 and 64 rows, in fp32 of 16 rows and 32 counterparts.
EDGES = [200, 0, 1, 15, 16, 17, 63, 64, 65]
FP32_EDGES = [70, 0, 1, 15, 16, 17, 31, 32, 33]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The kernels for fp32 know no such choice.
KERNELS = [
    pytest.param(torch.float32, FUSED, id="float32"),
    pytest.param(torch.bfloat16, FUSED, id="bfloat16-fused"),
    pytest.param(torch.bfloat16, SPLIT, id="bfloat16-split"),
    pytest.param(torch.float16, FUSED, id="float16-fused"),
    pytest.param(torch.float16, SPLIT, id="float16-split"),
]
FP32_AND_BF16 = KERNELS[:3]


@pytest.fixture(autouse=True)
def kernels():
    kernels = model()
    kernels.configure()
    kernels.set_device(MMA, FUSED)
    kernels.statistics(reset=True)
    return kernels


def dtype_of(capability: tuple[int, int]) -> torch.dtype:
    """A 16-bit dtype that such a GPU multiplies."""
    return torch.float16 if capability < (8, 0) else torch.bfloat16


def inputs(lengths: Sequence[int], dtype: torch.dtype, heads: int = 2, head_dim: int = 64):
    """q, k, v as views of one packed qkv, and dout."""
    total = sum(lengths)
    qkv = torch.randn(total, 3, heads, head_dim).to(dtype)
    return (*qkv.unbind(1), torch.randn(total, heads, head_dim).to(dtype))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(("dtype", "sms"), KERNELS)
def test_matches_the_reference(kernels, dtype, p, sms):
    torch.manual_seed(derived(0))
    kernels.set_device(MMA, sms)
    compare(dtype, FP32_EDGES if dtype == torch.float32 else EDGES, p=p)


@pytest.mark.parametrize("sms", [FUSED, SPLIT], ids=["fused", "split"])
@pytest.mark.parametrize("lengths", [[127, 128, 129], [511], [512], [513]], ids=str)
def test_lengths_of_several_tiles(kernels, lengths, sms):
    torch.manual_seed(derived(1))
    kernels.set_device(MMA, sms)
    compare(torch.bfloat16, lengths, heads=1, p=0.1)


@pytest.mark.parametrize("head_dim", [32, 96, 128])
@pytest.mark.parametrize(("dtype", "sms"), KERNELS)
def test_other_head_dims(kernels, dtype, head_dim, sms):
    torch.manual_seed(derived(head_dim))
    kernels.set_device(MMA, sms)
    several = 66 if dtype == torch.float32 else 130  # tiles
    compare(dtype, [33, 0, several, 5], head_dim=head_dim, p=0.1)


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_a_long_sequence_among_short_ones(kernels, capability):
    """Several passes over the keys; with less shared memory by blocks of 4 warps, whose tiles are
    smaller."""
    torch.manual_seed(derived(2))
    kernels.set_device(capability, FUSED)
    shape = plan(3, 1, 390, 390, 64, FUSED, SHARED_BYTES[capability])[2:]
    assert shape == ((4, 32) if SHARED_BYTES[capability] < 128 * 1024 else (8, 64))
    compare(dtype_of(capability), [3, 390, 40], heads=1, p=0.1)


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("sms", [FUSED, SPLIT], ids=["fused", "split"])
def test_a_last_tile_of_every_size(kernels, sms, p):
    """Of keys (after a full one) and of queries, beside few of the others."""
    torch.manual_seed(derived(11))
    kernels.set_device((8, 0), sms)
    sizes = list(range(64, 129))
    compare(torch.bfloat16, [17] * len(sizes), sizes, heads=1, head_dim=32, p=p)
    compare(torch.bfloat16, sizes, [17] * len(sizes), heads=1, head_dim=32, p=p)


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_last_rows_of_fused_blocks(kernels, capability):
    """A warp has 32 keys, and 32 rows of dQ in a block of 4 warps."""
    torch.manual_seed(derived(12))
    kernels.set_device(capability, FUSED)
    dtype = dtype_of(capability)
    compare(dtype, [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 128], heads=1, p=0.1)
    compare(dtype, [80, 81, 97], [257, 130, 289], heads=1, p=0.1)  # one block of 8 warps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [-0.3, 1.0])
def test_any_scale(dtype, scale):
    torch.manual_seed(derived(3))
    compare(dtype, [70, 12], head_dim=32, scale=scale)


@pytest.mark.parametrize(("dtype", "sms"), [KERNELS[0], *KERNELS[3:]])
def test_queries_and_keys_of_different_lengths(kernels, dtype, sms):
    torch.manual_seed(derived(4))
    kernels.set_device(MMA, sms)
    compare(dtype, [3, 0, 40, 17, 0, 80], [70, 5, 33, 129, 0, 20], p=0.1)


@pytest.mark.parametrize(("dtype", "sms"), FP32_AND_BF16)
def test_queries_without_keys_and_keys_without_queries(kernels, dtype, sms):
    kernels.set_device(MMA, sms)
    q, dout = (torch.randn(5, 2, 64).to(dtype) for _ in range(2))
    k, v = (torch.randn(4, 2, 64).to(dtype) for _ in range(2))
    results = attention(q, k, v, dout, [5, 0], [0, 4])
    assert torch.equal(results["lse"], torch.full((2, 5), -torch.inf))
    for name in NAMES:
        assert torch.equal(results[name], torch.zeros_like(results[name])), name


def test_a_batch_without_tokens():
    empty = torch.empty(0, 2, 64, dtype=torch.bfloat16)
    assert attention(empty, empty, empty, empty, [0, 0], [0, 0])["out"].shape == (0, 2, 64)
    assert attention(empty, empty, empty, empty, [], [])["dq"].shape == (0, 2, 64)


def test_strides_do_not_matter():
    torch.manual_seed(derived(5))
    lengths = [20, 65]
    wide = torch.randn(85, 4, 3, 80).to(torch.bfloat16)  # heads and rows far apart
    q, k, v = (wide[:, :2, i, :64] for i in range(3))
    dout = torch.randn(2, 85, 64).to(torch.bfloat16).transpose(0, 1)
    strided = attention(q, k, v, dout, lengths, lengths, p=0.1, rng=RNG)
    plain = attention(*(x.contiguous() for x in (q, k, v, dout)), lengths, lengths, p=0.1, rng=RNG)
    assert all(torch.equal(strided[name], plain[name]) for name in plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.1, 0.99])
def test_masks_are_those_of_the_cpu_operator(dtype, p):
    """With one-hot values the output shows which weights were kept, 64 keys at a time."""
    torch.manual_seed(derived(6))
    long = 70 if dtype == torch.float32 else 150  # several tiles
    lengths = [long, 33]
    q, k, _, _ = inputs(lengths, dtype)
    batch = VarlenBatch.from_lengths(lengths)
    for first in range(0, max(lengths), 64):
        v = torch.zeros_like(q)
        for start, length in ((0, long), (long, 33)):
            keys = torch.arange(length)[first : first + 64]
            v[start + keys, :, keys - first] = 1
        ours = attention(q, k, v, None, lengths, lengths, p=p, rng=RNG)["out"]
        qkv = torch.stack([q, k, v], 1)
        cpu = ops.varlen_attention(qkv, batch, dropout_p=p, rng=RNG)
        assert torch.equal(ours == 0, cpu == 0)
        assert (ours == 0).sum() > 0


@pytest.mark.parametrize("sms", [FUSED, SPLIT], ids=["fused", "split"])
def test_same_bits_from_every_schedule(kernels, sms):
    torch.manual_seed(derived(7))
    kernels.set_device(MMA, sms)
    lengths = [20, 140, 0, 64, 100, 7, 65]  # tiles of 64 and 128, the last ones not full
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    q, k, v, dout = inputs(lengths, torch.bfloat16)

    def run(**schedule: object) -> dict[str, Tensor]:
        return attention(q, k, v, dout, lengths, lengths, p=0.1, rng=RNG, **schedule)

    as_they_lie = run()
    starts = cu_seqlens(lengths).tolist()
    table = [(i, starts[i], lengths[i], 0) for i in order]
    for schedule in (
        {"order": order},
        {"order": table},
        {"order": table, "groups": [(4, 140, 140), (3, 20, 20)]},
        {"order": order, "groups": [(1, 140, 140), (1, 100, 100), (2, 65, 65), (3, 20, 20)]},
        {"order": order, "groups": [(4, 140, 140), (3, 20, 20)]},
        {"order": order, "groups": [(0, 0, 0), (7, 140, 140)]},
        {"max_seqlen": 500},
    ):
        other = run(**schedule)
        for name, x in as_they_lie.items():
            assert torch.equal(x, other[name]), (name, schedule)


def test_same_bits_from_every_layout(kernels):
    """Blocks of 8 warps with two passes over the keys, of 4 with three; tiles of both sizes."""
    torch.manual_seed(derived(10))
    lengths = [330, 20]
    q, k, v, dout = inputs(lengths, torch.bfloat16, heads=1)
    results = []
    layouts = (((8, 6), 330, (8, 64)), ((8, 6), 400, (4, 32)), ((10, 0), 330, (4, 64)))
    for capability, longest, shape in layouts:
        kernels.set_device(capability, FUSED)
        shared = SHARED_BYTES[capability]
        assert plan(2, 1, longest, longest, 64, FUSED, shared)[1:] == (True, *shape)
        options = {"p": 0.1, "rng": RNG, "max_seqlen": longest}
        results.append(attention(q, k, v, dout, lengths, lengths, **options))
    for other in results[1:]:
        assert all(torch.equal(x, other[name]) for name, x in results[0].items())


@pytest.mark.parametrize(("dtype", "sms"), FP32_AND_BF16)
def test_same_bits_from_every_order_of_threads(kernels, dtype, sms):
    torch.manual_seed(derived(8))
    kernels.set_device(MMA, sms)
    lengths = [50, 16] if dtype == torch.float32 else [129, 16, 70]  # several tiles
    q, k, v, dout = inputs(lengths, dtype, heads=1)
    first = attention(q, k, v, dout, lengths, lengths, p=0.1, rng=RNG)
    for policy in POLICIES:
        for seed in (1, 2):
            kernels.configure(policy, seed)
            again = attention(q, k, v, dout, lengths, lengths, p=0.1, rng=RNG)
            assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("sms", [FUSED, SPLIT], ids=["fused", "split"])
def test_shared_memory_is_read_without_bank_conflicts(kernels, head_dim, sms):
    kernels.set_device(MMA, sms)
    q, k, v, dout = inputs([130], torch.bfloat16, heads=1, head_dim=head_dim)
    attention(q, k, v, dout, [130], [130])
    statistics = kernels.statistics()
    assert statistics.load_matrices > 0
    assert statistics.bank_conflict_cycles == 0


@pytest.mark.parametrize(("dtype", "sms"), FP32_AND_BF16)
def test_every_barrier_and_wait_is_needed(kernels, dtype, sms):
    torch.manual_seed(derived(9))
    kernels.set_device(MMA, sms)
    # Several tiles, several passes over the keys.
    q_lengths, k_lengths = [70, 20], [70, 20] if dtype == torch.float32 else [280, 40]
    q, dout = (torch.randn(sum(q_lengths), 1, 64).to(dtype) for _ in range(2))
    k, v = (torch.randn(sum(k_lengths), 1, 64).to(dtype) for _ in range(2))
    sites = assert_every_site_is_needed(
        kernels,
        lambda: attention(q, k, v, dout, q_lengths, k_lengths),
        policies=["in_order"],
    )
    assert len(sites) >= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_beyond_a_buffer_is_caught(kernels, dtype, monkeypatch):
    """The last row of every operand is left out of what kernels may read."""
    register = kernels.register

    def short(x: Tensor, writable: bool = True) -> Tensor:
        return register(x[:-64] if x.dtype == dtype and x.dim() == 1 else x, writable)

    monkeypatch.setattr(kernels, "register", short)
    q, k, v, _ = inputs([40], dtype, heads=1)
    with pytest.raises(RuntimeError, match=r"csrc/attention/.*out of bounds"):
        attention(q, k, v, None, [40], [40])


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 30, 20, 40], "must not decrease"),
        ([1, 10, 20, 40], "must start with 0"),
        ([0, 10, 20, 39], "must end at the number of tokens"),
        ([0, 10, 20, 41], "must end at the number of tokens"),
        ([0, 5, 36, 40], "longer than max_seqlen"),
        ([0, -5, 20, 40], "must not decrease"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_impossible_cu_seqlens_stop_the_kernel(dtype, cu, message):
    q, k, v, _ = inputs([40], dtype)
    bad = torch.tensor(cu, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        attention(q, k, v, None, [10, 10, 20], [10, 10, 20], max_seqlen=30, cu=(bad, bad))


def test_impossible_order_stops_the_kernel():
    q, k, v, _ = inputs([10, 10], torch.bfloat16)
    for order in ([0, 2], [(0, 0, 10, 0), (2, 10, 10, 0)]):
        with pytest.raises(RuntimeError, match="order must hold sequence numbers"):
            attention(q, k, v, None, [10, 10], [10, 10], order=order)


# Of sequences of 10, 10 and 20 tokens. The first three would read rows of others, or beyond all.
WRONG_ROWS = [(1, 0, 10, 0), (1, 10, 11, 0), (2, 20, 21, 0), (1, 10, 9, 0), (1, 10, 10, 1)]


@pytest.mark.parametrize("row", WRONG_ROWS, ids=str)
@pytest.mark.parametrize(("dtype", "sms"), FP32_AND_BF16)
def test_a_table_that_differs_from_cu_seqlens_stops_the_kernel(kernels, dtype, sms, row):
    """Also where only the backward pass gets it."""
    kernels.set_device(MMA, sms)
    lengths = [10, 10, 20]
    q, k, v, dout = inputs(lengths, dtype)
    right = [(2, 20, 20, 0), (0, 0, 10, 0), (1, 10, 10, 0)]
    wrong = [row if row[0] == good[0] else good for good in right]
    message = "order must hold sequence, first token, length and 0"
    with pytest.raises(RuntimeError, match=rf"varlen_attention: .*{message}"):
        attention(q, k, v, dout, lengths, lengths, order=wrong)
    with pytest.raises(RuntimeError, match=rf"varlen_attention_backward: .*{message}"):
        attention(q, k, v, dout, lengths, lengths, order=right, backward_order=wrong)


class TestPlan:
    """sequences, heads, max_q, max_k, head_dim, multiprocessors, shared bytes."""

    A100, RTX30, H100 = (SHARED_BYTES[capability] for capability in ((8, 0), (8, 6), (9, 0)))

    @pytest.mark.parametrize("shared", [A100, RTX30, H100])
    @pytest.mark.parametrize(("head_dim", "longest"), [(64, 1024), (32, 1024), (96, 0), (128, 0)])
    def test_backward_is_fused_for_sequences_of_any_usual_length(self, head_dim, longest, shared):
        for length in (1, 64, 128, 384, 512, 1024, 1025, 8192):
            fused = plan(48, 16, length, length, head_dim, 132, shared)[1]
            assert fused == (length <= longest), length

    def test_backward_is_split_where_it_does_not_fit(self):
        assert plan(48, 16, 512, 512, 64, 132, 44 * 1024)[1]
        assert not plan(48, 16, 512, 512, 64, 132, 44 * 1024 - 1)[1]

    def test_backward_is_split_where_whole_heads_leave_multiprocessors_idle(self):
        assert plan(9, 16, 512, 512, 64, 132, self.H100)[1]
        assert not plan(8, 16, 512, 512, 64, 132, self.H100)[1]

    def test_tile_shapes(self):
        assert plan(48, 16, 64, 64, 64, 132, self.H100)[::2] == (1, 4)
        assert plan(24, 16, 65, 128, 64, 132, self.H100)[::2] == (2, 4)
        # Three rounds of blocks of 8 warps, or two of twice as many of 4.
        assert plan(24, 16, 512, 129, 64, 132, self.H100)[::2] == (2, 8)
        assert plan(48, 16, 512, 129, 64, 132, self.H100)[::2] == (2, 4)
        assert plan(24, 16, 512, 129, 64, 108, self.A100)[::2] == (2, 4)
        # Two blocks do not fit; then not even one of 8 warps, but two with smaller tiles.
        assert plan(48, 16, 384, 512, 64, 84, self.RTX30)[::2] == (2, 8)
        assert plan(48, 16, 385, 512, 64, 84, self.RTX30)[2:] == (4, 32)
        assert plan(48, 16, 128, 128, 64, 84, self.RTX30)[2:] == (4, 32)
        # Smaller tiles do not make room for a second block.
        assert plan(48, 16, 512, 512, 64, 84, 80 * 1024)[2:] == (4, 64)
        assert plan(24, 16, 512, 512, 32, 132, self.H100)[::2] == (1, 4)
