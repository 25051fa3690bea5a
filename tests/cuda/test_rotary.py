"""Rotary position embeddings on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from tests.support import reference
from tests.support.cuda_checks import (
    DTYPES,
    GPU_ONLY,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
)
from tests.support.op_checks import results_of

pytestmark = GPU_ONLY

SHAPES = [(3000, 36, 64, None), (700, 24, 128, None), (37, 5, 40, 32), (11, 3, 34, None),
          (500, 60, 16, None), (4, 2, 256, None), (0, 3, 8, None)]  # fmt: skip


def draw(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x, and positions."""
    positions = torch.randint(-100_000, 100_000, shape[:1], device="cuda")
    return torch.randn(shape, device="cuda").to(dtype), positions


@pytest.mark.sanitizer
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_reference(
    shape: tuple[int, int, int, int | None], dtype: torch.dtype, interleaved: bool
) -> None:
    *sizes, rotary_dim = shape
    x, positions = draw(tuple(sizes), dtype)
    settings = {
        "heads": sizes[1] * 2 // 3,
        "theta": 160000.0,
        "rotary_dim": rotary_dim,
        "interleaved": interleaved,
        "position_scale": 0.7,
    }
    dout = torch.randn_like(x)
    reference.assert_as_good_as_pytorch(
        lambda: results_of(lambda x: ops.rotary_(x * 1, positions, **settings), [x], dout),
        lambda precision: results_of(
            lambda x: reference.rotary(x, positions, **settings), [x], dout, precision
        ),
        dtype,
        ["y", "dx"],
    )


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_unaligned_views(dtype: torch.dtype) -> None:
    store = torch.randn(100 * 12 * 64 + 3, device="cuda").to(dtype)
    positions = torch.arange(100, device="cuda", dtype=torch.int32)
    for offset in (0, 3):
        qkv = store[offset : offset + 100 * 12 * 64].view(100, 3, 4, 64)
        for x in (qkv[:, 1], qkv.view(100, 12, 64)[:, 2:9], qkv.view(12, 100, 64).transpose(0, 1)):
            want = ops.rotary_(x.clone(), positions, heads=3)
            assert torch.equal(ops.rotary_(x, positions, heads=3), want)


def test_agrees_with_the_cpu() -> None:
    x, positions = draw((300, 6, 64), torch.float32)
    on_cpu = ops.rotary_(x.cpu(), positions.cpu(), heads=4)
    torch.testing.assert_close(ops.rotary_(x, positions, heads=4).cpu(), on_cpu)


def test_runs_on_the_current_stream() -> None:
    x, positions = draw((2000, 12, 64), torch.bfloat16)
    arguments = (positions, 8, 1e4, 64, False, 1.0, False)
    assert_runs_on_the_current_stream(
        lambda late: [torch.ops.bert_unpad.rotary(late, *arguments)], x
    )


def test_graphs_take_new_positions() -> None:
    x, positions = draw((200, 6, 64), torch.bfloat16)
    arguments = (positions, 4, 1e4, 64, False, 1.0, False)
    assert_graph_takes_new_values(
        lambda: [torch.ops.bert_unpad.rotary(x, *arguments)], lambda: positions.add_(7)
    )


def test_wrong_devices_are_named() -> None:
    x, positions = draw((6, 3, 8), torch.float32)
    with pytest.raises(RuntimeError, match="rotary_: positions"):
        ops.rotary_(x, positions.cpu(), heads=2)
