"""The feed-forward half in 8 bits on a GPU, by delayed scales: streams, graphs, repetition."""

import torch

from bert_unpad import ops
from bert_unpad.ops.delayed_scaling import DelayedScale, LinearScales
from tests.cuda.test_fp8 import draw, pytestmark  # noqa: F401
from tests.support.cuda_checks import (
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    assert_same_bits,
)


def scale(value: float, device: str = "cuda") -> DelayedScale:
    return DelayedScale(torch.tensor(value, device=device), torch.zeros(1024, device=device))


def both() -> tuple[LinearScales, LinearScales]:
    return LinearScales(scale(0.02), scale(1e-3)), LinearScales(scale(0.01), scale(2e-3))


def test_streams_graphs_and_repetition():
    x, dy = draw((200, 256), (200, 256), dtype=torch.bfloat16)
    weights = draw((512, 256), (512,), (256, 512), dtype=torch.float32, seed=1)

    def gradients(x):
        leaves = [t.detach().clone().requires_grad_() for t in (x, *weights)]
        scales = both()
        y, _ = ops.mlp(*leaves, fp8=True, scales=scales)
        y.backward(dy)
        noted = (each.largest for layer in scales for each in layer)
        return [y.detach(), *(t.grad for t in leaves), *noted]

    assert_same_bits(gradients(x), gradients(x))
    assert_runs_on_the_current_stream(gradients, x)
    scales = both()
    with torch.no_grad():
        assert_graph_takes_new_values(
            lambda: [ops.mlp(x, *weights, fp8=True, scales=scales)[0]],
            lambda: x.add_(torch.randn_like(x)),
        )
