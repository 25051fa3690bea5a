"""Attention on a GPU with windows, grouped heads and positions of queries."""

from __future__ import annotations

import pytest
import torch

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from tests.support.attention_cases import Case, compare, random_positions
from tests.support.cuda_attention import (
    LENGTHS,
    SCHEDULES,
    kernels,  # noqa: F401 (a fixture)
)
from tests.support.cuda_checks import DTYPES, GPU_ONLY, assert_same_bits
from tests.support.op_checks import RNG, cu_seqlens
from tests.support.seeds import derived

pytestmark = GPU_ONLY

WINDOWS = [(-1, 0), (0, -1), (0, 1), (5, 9), (64, 64), (-1, 30), (31, -1), (600, 600)]
SMALL = [70, 0, 1, 129]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows(dtype: torch.dtype, window: tuple[int, int]) -> None:
    torch.manual_seed(derived(0))
    compare(Case(LENGTHS, head_dim=64, window=window, p=0.1, device="cuda"), dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.sanitizer
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("window", [(-1, -1), (20, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads(dtype: torch.dtype, window: tuple[int, int], head_dim: int) -> None:
    torch.manual_seed(derived(head_dim))
    case = Case(SMALL, heads=6, kv_heads=2, head_dim=head_dim, window=window, p=0.1, device="cuda")
    compare(case, dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.sanitizer
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 10), (7, -1)])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_attention(dtype: torch.dtype, given: bool, window: tuple[int, int]) -> None:
    torch.manual_seed(derived(1))
    q_lengths, k_lengths = [3, 0, 90, 17, 4, 70], [70, 5, 33, 129, 0, 150]
    positions = random_positions(q_lengths, k_lengths).cuda() if given else None
    options = {"window": window, "positions": positions, "device": "cuda"}
    compare(Case(k_lengths, q_lengths, kv_heads=1, head_dim=64, p=0.1, **options), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("window", [(64, 64), (-1, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sequences(dtype: torch.dtype, window: tuple[int, int]) -> None:
    torch.manual_seed(derived(2))
    compare(
        Case([8192, 3, 700], heads=1, kv_heads=1, head_dim=64, window=window, device="cuda"), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_schedule_changes_no_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(3))
    batch = VarlenBatch.from_lengths(LENGTHS, "cuda")
    qkv = torch.randn(batch.total, 8, 64, device="cuda").to(dtype)
    dout = torch.randn(batch.total, 4, 64, device="cuda").to(dtype)

    def results(*sequences, **options) -> list[torch.Tensor]:
        x = qkv.detach().requires_grad_()
        options |= {"num_heads": 4, "window": (30, 50), "dropout_p": 0.1, "rng": RNG.cuda()}
        out = ops.varlen_attention(x, *sequences, **options)
        out.backward(dout)
        return [out.detach(), x.grad]

    expected = results(batch.cu_seqlens, batch.max_seqlen)
    for schedule in SCHEDULES * 2:
        assert_same_bits(results(batch, schedule=schedule), expected)


def test_queries_that_see_no_key_give_zeros() -> None:
    q = torch.randn(4, 2, 64, device="cuda", requires_grad=True)
    kv = torch.randn(5, 2, 2, 64, device="cuda", requires_grad=True)
    positions = torch.tensor([-9, -1, 6, -(2**31)], dtype=torch.int32, device="cuda")
    cu = cu_seqlens([4], "cuda"), cu_seqlens([5], "cuda")
    out = ops.varlen_cross_attention(q, kv, *cu, 4, 5, window=(1, 0), query_positions=positions)
    out.sum().backward()
    for x in (out, q.grad, kv.grad):
        assert torch.equal(x, torch.zeros_like(x))


def test_a_window_without_end_is_none() -> None:
    torch.manual_seed(derived(4))
    qkv, batch = torch.randn(330, 3, 2, 64), VarlenBatch.from_lengths([200, 130], "cuda")
    whole = ops.varlen_attention(qkv.cuda(), batch)
    wide = ops.varlen_attention(qkv.cuda(), batch, window=(2**62, 2**62))
    torch.testing.assert_close(wide, whole)
