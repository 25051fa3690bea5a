"""masked_cross_entropy on a GPU: streams, graphs, devices, sizes."""

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from tests.support.cuda_checks import (
    GPU_ONLY,
    NEEDS_TWO_GPUS,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    assert_same_bits,
)

pytestmark = GPU_ONLY


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits [64, 1024] and labels, of which every third is ignored."""
    labels = torch.randint(1000, (64,), device="cuda")
    labels[2::3] = -100
    return torch.randn(64, 1024, device="cuda").to(dtype), labels


def results(logits: Tensor, labels: Tensor) -> list[Tensor]:
    """Loss, correct, and the gradient."""
    leaf = logits.detach().requires_grad_()
    loss, correct = ops.masked_cross_entropy(leaf, labels, vocab_size=1000)
    loss.backward()
    return [loss.detach(), correct, leaf.grad]


def test_runs_on_the_current_stream() -> None:
    logits, labels = draw(torch.float32)
    assert_runs_on_the_current_stream(lambda late: results(late, labels), logits)


def test_graphs_take_new_logits_and_labels() -> None:
    logits, labels = draw(torch.bfloat16)
    dloss = torch.tensor(0.37, device="cuda")
    op = torch.ops.bert_unpad

    def both() -> list[Tensor]:
        loss, correct, lse = op.masked_cross_entropy(logits, labels, 1000, -100)
        dlogits = op.masked_cross_entropy_backward(dloss, logits, labels, lse, 1000, -100)
        return [loss, correct, dlogits]

    def change() -> None:
        logits.neg_()
        labels.copy_(labels.roll(1))
        dloss.fill_(2.0)

    assert_graph_takes_new_values(both, change)


@NEEDS_TWO_GPUS
def test_runs_on_the_device_of_its_tensors() -> None:
    logits, labels = draw(torch.bfloat16)
    want = results(logits, labels)
    there = [x.to("cuda:1") for x in (logits, labels)]
    got = results(*there)
    assert_same_bits([x.to("cuda:0") for x in got], want)


@pytest.mark.large(12)
def test_more_than_2_to_the_31_elements() -> None:
    rows, columns = 70_347, 30_528  # just over 2^31
    assert rows * columns > 2**31
    logits = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    logits[-3:] = torch.randn(3, columns, device="cuda")
    labels = torch.full((rows,), -100, device="cuda")
    labels[-3:] = torch.tensor([0, 77, columns - 1], device="cuda")
    last = [logits[-3:].clone(), labels[-3:].clone()]
    op, dloss = torch.ops.bert_unpad, torch.tensor(1.0, device="cuda")
    loss, correct, lse = op.masked_cross_entropy(logits, labels, columns, -100)
    op.masked_cross_entropy_backward_(dloss, logits, labels, lse, columns, -100)
    want = op.masked_cross_entropy(*last, columns, -100)
    assert_same_bits([loss, correct, lse[-3:]], want)
    dlast = op.masked_cross_entropy_backward(dloss, *last, want[2], columns, -100)
    assert torch.equal(logits[-3:], dlast)
    assert not logits[:-3].any()
