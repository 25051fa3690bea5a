"""dropout_add_layer_norm on a GPU: streams, graphs, devices, sizes."""

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from tests.support import cuda_checks
from tests.support.cuda_checks import (
    GPU_ONLY,
    NEEDS_TWO_GPUS,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    assert_same_bits,
)
from tests.support.op_checks import RNG, results_of
from tests.support.seeds import derived

pytestmark = GPU_ONLY


def draw(rows: int, hidden: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """x, residual, weight, bias; and the gradient of y."""
    x, residual, dy = torch.randn(3, rows, hidden, device="cuda").to(dtype)
    return [x, residual, *torch.randn(2, hidden, device="cuda")], dy


def run(inputs: list[Tensor], dy: Tensor, rng: Tensor | None) -> list[Tensor]:
    p = 0.0 if rng is None else 0.1
    return results_of(lambda *t: ops.dropout_add_layer_norm(*t, dropout_p=p, rng=rng), inputs, dy)


def test_streams_and_graphs_at_once_keep_their_counts_apart() -> None:
    """The kernels' last blocks are found by counters that kernels at the same time do not share."""
    torch.manual_seed(derived(6))
    inputs, dy = draw(3000, 256, torch.bfloat16)
    rng = RNG.cuda()  # once: while a graph is captured nothing can be copied from the host
    want = run(inputs, dy, rng)
    streams = [torch.cuda.Stream() for _ in range(3)]
    captured, replay = cuda_checks.capture(lambda: run(inputs, dy, rng))
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            replay()
        for stream in streams[1:]:
            with torch.cuda.stream(stream):
                results.append(run(inputs, dy, rng))
    torch.cuda.synchronize()
    for result in (captured, *results):
        assert_same_bits(result, want)


def test_runs_on_the_current_stream() -> None:
    torch.manual_seed(derived(7))
    inputs, dy = draw(512, 1024, torch.bfloat16)
    assert_runs_on_the_current_stream(lambda x: run([x, *inputs[1:]], dy, None), inputs[0])


def test_graphs_take_new_inputs_and_masks() -> None:
    torch.manual_seed(derived(8))
    inputs, dy = draw(512, 768, torch.bfloat16)
    rng = RNG.cuda()
    for change in (lambda: rng.add_(1), inputs[0].neg_):
        assert_graph_takes_new_values(lambda: run(inputs, dy, rng), change)


@NEEDS_TWO_GPUS
def test_runs_on_the_device_of_its_tensors() -> None:
    inputs, _ = draw(64, 768, torch.float32)
    there = [t.to("cuda:1") for t in inputs]
    want = ops.dropout_add_layer_norm(*inputs)
    assert torch.equal(ops.dropout_add_layer_norm(*there).cpu(), want.cpu())


@pytest.mark.large(20)
def test_more_than_2_to_the_31_elements() -> None:
    rows, hidden = 2**21 + 5, 1024
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    x[-5:] = torch.randn(5, hidden, device="cuda")
    (_, _, weight, bias), dy = draw(5, hidden, torch.bfloat16)
    op = torch.ops.bert_unpad
    y, _, mean, rstd = op.dropout_add_layer_norm(x, None, None, weight, bias, 0.0, 1e-5, None)
    want = op.dropout_add_layer_norm(x[-5:].clone(), None, None, weight, bias, 0.0, 1e-5, None)
    assert torch.equal(y[-5:], want[0])
    gradient = y.zero_()
    gradient[-5:] = dy
    dx = op.dropout_add_layer_norm_backward(gradient, x, None, None, weight, mean, rstd, 0.0, None)
    saved = (weight, *want[2:], 0.0, None)
    few = op.dropout_add_layer_norm_backward(dy, x[-5:].clone(), None, None, *saved)
    assert torch.equal(dx[0][-5:], few[0])
    assert not dx[0][:-5].any()
    torch.testing.assert_close(dx[3], few[3], rtol=1e-5, atol=1e-5)
