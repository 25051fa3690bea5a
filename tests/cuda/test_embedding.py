"""embedding_layer_norm on a GPU: streams, graphs, devices, sizes."""

from functools import partial

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from tests.support.cuda_checks import (
    GPU_ONLY,
    NEEDS_TWO_GPUS,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
)
from tests.support.op_checks import RNG, embedding_operands, results_of
from tests.support.seeds import derived

pytestmark = GPU_ONLY


def draw(tokens: int, hidden: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Ids; tables, LayerNorm weight and bias; and the gradient of y."""
    operands = embedding_operands((30522, 512, 2), tokens, hidden, torch.float32, torch.bfloat16)
    ids, params, dy = operands
    return [x.cuda() for x in ids], [x.cuda() for x in params], dy.cuda()


def run(ids: list[Tensor], params: list[Tensor], dy: Tensor, rng: Tensor | None) -> list[Tensor]:
    settings = {"dropout_p": 0.0 if rng is None else 0.1, "rng": rng, "out_dtype": dy.dtype}
    return results_of(partial(ops.embedding_layer_norm, *ids, **settings), params, dy)


def test_runs_on_the_current_stream() -> None:
    torch.manual_seed(derived(6))
    ids, params, dy = draw(2000, 768)
    assert_runs_on_the_current_stream(lambda w: run([w, *ids[1:]], params, dy, None), ids[0])


def test_graphs_take_new_ids_and_masks() -> None:
    torch.manual_seed(derived(7))
    ids, params, dy = draw(2000, 768)
    rng = RNG.cuda()
    for change in (lambda: rng.add_(1), lambda: ids[0].copy_(ids[0].flip(0))):
        assert_graph_takes_new_values(lambda: run(ids, params, dy, rng), change)


@NEEDS_TWO_GPUS
def test_runs_on_the_device_of_its_tensors() -> None:
    ids, params, _ = draw(100, 768)
    there = [x.to("cuda:1") for x in (*ids, *params)]
    want = ops.embedding_layer_norm(*ids, *params)
    assert torch.equal(ops.embedding_layer_norm(*there).cpu(), want.cpu())


@pytest.mark.large(32)
def test_more_than_2_to_the_31_elements() -> None:
    tokens, hidden = 2**21 + 5, 1024
    ids, params, dy = draw(tokens, hidden)
    dy[:-5] = 0
    got, few = run(ids, params, dy, None), [x[-5:].clone() for x in ids]
    want = run(few, params, dy[-5:].clone(), None)
    assert torch.equal(got[0][-5:], want[0])
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
