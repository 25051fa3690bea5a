"""dropout_add_layer_norm that writes 8 bits too, on a GPU: the bits of two steps."""

import torch
from torch import Tensor

from bert_unpad.ops.norm_fp8 import dropout_add_norm_fp8
from tests.cuda.test_fp8 import draw, pytestmark  # noqa: F401
from tests.cuda.test_gelu_fp8 import scale
from tests.support.cuda_checks import (
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    assert_same_bits,
)


def leaves_of(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """x, residual, weight, bias, x_bias."""
    activations = draw(shape, shape, dtype=dtype)
    parameters = draw(*[shape[1:]] * 3, dtype=torch.float32, seed=1)
    return [t.requires_grad_() for t in (*activations, *parameters)]


def bytes_of(q: Tensor) -> Tensor:
    return q.flatten().view(torch.uint8)


def test_streams_graphs_and_repetition():
    inputs = [t.detach() for t in leaves_of((200, 256), torch.bfloat16)]
    given = scale(0.01)

    def run(x: Tensor, transpose: bool = True) -> list[Tensor]:
        with torch.set_grad_enabled(transpose):
            y, (q, kept, _) = dropout_add_norm_fp8(x, *inputs[1:4], given, x_bias=inputs[4])
        return [y, bytes_of(q), bytes_of(kept), given.largest]

    assert_same_bits(run(inputs[0]), run(inputs[0]))
    assert not run(inputs[0], transpose=False)[2].numel()
    assert_runs_on_the_current_stream(run, inputs[0])
    assert_graph_takes_new_values(
        lambda: run(inputs[0])[:3], lambda: inputs[0].add_(torch.randn_like(inputs[0]))
    )
