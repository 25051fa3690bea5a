"""The CUDA attention kernels on the model of a block: barriers, shared memory, shapes of blocks.

What they compute is in tests/ops, for every backend.
"""

from collections.abc import Iterator

import pytest
import torch

from gpu_model.block_model import SHARED_BYTES
from tests.support.attention_cases import (
    FUSED,
    MMA,
    PARTS,
    SPLIT,
    WGMMA,
    Case,
    compare,
    random_buckets,
    with_gradients,
)
from tests.support.backends import OnTheModel
from tests.support.model_attention import model, plan, readable_part
from tests.support.model_checks import assert_every_site_is_needed
from tests.support.seeds import derived

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def on_model() -> Iterator[OnTheModel]:
    """Operators run there, on a GPU whose multiprocessors every batch fills."""
    with OnTheModel() as mode:
        mode.policy, mode.capability, mode.multiprocessors = "in_order", MMA, FUSED
        model().statistics(reset=True)
        yield mode


def dtype_of(capability: tuple[int, int]) -> torch.dtype:
    """A 16-bit dtype that such a GPU multiplies."""
    return torch.float16 if capability < (8, 0) else BF16


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_a_long_sequence_among_short_ones(
    on_model: OnTheModel, capability: tuple[int, int]
) -> None:
    """Several passes over the keys; with less shared memory by blocks of 4 warps, whose tiles are
    smaller."""
    torch.manual_seed(derived(2))
    on_model.capability = capability
    shape = plan(3, 1, 390, 390, 64, FUSED, SHARED_BYTES[capability])[2:]
    assert shape == ((4, 32) if SHARED_BYTES[capability] < 128 * 1024 else (8, 64))
    compare(Case([3, 390, 40], heads=1, p=0.1), dtype_of(capability))


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_last_rows_of_fused_blocks(on_model: OnTheModel, capability: tuple[int, int]) -> None:
    """A warp has 32 keys, and 32 rows of dQ in a block of 4 warps."""
    torch.manual_seed(derived(12))
    on_model.capability, dtype = capability, dtype_of(capability)
    lengths = [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 128]
    compare(Case(lengths, heads=1, p=0.1), dtype)
    compare(Case([257, 130, 289], [80, 81, 97], heads=1, p=0.1), dtype)  # a block of 8 warps


def test_same_bits_from_every_layout(on_model: OnTheModel) -> None:
    """Blocks of 8 warps with two passes over the keys, of 4 with three; tiles of both sizes."""
    torch.manual_seed(derived(10))
    case = Case([330, 20], heads=1, p=0.1)
    inputs, dout = case.inputs(BF16), case.dout(BF16)
    results = []
    layouts = (((8, 6), 330, (8, 64)), ((8, 6), 400, (4, 32)), ((10, 0), 330, (4, 64)))
    for on_model.capability, longest, shape in layouts:
        shared = SHARED_BYTES[on_model.capability]
        assert plan(2, 1, longest, longest, 64, FUSED, shared)[1:] == (True, *shape)
        results.append(
            with_gradients(lambda x: case.ours(x, max_seqlen=longest), inputs, dout)  # noqa: B023
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("kernels", ["fused", "split", "bias"])
def test_shared_memory_is_read_without_bank_conflicts(
    on_model: OnTheModel, head_dim: int, kernels: str
) -> None:
    on_model.multiprocessors = SPLIT if kernels == "split" else FUSED
    bias = {"buckets": torch.arange(3).int(), "parts": ["table"]} if kernels == "bias" else {}
    case = Case([130], heads=1, head_dim=head_dim, **bias)
    with_gradients(case.ours, case.inputs(BF16), case.dout(BF16))
    statistics = model().statistics()
    assert statistics.load_matrices > 0
    assert statistics.bank_conflict_cycles == 0


@pytest.mark.parametrize(
    ("dtype", "sms", "options", "sites"),
    [
        pytest.param(FP32, FUSED, {}, 4, id="float32"),
        pytest.param(BF16, FUSED, {}, 4, id="fused"),
        pytest.param(BF16, SPLIT, {}, 4, id="split"),
        pytest.param(FP32, FUSED, {"window": (70, 60)}, 4, id="float32-window"),
        pytest.param(BF16, FUSED, {"window": (70, 60)}, 4, id="window"),
        pytest.param(FP32, FUSED, {"window": (60, 70), "parts": PARTS}, 9, id="float32-bias"),
        pytest.param(BF16, FUSED, {"window": (60, 70), "parts": PARTS}, 9, id="bias"),
        pytest.param(BF16, FUSED, {"window": (60, 70), "parts": PARTS[:1]}, 9, id="table"),
    ],
)
def test_every_barrier_and_wait_is_needed(
    on_model: OnTheModel, dtype: torch.dtype, sms: int, options: dict, sites: int
) -> None:
    torch.manual_seed(derived(9))
    on_model.multiprocessors = sms
    if options:  # grouped heads
        lengths = [70, 20] if dtype == FP32 else [200, 40]
        case = Case(lengths, kv_heads=1, head_dim=32, **options)
        case.buckets = random_buckets(20, 6) if case.parts else None
    else:  # several tiles, several passes over the keys
        case = Case([70, 20] if dtype == FP32 else [280, 40], [70, 20], heads=1)
    inputs, dout = case.inputs(dtype), case.dout(dtype)
    found = assert_every_site_is_needed(
        model(), lambda: with_gradients(case.ours, inputs, dout), policies=["in_order"]
    )
    assert len(found) >= sites


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_reading_beyond_a_buffer_is_caught(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last row of every operand is left out of what kernels may read."""
    readable_part(monkeypatch, lambda x: x[:-64] if x.dtype == dtype else x)
    case = Case([40], heads=1)
    with pytest.raises(RuntimeError, match=r"csrc/attention/.*out of bounds"):
        case.ours(case.inputs(dtype))


@pytest.mark.parametrize(
    ("capability", "head_dim", "share"),
    # A warp skips steps of 16 keys or queries, a warpgroup tiles of 64.
    [pytest.param(MMA, 32, 0.15, id="warps"), pytest.param(WGMMA, 64, 0.3, id="warpgroups")],
)
def test_work_follows_the_window(
    on_model: OnTheModel, capability: tuple[int, int], head_dim: int, share: float
) -> None:
    on_model.capability = capability

    def products(window: tuple[int, int], backward: bool) -> int:
        case = Case([600], [600], heads=1, head_dim=head_dim, window=window)
        inputs = case.inputs(BF16)
        model().statistics(reset=True)
        if backward:
            with_gradients(case.ours, inputs, case.dout(BF16))
        else:
            case.ours(inputs)
        return model().statistics().mma

    for backward in (False, True):
        whole, causal = products((600, 600), backward), products((-1, 0), backward)
        assert causal < 0.6 * whole
        assert products((16, 16), backward) < share * whole


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
