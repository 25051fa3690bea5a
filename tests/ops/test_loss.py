"""Cross-entropy of masked tokens against the plain reference."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support import reference
from tests.support.backends import Backend, unaligned
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DLOSS = 0.37


def draw(
    rows: int, columns: int, vocab: int, dtype: torch.dtype, scale: float = 3.0
) -> tuple[Tensor, Tensor]:
    """Logits and labels: every third row is ignored, row 1 is right, padding would win."""
    logits = (scale * torch.randn(rows, columns)).to(dtype)
    logits[:, vocab:] = 100.0
    labels = torch.randint(vocab, (rows,))
    labels[2::3] = -100
    if rows > 1:
        labels[1] = logits[1, :vocab].argmax()
    return logits, labels


def run(function, logits: Tensor, labels: Tensor, **options) -> list[Tensor]:
    """Loss, correct, and the gradient of DLOSS * loss."""
    leaf = logits.clone().requires_grad_()
    loss, correct = function(leaf, labels, **options)
    (DLOSS * loss).backward()
    return [loss.detach(), correct, leaf.grad]


def check(got: Sequence[Tensor], logits: Tensor, labels: Tensor, vocab: int) -> None:
    """Of loss, correct and gradient."""
    loss, correct, dlogits = got
    assert (loss.dtype, correct.dtype, dlogits.dtype) == (torch.float32, torch.int64, logits.dtype)

    def plain(precision: torch.dtype) -> list[Tensor]:
        wide = logits.to(precision)
        return run(reference.masked_cross_entropy, wide, labels, vocab_size=vocab)

    true_loss, true_correct, _ = plain(torch.float64)
    assert loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=1e-6)
    assert correct.item() == true_correct.item()
    reference.assert_as_good_as_pytorch(
        lambda: [dlogits], lambda precision: plain(precision)[2:], logits.dtype, ["dlogits"]
    )
    zeros = dlogits.clone()
    zeros[labels != -100, :vocab] = 0
    assert not zeros.any()


def on_gpu(*cases: tuple[int, ...]) -> list:
    return [pytest.param(*case, marks=pytest.mark.backends("cpu", "cuda")) for case in cases]


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("rows", "columns", "vocab"),
    [
        *[(1, 1, 1), (8, 2, 2), (7, 7, 5), (7, 5, 4), (6, 64, 64), (5, 1000, 991), (0, 64, 64)],
        *[(5, 1021, 1021), (2, 30528, 30522)],
        *on_gpu((300, 64, 64), (20, 1025, 1024), (20, 3000, 2993), (6, 30522, 30522)),
        pytest.param(70_000, 8, 8, marks=pytest.mark.backends("cuda")),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_reference(
    backend: Backend, rows: int, columns: int, vocab: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(derived(columns))
    logits, labels = backend.put(draw(rows, columns, vocab, dtype))
    got = run(ops.masked_cross_entropy, logits, labels, vocab_size=vocab)
    check(got, logits, labels, vocab)


@pytest.mark.parametrize(
    ("rows", "columns", "vocab"),
    [
        (2500, 2, 2),  # more than threads
        pytest.param(3648, 30528, 30522, marks=pytest.mark.backends("cuda")),  # a batch of BERT's
    ],
)
def test_large_sizes(backend: Backend, rows: int, columns: int, vocab: int) -> None:
    dtype = torch.bfloat16 if columns > 2 else torch.float32
    logits, labels = backend.put(draw(rows, columns, vocab, dtype))
    got = run(ops.masked_cross_entropy, logits, labels, vocab_size=vocab)
    check(got, logits, labels, vocab)


@pytest.mark.sanitizer
@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("columns", [3, 67, 680])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_begin_anywhere(
    backend: Backend, dtype: torch.dtype, columns: int, shift: int
) -> None:
    logits, labels = backend.put(draw(5, columns, columns - 1, dtype))
    x, op, tail = unaligned(logits, shift), torch.ops.bert_unpad, (columns - 1, -100)
    loss, correct, lse = op.masked_cross_entropy(x, labels, *tail)
    true_lse = logits[:, :-1].double().logsumexp(-1).where(labels != -100, 0.0)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=1e-6)
    saved = (torch.tensor(DLOSS, device=x.device), x, labels, lse, *tail)
    # The gradient has its own aligned buffer, then the logits' unaligned one.
    dlogits = op.masked_cross_entropy_backward(*saved)
    check([loss, correct, dlogits], logits, labels, columns - 1)
    op.masked_cross_entropy_backward_(*saved)
    assert torch.equal(x, dlogits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_in_place_gives_the_same_bits(backend: Backend, dtype: torch.dtype) -> None:
    torch.manual_seed(derived(0))
    logits, labels = backend.put(draw(12, 300, 290, dtype))
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


@pytest.mark.parametrize("column", [0, 3, 17, 1030, 2049])
def test_first_of_equal_maxima_counts(backend: Backend, column: int) -> None:
    logits = torch.zeros(3, 2100)
    logits[:, [column, column + 1, 2098]] = 5.0
    logits, labels = backend.put((logits, torch.tensor([column, column + 1, 2098])))
    for row in range(3):
        _, correct = ops.masked_cross_entropy(logits[row : row + 1], labels[row : row + 1])
        assert correct.item() == int(row == 0)


def test_all_columns_count_without_vocab_size(backend: Backend) -> None:
    torch.manual_seed(derived(1))
    logits, labels = backend.put((torch.randn(5, 40), torch.tensor([39, 0, 1, 2, 3])))
    for a, b in zip(
        run(ops.masked_cross_entropy, logits, labels),
        run(reference.masked_cross_entropy, logits, labels),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_ignore_index_of_the_caller(backend: Backend) -> None:
    torch.manual_seed(derived(2))
    logits, labels = backend.put((torch.randn(5, 10), torch.tensor([0, 1, 2, 3, 0])))
    loss, correct, gradient = run(ops.masked_cross_entropy, logits, labels, ignore_index=0)
    kept = torch.tensor([1, 2, 3])
    expected = run(reference.masked_cross_entropy, logits[kept], labels[kept])
    torch.testing.assert_close(loss, expected[0])
    assert correct == expected[1]
    torch.testing.assert_close(gradient[kept], expected[2])
    assert not gradient[[0, 4]].any()


@pytest.mark.parametrize("inplace", [False, True])
def test_no_rows_and_only_ignored_rows(backend: Backend, inplace: bool) -> None:
    """They are not read."""
    for labels in backend.put([torch.zeros(0, dtype=torch.int64), torch.full((4,), -100)]):
        logits = backend.put(torch.full((len(labels), 40), torch.nan))
        loss, correct, gradient = run(
            lambda x, y: ops.masked_cross_entropy(x * 1, y, inplace_backward=inplace),
            logits,
            labels,
        )
        assert loss.item() == 0.0
        assert correct.item() == 0
        assert torch.equal(gradient, torch.zeros_like(logits))


def test_large_logits_and_masked_columns(backend: Backend) -> None:
    # Ascending very negative, -inf and huge logits: rescaling must not overflow.
    logits = torch.full((3, 4000), -torch.inf)
    logits[0, 1500], logits[0, 3000] = -3e4, -2e4
    logits[1, :2000], logits[1, 2000:] = -1e30, 100.0
    logits[2, 7] = 3e38
    logits, labels = backend.put((logits, torch.tensor([3000, 2000, 7])))
    loss, correct, gradient = run(ops.masked_cross_entropy, logits, labels)
    true_loss, true_correct, true_gradient = run(
        reference.masked_cross_entropy, logits.double(), labels
    )
    torch.testing.assert_close(loss.double(), true_loss)
    assert correct == true_correct == 3
    torch.testing.assert_close(gradient.double(), true_gradient, rtol=1e-5, atol=1e-6)


def test_a_label_without_probability_costs_infinity(backend: Backend) -> None:
    logits = torch.zeros(1, 40)
    logits[0, 5] = -torch.inf
    logits, labels = backend.put((logits, torch.tensor([5])))
    loss, correct, gradient = run(ops.masked_cross_entropy, logits, labels)
    assert loss.item() == torch.inf
    assert correct.item() == 0
    assert gradient[0, 5].item() == pytest.approx(-DLOSS)


@pytest.mark.parametrize("column", [0, 5, 1500, 2999])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_come_out_as_nan(backend: Backend, value: float, column: int) -> None:
    logits = torch.randn(2, 3000)
    logits[0, column] = value
    logits, labels = backend.put((logits, torch.tensor([7, 8])))
    loss, _, gradient = run(ops.masked_cross_entropy, logits, labels)
    assert loss.isnan()
    assert gradient[0].isnan().all()
    assert gradient[1].isfinite().all()


def test_strided_logits(backend: Backend) -> None:
    torch.manual_seed(derived(3))
    logits, labels = backend.put(draw(6, 50, 50, torch.float32))
    strided = logits.t().contiguous().t()
    assert not strided.is_contiguous()
    for inplace in (False, True):
        loss, correct = ops.masked_cross_entropy(strided, labels, inplace_backward=inplace)
        assert (loss, correct) == ops.masked_cross_entropy(logits, labels)


@pytest.mark.parametrize(
    ("rows", "columns", "vocab"),
    [
        (11, 700, 690),
        pytest.param(101, 700, 690, marks=pytest.mark.backends("cpu")),
        pytest.param(3000, 5000, 5000, marks=pytest.mark.backends("cuda")),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_same_bits_every_time(
    backend: Backend, dtype: torch.dtype, rows: int, columns: int, vocab: int
) -> None:
    torch.manual_seed(derived(4))
    logits, labels = backend.put(draw(rows, columns, vocab, dtype))
    backend.assert_same_bits(
        lambda: run(ops.masked_cross_entropy, logits, labels, vocab_size=vocab)
    )


@pytest.mark.backends("cuda")
def test_agrees_with_the_cpu(backend: Backend) -> None:
    logits, labels = draw(30, 700, 690, torch.float32)
    here = run(ops.masked_cross_entropy, *backend.put((logits, labels)), vocab_size=690)
    there = run(ops.masked_cross_entropy, logits, labels, vocab_size=690)
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.backends("cpu", "cuda")
def test_opcheck(backend: Backend) -> None:
    logits, labels = backend.put(draw(6, 40, 38, torch.float32))
    args = (logits.clone().requires_grad_(), labels, 38, -100)
    opcheck(torch.ops.bert_unpad.masked_cross_entropy, args)
    lse = torch.logsumexp(logits[:, :38], -1)
    args = (backend.put(torch.tensor(2.0)), logits, labels, lse, 38, -100)
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


OUT_OF_RANGE = [
    ({"labels": torch.tensor([0, 8, 1])}, r"labels\[1\] = 8 is neither ignore_index = -100"),
    ({"labels": torch.tensor([0, -1, 1])}, r"labels\[1\] = -1 is neither"),
    ({"labels": torch.tensor([0, 5, 1]), "vocab_size": 5}, r"in \[0, vocab_size = 5\)"),
]


@pytest.mark.backends("cpu", "cuda")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(pytest.param(*case, marks=pytest.mark.backends("cpu")) for case in OUT_OF_RANGE),
        ({"logits": torch.randn(3, 8).double()}, "logits must be float32, bfloat16 or float16"),
        ({"logits": torch.randn(3, 2, 4)}, r"logits must have shape \[rows, padded vocabulary\]"),
        ({"labels": torch.tensor([0, 1])}, r"labels must have shape \[rows\], got \[2\]"),
        ({"labels": torch.tensor([0.0, 1.0, 2.0])}, "labels must be int64"),
        ({"vocab_size": 9}, "vocab_size must be between 1 and the number of columns, 8, got 9"),
        ({"vocab_size": 0}, "vocab_size must be between 1"),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_bad_input_is_named(backend: Backend, change: dict, message: str, inplace: bool) -> None:
    good = {"logits": torch.randn(3, 8), "labels": torch.tensor([0, 1, 2])}
    with pytest.raises(RuntimeError, match=message):
        ops.masked_cross_entropy(**backend.put(good | change), inplace_backward=inplace)


@pytest.mark.backends("cuda")
def test_another_device_is_named(backend: Backend) -> None:
    with pytest.raises(RuntimeError, match="labels must be on the same device"):
        ops.masked_cross_entropy(backend.put(torch.randn(3, 8)), torch.tensor([0, 1, 2]))


@pytest.mark.backends("cuda")
def test_more_columns_than_are_counted_are_refused(backend: Backend) -> None:
    logits = torch.empty(0, 2**30 + 8, dtype=torch.bfloat16, device=backend.device)
    labels = torch.empty(0, dtype=torch.int64, device=backend.device)
    with pytest.raises(RuntimeError, match=r"at most 2\^30 columns on a GPU, got 1073741832"):
        torch.ops.bert_unpad.masked_cross_entropy(logits, labels, 8, -100)


@pytest.mark.parametrize("label", [-1, -101, 40, 2**40])
@pytest.mark.backends("block", "ptx")
def test_labels_out_of_range_stop_the_kernel(backend: Backend, label: int) -> None:
    logits, labels = torch.zeros(3, 48), torch.tensor([0, label, 1])
    op, message = torch.ops.bert_unpad, "a label is neither ignore_index nor in"
    with pytest.raises(RuntimeError, match=message):
        op.masked_cross_entropy(logits, labels, 40, -100)
    with pytest.raises(RuntimeError, match=message):
        op.masked_cross_entropy_backward_(torch.ones(()), logits, labels, torch.zeros(3), 40, -100)


_OUT_OF_RANGE = """
import sys, torch
from bert_unpad import ops
labels = torch.tensor([0, int(sys.argv[1]), 1], device="cuda")
logits = torch.randn(3, 48, device="cuda")
ops.masked_cross_entropy(logits, labels, vocab_size=40)
torch.cuda.synchronize()
print("no error")
"""


@pytest.mark.parametrize("label", [-1, 40, 2**40])
@pytest.mark.backends("cuda")
def test_labels_out_of_range_stop_the_kernel_of_a_gpu(backend: Backend, label: int) -> None:
    """In its own process: the CUDA context is lost."""
    command = [sys.executable, "-c", _OUT_OF_RANGE, str(label)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode != 0
    assert "no error" not in done.stdout
    assert "a label is neither ignore_index nor in" in done.stderr
