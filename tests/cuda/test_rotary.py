"""Rotary position embeddings on a GPU: streams, graphs."""

import torch
from torch import Tensor

from tests.support.cuda_checks import (
    GPU_ONLY,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
)

pytestmark = GPU_ONLY


def draw(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """x, and positions."""
    positions = torch.randint(-100_000, 100_000, shape[:1], device="cuda")
    return torch.randn(shape, device="cuda").bfloat16(), positions


def test_runs_on_the_current_stream() -> None:
    x, positions = draw((2000, 12, 64))
    arguments = (positions, 8, 1e4, 64, False, 1.0, False)
    assert_runs_on_the_current_stream(
        lambda late: [torch.ops.bert_unpad.rotary(late, *arguments)], x
    )


def test_graphs_take_new_positions() -> None:
    x, positions = draw((200, 6, 64))
    arguments = (positions, 4, 1e4, 64, False, 1.0, False)
    assert_graph_takes_new_values(
        lambda: [torch.ops.bert_unpad.rotary(x, *arguments)], lambda: positions.add_(7)
    )
