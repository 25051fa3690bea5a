"""Cross-entropy of masked tokens against the plain reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support import reference
from tests.support.op_checks import assert_same_bits_whatever_the_threads
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(
    rows: int, columns: int, vocab: int, dtype: torch.dtype, scale: float = 3.0
) -> tuple[Tensor, Tensor]:
    """Logits and labels: every third row is ignored, row 1 is right, padding would win."""
    logits = (scale * torch.randn(rows, columns)).to(dtype)
    logits[:, vocab:] = 100.0
    labels = torch.randint(vocab, (rows,))
    labels[::3] = -100
    if rows > 1:
        labels[1] = logits[1, :vocab].argmax()
    return logits, labels


def run(function, logits: Tensor, labels: Tensor, **options) -> list[Tensor]:
    """Loss, correct, and the gradient of 0.37 * loss."""
    leaf = logits.clone().requires_grad_()
    loss, correct = function(leaf, labels, **options)
    (0.37 * loss).backward()
    return [loss.detach(), correct, leaf.grad]


@pytest.mark.parametrize(
    ("rows", "columns", "vocab"),
    [(1, 1, 1), (7, 5, 4), (9, 64, 64), (20, 1025, 1024), (20, 3000, 2993), (3, 30528, 30522)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(rows: int, columns: int, vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(columns))
    logits, labels = draw(rows, columns, vocab, dtype)
    loss, correct, gradient = run(ops.masked_cross_entropy, logits, labels, vocab_size=vocab)
    assert (loss.dtype, correct.dtype, gradient.dtype) == (torch.float32, torch.int64, dtype)
    true_loss, true_correct, _ = run(
        reference.masked_cross_entropy, logits.double(), labels, vocab_size=vocab
    )
    assert loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=1e-6)
    assert correct.item() == true_correct.item()

    def plain(precision: torch.dtype) -> list[Tensor]:
        return [
            run(reference.masked_cross_entropy, logits.to(precision), labels, vocab_size=vocab)[2]
        ]

    reference.assert_as_good_as_pytorch(lambda: [gradient], plain, dtype, ["dlogits"])
    assert torch.equal(gradient[:, vocab:], torch.zeros(rows, columns - vocab, dtype=dtype))
    assert torch.equal(gradient[::3], torch.zeros_like(gradient[::3]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_in_place_gives_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(derived(0))
    logits, labels = draw(12, 300, 290, dtype)
    plain = run(ops.masked_cross_entropy, logits, labels, vocab_size=290)

    buffers = []

    def inplace(leaf: Tensor, labels: Tensor, **options) -> tuple[Tensor, Tensor]:
        buffers.append(leaf * 1)
        return ops.masked_cross_entropy(buffers[0], labels, inplace_backward=True, **options)

    for a, b in zip(plain, run(inplace, logits, labels, vocab_size=290), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(buffers[0].detach(), plain[2])  # the buffer holds the gradient


def test_backward_in_place_twice_is_an_error() -> None:
    leaf = torch.randn(3, 8, requires_grad=True)
    loss, _ = ops.masked_cross_entropy(leaf * 1, torch.tensor([1, 2, 3]), inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_other_readers_of_overwritten_logits_get_an_error() -> None:
    leaf = torch.randn(3, 8, requires_grad=True)
    logits = leaf * 1
    square = logits.square().sum()  # keeps the logits for its backward pass
    loss, _ = ops.masked_cross_entropy(logits, torch.tensor([1, 2, 3]), inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


def test_first_of_equal_maxima_counts() -> None:
    for column in (0, 17, 1030):
        logits = torch.zeros(3, 2100)
        logits[:, [column, column + 1, 2050]] = 5.0
        labels = torch.tensor([column, column + 1, 2050])
        _, correct = ops.masked_cross_entropy(logits, labels)
        assert correct.item() == 1, column
        _, correct = ops.masked_cross_entropy(logits[:1], labels[:1])
        assert correct.item() == 1, column


def test_all_columns_count_without_vocab_size() -> None:
    torch.manual_seed(derived(1))
    logits, labels = torch.randn(5, 40), torch.tensor([39, 0, 1, 2, 3])
    for a, b in zip(
        run(ops.masked_cross_entropy, logits, labels),
        run(reference.masked_cross_entropy, logits, labels),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_ignore_index_of_the_caller() -> None:
    torch.manual_seed(derived(2))
    logits, labels = torch.randn(5, 10), torch.tensor([0, 1, 2, 3, 0])
    loss, correct, gradient = run(ops.masked_cross_entropy, logits, labels, ignore_index=0)
    kept = torch.tensor([1, 2, 3])
    expected = run(reference.masked_cross_entropy, logits[kept], labels[kept])
    torch.testing.assert_close(loss, expected[0])
    assert correct == expected[1]
    torch.testing.assert_close(gradient[kept], expected[2])
    assert torch.equal(gradient[[0, 4]], torch.zeros(2, 10))


@pytest.mark.parametrize("inplace", [False, True])
def test_no_rows_and_only_ignored_rows(inplace: bool) -> None:
    for labels in (torch.zeros(0, dtype=torch.int64), torch.full((4,), -100)):
        logits = torch.randn(len(labels), 6)
        loss, correct, gradient = run(
            lambda x, y: ops.masked_cross_entropy(x * 1, y, inplace_backward=inplace),
            logits,
            labels,
        )
        assert loss.item() == 0.0
        assert correct.item() == 0
        assert torch.equal(gradient, torch.zeros_like(logits))


def test_large_logits_and_masked_columns() -> None:
    # Ascending blocks of very negative, -inf and huge logits: rescaling must not overflow.
    logits = torch.full((2, 4000), float("-inf"))
    logits[0, 1500], logits[0, 3000] = -3e4, -2e4
    logits[1, :2000], logits[1, 2000:] = -1e30, 100.0
    labels = torch.tensor([3000, 2000])
    loss, correct, gradient = run(ops.masked_cross_entropy, logits, labels)
    true_loss, true_correct, true_gradient = run(
        reference.masked_cross_entropy, logits.double(), labels
    )
    torch.testing.assert_close(loss.double(), true_loss)
    assert correct == true_correct == 2
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("column", [0, 5, 1500, 2999])
def test_nan_comes_out_as_nan(column: int) -> None:
    logits = torch.randn(2, 3000)
    logits[0, column] = float("nan")
    loss, _, gradient = run(ops.masked_cross_entropy, logits, torch.tensor([7, 8]))
    assert loss.isnan()
    assert gradient[0].isnan().all()
    assert gradient[1].isfinite().all()


def test_strided_logits() -> None:
    torch.manual_seed(derived(3))
    logits, labels = draw(6, 50, 50, torch.float32)
    strided = logits.t().contiguous().t()
    assert not strided.is_contiguous()
    for inplace in (False, True):
        loss, correct = ops.masked_cross_entropy(strided, labels, inplace_backward=inplace)
        assert (loss, correct) == ops.masked_cross_entropy(logits, labels)


def test_same_bits_whatever_the_threads() -> None:
    torch.manual_seed(derived(4))
    logits, labels = draw(101, 700, 690, torch.float32)
    assert_same_bits_whatever_the_threads(
        lambda: run(ops.masked_cross_entropy, logits, labels, vocab_size=690)
    )


def test_opcheck() -> None:
    logits, labels = draw(6, 40, 38, torch.float32)
    args = (logits.clone().requires_grad_(), labels, 38, -100)
    opcheck(torch.ops.bert_unpad.masked_cross_entropy, args)
    lse = torch.logsumexp(logits[:, :38], -1)
    args = (torch.tensor(2.0), logits, labels, lse, 38, -100)
    opcheck(torch.ops.bert_unpad.masked_cross_entropy_backward, args)
    opcheck(torch.ops.bert_unpad.masked_cross_entropy_backward_, args)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_without_graph_breaks(inplace: bool) -> None:
    logits, labels = draw(6, 40, 38, torch.float32)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.masked_cross_entropy(x * 2, labels, vocab_size=38, inplace_backward=inplace)

    results = []
    for function in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        results.append(run(lambda x, _, function=function: function(x), logits, labels))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.randn(3, 8).double()}, "logits must be float32, bfloat16 or float16"),
        ({"logits": torch.randn(3, 2, 4)}, r"logits must have shape \[rows, padded vocabulary\]"),
        ({"labels": torch.tensor([0, 1])}, r"labels must have shape \[rows\], got \[2\]"),
        ({"labels": torch.tensor([0.0, 1.0, 2.0])}, "labels must be int64"),
        ({"labels": torch.tensor([0, 8, 1])}, r"labels\[1\] = 8 is neither ignore_index = -100"),
        ({"labels": torch.tensor([0, -1, 1])}, r"labels\[1\] = -1 is neither"),
        ({"labels": torch.tensor([0, 5, 1]), "vocab_size": 5}, r"in \[0, vocab_size = 5\)"),
        ({"vocab_size": 9}, "vocab_size must be between 1 and the number of columns, 8, got 9"),
        ({"vocab_size": 0}, "vocab_size must be between 1"),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_bad_input_is_named(change: dict, message: str, inplace: bool) -> None:
    good = {"logits": torch.randn(3, 8), "labels": torch.tensor([0, 1, 2])}
    with pytest.raises(RuntimeError, match=message):
        ops.masked_cross_entropy(**(good | change), inplace_backward=inplace)
