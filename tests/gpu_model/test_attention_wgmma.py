"""The attention kernels with wgmma, on the model of a block, as an H100 would run them: that each
barrier, wait and fence is needed, and which launches take them.

What they compute is in tests/ops, for every backend.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

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
from tests.support.model_attention import model, readable_part, wgmma_plan
from tests.support.model_checks import assert_every_site_is_needed
from tests.support.seeds import derived

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def on_model() -> Iterator[OnTheModel]:
    """Operators run there, on a GPU whose multiprocessors every batch fills."""
    with OnTheModel() as mode:
        mode.policy, mode.capability, mode.multiprocessors = "in_order", WGMMA, FUSED
        model().statistics(reset=True)
        yield mode


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_two_backward_kernels_for_sequences_that_shared_memory_cannot_hold(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(derived(2))
    compare(Case([580, 3], heads=1, p=0.1), dtype)


def test_the_kernels_of_other_gpus_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(derived(2))
    monkeypatch.setenv("BERT_UNPAD_WGMMA", "0")
    model().forget_sites()
    compare(Case([70, 17], p=0.1), BF16)
    assert "copy_async_wait" in {site.kind for site in model().sites()}
    assert "wgmma_wait" not in {site.kind for site in model().sites()}
    monkeypatch.setenv("BERT_UNPAD_WGMMA", "no")
    with pytest.raises(RuntimeError, match="BERT_UNPAD_WGMMA must be 0 or 1, got no"):
        compare(Case([3]), BF16)


SYNCHRONISATION = {"copy_async_wait", "fence_shared", "sync_block", "wgmma_wait"}


def fences(level: str | None) -> set[str]:
    """wgmma_fence on the level that wants one for each group of products; compiled kernels need
    fewer."""
    return {"wgmma_fence"} if level is None else set()


@pytest.mark.parametrize(
    ("queries", "head_dim", "window"),
    [
        pytest.param(64, 64, (-1, -1), id="one_warpgroup"),
        pytest.param(200, 64, (-1, -1), id="two_warpgroups"),
        pytest.param(130, 64, (70, 0), id="window"),
        pytest.param(64, 128, (-1, -1), id="one_warpgroup_of_128_columns"),
        pytest.param(200, 128, (-1, -1), id="two_warpgroups_of_128_columns"),
        pytest.param(64, 128, (70, 0), id="window_of_128_columns"),
    ],
)
def test_every_barrier_wait_and_fence_is_needed(
    level: str | None, queries: int, head_dim: int, window: tuple[int, int]
) -> None:
    torch.manual_seed(derived(9))
    # More tiles than stages.
    case = Case([300], [queries], heads=1, head_dim=head_dim, window=window)
    inputs = case.inputs(BF16)
    sites = assert_every_site_is_needed(
        model(),
        lambda: case.ours(inputs),
        policies=["in_order"],
        but={"wgmma_fence"} - fences(level),
    )
    assert {site.kind for site in sites} == SYNCHRONISATION | fences(level)


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "window", "parts", "sms", "head_dim"),
    [
        pytest.param(140, 64, 1, (-1, -1), (), FUSED, 64, id="one_warpgroup"),
        pytest.param(140, 200, 1, (-1, -1), (), FUSED, 64, id="one_warpgroup_with_passes"),
        pytest.param(200, 200, 1, (-1, -1), (), FUSED, 64, id="two_warpgroups"),
        pytest.param(140, 200, 1, (-1, -1), (), SPLIT, 64, id="two_kernels"),
        pytest.param(140, 200, 1, (100, 90), (), FUSED, 64, id="window"),
        pytest.param(140, 200, 2, (-1, -1), (), FUSED, 64, id="grouped_heads"),
        pytest.param(140, 200, 1, (-1, -1), PARTS, FUSED, 64, id="bias"),
        pytest.param(140, 200, 1, (-1, -1), PARTS[:1], FUSED, 64, id="table"),
        pytest.param(140, 200, 1, (-1, -1), (), FUSED, 128, id="128_columns"),
        pytest.param(140, 200, 2, (100, 90), (), FUSED, 128, id="128_columns_with_a_window"),
    ],
)
def test_every_barrier_wait_and_fence_of_the_backward_pass_is_needed(
    on_model: OnTheModel, level: str | None, queries: int, keys: int, heads: int,
    window: tuple[int, int], parts: tuple[str, ...], sms: int, head_dim: int,
) -> None:  # fmt: skip
    torch.manual_seed(derived(10))
    on_model.multiprocessors = sms
    case = Case([keys], [queries], heads, 1, head_dim, window, parts=parts)
    case.buckets = random_buckets(20, 6) if parts else None
    inputs, dout = case.inputs(BF16), case.dout(BF16)
    sites = assert_every_site_is_needed(
        model(),
        lambda: with_gradients(case.ours, inputs, dout),
        policies=["in_order"],
        but={"wgmma_fence"} - fences(level),
    )
    backward = [site for site in sites if "backward" in site.file]
    strip = {"sync_warp"} if parts == PARTS[:1] else set()  # before a warp reads a table's biases
    assert {site.kind for site in backward} == SYNCHRONISATION | fences(level) | strip
    assert ("sync_warp" in {site.kind for site in sites}) == bool(parts)
    split = sms == SPLIT or heads > 1 or window != (-1, -1) or parts or head_dim == 128
    for file in ("backward_dq_wgmma", "backward_keys_wgmma") if split else ("backward_wgmma",):
        assert {site.kind for site in backward if file in site.file} >= SYNCHRONISATION


@pytest.mark.parametrize(("tokens", "rows"), [(30, 1), (80, 2), (80, 1)], ids=["q", "k", "v"])
def test_reading_beyond_a_buffer_is_caught(
    tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last row of an operand is left out of what kernels may read."""
    readable_part(monkeypatch, lambda x: x[: -64 * rows] if x.numel() == 64 * tokens else x)
    case = Case([40], [30], heads=1)
    with pytest.raises(RuntimeError, match=r"csrc/attention/.*out of bounds"):
        case.ours(case.inputs(BF16))


def test_which_launches_take_it(on_model: OnTheModel) -> None:
    """Those with ldmatrix are of the other kernels: on other devices, in other head dims (of 128
    with a position bias), and of backward passes whose longest sequence has 65 to 128 tokens."""

    def other_kernels(
        backward: bool = False, max_seqlen: int = 5, length: int = 5, queries: int | None = None,
        **options: Any,
    ) -> bool:  # fmt: skip
        q_lengths = None if queries is None else [queries]
        case = Case([length], q_lengths, **{"heads": 1, "kv_heads": 1} | options)
        inputs = case.inputs(BF16)
        model().statistics(reset=True)
        if backward:
            more = {"max_seqlen": max_seqlen} if queries is None else {}
            run = lambda x: case.ours(x, **more)  # noqa: E731
            with_gradients(run, inputs, case.dout(BF16))
        else:
            case.ours(inputs)
        return model().statistics().load_matrices > 0

    assert not other_kernels()
    assert not other_kernels(backward=True)
    bias = {"buckets": torch.zeros(3, dtype=torch.int32), "parts": ["table"]}
    for backward in (False, True):
        for options in ({"window": (1, 1)}, {"heads": 2}, bias):
            assert not other_kernels(backward, **options)
    for head_dim in (32, 96):
        assert other_kernels(head_dim=head_dim)
    for backward in (False, True):
        assert not other_kernels(backward, head_dim=128)
        assert other_kernels(backward, head_dim=128, **bias)
    assert not other_kernels(backward=True, max_seqlen=5000)
    for length, other in ((64, False), (65, True), (128, True), (129, False)):
        assert other_kernels(backward=True, max_seqlen=length, length=length) == other
    for length, queries in ((129, 100), (100, 129)):
        assert not other_kernels(backward=True, length=length, queries=queries)
    assert not other_kernels(max_seqlen=100, length=100)
    assert not other_kernels(backward=True, max_seqlen=100)  # too few tokens for a fused kernel
    assert not other_kernels(backward=True, max_seqlen=100, length=100, window=(1, 1))
    on_model.multiprocessors = SPLIT
    assert not other_kernels(backward=True, max_seqlen=100, length=100)
    for options in ({}, {"window": (1, 1)}, bias):
        assert not other_kernels(backward=True, **options)
    on_model.multiprocessors = FUSED
    for on_model.capability in ((8, 0), MMA):
        assert other_kernels()


def test_rounds_of_whole_heads() -> None:
    """16 heads on 132 multiprocessors. By the model of an SM, without dropout: 8 sequences of 512
    tokens take 60 us in one kernel and 77 in two, 9 take 113 and 87, 16 take 115 and 146."""

    def fused(lengths: list[int], longest: int) -> bool:
        sizes = (len(lengths), sum(lengths), 16, longest, longest, 132, 227 * 1024)
        return wgmma_plan(*sizes)[0]

    alike = {n for n in range(1, 30) if fused([512] * n, 512)}
    assert alike == {6, 7, 8, *range(11, 30)}
    # Two kernels gain nothing from short blocks' last round.
    assert {n for n in range(1, 30) if fused([256] * n, 256)} == set(range(6, 30))
    # Blocks of unequal length fill rounds: what counts is how many long ones all tokens make.
    assert not fused([512, *[200] * 9], 512)
    assert fused([512, *[200] * 13], 512)
