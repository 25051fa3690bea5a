"""masked_cross_entropy against the plain reference."""

from __future__ import annotations

import pytest
import reference
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops


def make(rows: int, columns: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits = (torch.randn(rows, columns) * 3).to(dtype)
    labels = torch.randint(0, vocab, (rows,))
    labels[::5] = -100
    if rows > 3:
        labels[1:3] = logits[1:3, :vocab].argmax(1)  # so that some predictions are right
    return logits, labels


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "vocab"), [(2, 2), (37, 37), (104, 97), (1000, 993)])
def test_matches_the_reference(columns: int, vocab: int, dtype: torch.dtype, inplace: bool) -> None:
    torch.manual_seed(columns)
    logits, labels = make(40, columns, vocab, dtype)
    logits[:, vocab:] = 1e4  # padding must not matter
    correct = {}

    def ours() -> list[Tensor]:
        x = logits.clone().requires_grad_()
        # x + 0: the operator may overwrite its own input, not a leaf
        loss, correct["ours"] = ops.masked_cross_entropy(
            x + 0, labels, vocab_size=vocab, inplace_backward=inplace
        )
        (loss * 0.5).backward()
        return [loss.detach(), x.grad]

    def plain(precision: torch.dtype) -> list[Tensor]:
        x = logits.to(precision, copy=True).requires_grad_()
        wide = x if precision == torch.float64 else x.float()
        loss, correct["plain"] = reference.masked_cross_entropy(wide, labels, vocab)
        (loss * 0.5).backward()
        return [loss.detach(), x.grad]

    reference.assert_as_good_as_pytorch(ours, plain, dtype, ["loss", "dlogits"])
    assert correct["ours"].item() == correct["plain"].item() > 0
    assert correct["ours"].dtype == torch.int64


def test_ignored_rows_and_padding_get_zero_gradients() -> None:
    logits, labels = make(10, 16, 11, torch.float32)
    x = logits.requires_grad_()
    ops.masked_cross_entropy(x, labels, vocab_size=11)[0].backward()
    assert not x.grad[labels == -100].any()
    assert not x.grad[:, 11:].any()
    assert x.grad[labels != -100][:, :11].all()


def test_own_ignore_index() -> None:
    logits = torch.randn(3, 8)
    labels = torch.tensor([0, 7, 0])
    loss, _ = ops.masked_cross_entropy(logits, labels, ignore_index=0)
    expected, _ = reference.masked_cross_entropy(logits, labels, ignore_index=0)
    torch.testing.assert_close(loss, expected)


def test_first_of_equal_logits_is_the_prediction() -> None:
    logits = torch.zeros(2, 40)
    logits[:, 20] = logits[:, 30] = 1.0
    _, correct = ops.masked_cross_entropy(logits, torch.tensor([20, 30]))
    assert correct.item() == 1


def test_large_logits_stay_finite() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0]], requires_grad=True)
    loss, _ = ops.masked_cross_entropy(logits, torch.tensor([1]))
    loss.backward()
    assert loss.item() == pytest.approx(6e4)
    assert logits.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_nan_comes_out_as_nan() -> None:
    logits = torch.randn(2, 20)
    logits[1, 3] = float("nan")
    assert ops.masked_cross_entropy(logits, torch.tensor([0, 1]))[0].isnan()


@pytest.mark.parametrize("inplace", [False, True])
def test_no_rows(inplace: bool) -> None:
    x = torch.randn(0, 8, requires_grad=True)
    labels = torch.empty(0, dtype=torch.int64)
    loss, correct = ops.masked_cross_entropy(x + 0, labels, inplace_backward=inplace)
    loss.backward()
    assert (loss.item(), correct.item(), x.grad.shape) == (0.0, 0, (0, 8))


def test_inplace_backward_runs_once_and_guards_other_readers() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 3])
    logits = x + 0
    loss, _ = ops.masked_cross_entropy(logits, labels, inplace_backward=True)
    other = logits.square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_same_bits_whatever_the_threads() -> None:
    logits, labels = make(301, 50, 50, torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(ops.masked_cross_entropy(logits, labels)[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_opcheck() -> None:
    logits, labels = make(6, 24, 20, torch.float32)
    args = (logits.requires_grad_(), labels, 20, -100)
    opcheck(torch.ops.bert_unpad.masked_cross_entropy, args)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_without_graph_breaks(inplace: bool) -> None:
    logits, labels = make(6, 24, 20, torch.float32)
    logits.requires_grad_()

    def f(x: Tensor) -> Tensor:
        loss, _ = ops.masked_cross_entropy(x * 2, labels, vocab_size=20, inplace_backward=inplace)
        return loss

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    (a,), (b,) = (torch.autograd.grad(g(logits), logits) for g in (f, compiled))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([0, 8, 1])}, r"labels\[1\] = 8|label"),
        ({"labels": torch.tensor([0, -1, 1])}, "label"),
        ({"labels": torch.tensor([0, 1])}, "labels must have shape"),
        ({"labels": torch.tensor([0, 1, 2], dtype=torch.int32)}, "labels must be int64"),
        ({"vocab_size": 9}, "vocab_size must"),
        ({"vocab_size": 0}, "vocab_size must"),
        ({"logits": torch.randn(3, 8).double()}, "float32, bfloat16 or float16"),
        ({"logits": torch.randn(24)}, "logits must have shape"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    good = {"logits": torch.randn(3, 8), "labels": torch.tensor([0, 1, 2])}
    with pytest.raises(ValueError, match=message):
        ops.masked_cross_entropy(**(good | change))
