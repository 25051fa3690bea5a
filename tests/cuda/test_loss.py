"""masked_cross_entropy on a GPU: values, bits, streams, CUDA graphs, errors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from bert_unpad import ops
from tests.support import reference
from tests.support.cuda_checks import (
    DTYPES,
    GPU_ONLY,
    assert_graph_takes_new_values,
    assert_runs_on_the_current_stream,
    assert_same_bits,
)
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived

pytestmark = GPU_ONLY


def draw(rows: int, columns: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and labels: every third row is ignored, row 1 is right, padding would win."""
    generator = torch.Generator("cuda").manual_seed(derived(columns))
    logits = (3 * torch.randn(rows, columns, generator=generator, device="cuda")).to(dtype)
    logits[:, vocab:] = 100.0
    labels = torch.randint(vocab, (rows,), generator=generator, device="cuda")
    labels[2::3] = -100
    if rows > 1:
        labels[1] = logits[1, :vocab].argmax()
    return logits, labels


def results(
    function, logits: Tensor, labels: Tensor, inplace: bool = False, **options
) -> list[Tensor]:
    """Loss, correct, and the gradient of 0.37 * loss."""
    leaf = logits.detach().clone().requires_grad_()
    if function is ops.masked_cross_entropy:
        options["inplace_backward"] = inplace
    loss, correct = function(leaf * 1 if inplace else leaf, labels, **options)
    (0.37 * loss).backward()
    return [loss.detach(), correct, leaf.grad]


def check(got: list[Tensor], logits: Tensor, labels: Tensor, vocab: int) -> None:
    loss, correct, dlogits = got

    def plain(dtype: torch.dtype) -> list[Tensor]:
        return results(reference.masked_cross_entropy, logits.to(dtype), labels, vocab_size=vocab)

    true_loss, true_correct, _ = plain(torch.float64)
    assert loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=1e-6)
    assert correct.item() == true_correct.item()
    reference.assert_as_good_as_pytorch(
        lambda: [dlogits], lambda dtype: plain(dtype)[2:], logits.dtype, ["dlogits"]
    )
    zeros = dlogits.clone()
    zeros[labels != -100, :vocab] = 0
    assert not zeros.any()


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "vocab"),
    [
        *[(1, 1, 1), (50, 2, 2), (7, 7, 5), (300, 64, 64), (20, 1000, 991), (21, 1021, 1021)],
        *[(5, 30528, 30522), (6, 30522, 30522), (0, 64, 64), (70_000, 8, 8)],
    ],
)
def test_matches_the_reference(rows: int, columns: int, vocab: int, dtype: torch.dtype) -> None:
    logits, labels = draw(rows, columns, vocab, dtype)
    got = results(ops.masked_cross_entropy, logits, labels, vocab_size=vocab)
    check(got, logits, labels, vocab)
    inplace = results(ops.masked_cross_entropy, logits, labels, inplace=True, vocab_size=vocab)
    assert_same_bits(inplace, got)


def test_a_batch_of_berts() -> None:
    logits, labels = draw(3648, 30528, 30522, torch.bfloat16)
    got = results(ops.masked_cross_entropy, logits, labels, vocab_size=30522)
    check(got, logits, labels, 30522)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, 3])
def test_rows_may_begin_anywhere(shift: int, dtype: torch.dtype) -> None:
    for columns in (3, 67, 680):
        logits, labels = draw(5, columns, columns - 1, dtype)
        store = torch.empty(logits.numel() + shift, dtype=dtype, device="cuda")
        x = store[shift:].view(logits.shape).copy_(logits)
        assert x.data_ptr() % 16 != 0
        op, tail = torch.ops.bert_unpad, (columns - 1, -100)
        loss, correct, lse = op.masked_cross_entropy(x, labels, *tail)
        saved = (torch.tensor(0.37, device="cuda"), x, labels, lse, *tail)
        # The gradient has its own aligned buffer, then the logits' unaligned one.
        dlogits = op.masked_cross_entropy_backward(*saved)
        check([loss, correct, dlogits], logits, labels, columns - 1)
        op.masked_cross_entropy_backward_(*saved)
        assert torch.equal(x, dlogits)


@pytest.mark.sanitizer
def test_only_ignored_rows_are_not_read() -> None:
    logits = torch.full((4, 40), torch.nan, device="cuda")
    labels = torch.full((4,), -100, device="cuda")
    loss, correct, dlogits = results(ops.masked_cross_entropy, logits, labels)
    assert (loss.item(), correct.item()) == (0.0, 0)
    assert torch.equal(dlogits, torch.zeros_like(logits))


@pytest.mark.parametrize("column", [0, 3, 17, 1030, 2049])
def test_first_of_equal_maxima_counts(column: int) -> None:
    logits = torch.zeros(3, 2100, device="cuda")
    logits[:, [column, column + 1, 2098]] = 5.0
    labels = torch.tensor([column, column + 1, 2098], device="cuda")
    for row in range(3):
        _, correct = ops.masked_cross_entropy(logits[row : row + 1], labels[row : row + 1])
        assert correct.item() == int(row == 0)


def test_large_logits_and_masked_columns() -> None:
    logits = torch.full((3, 4000), -torch.inf, device="cuda")
    logits[0, 1500], logits[0, 3000] = -3e4, -2e4
    logits[1, :2000], logits[1, 2000:] = -1e30, 100.0
    logits[2, 7] = 3e38
    labels = torch.tensor([3000, 2000, 7], device="cuda")
    got = results(ops.masked_cross_entropy, logits, labels)
    want = results(reference.masked_cross_entropy, logits.double(), labels)
    torch.testing.assert_close(got[0].double(), want[0])
    assert got[1] == want[1] == 3
    torch.testing.assert_close(got[2].double(), want[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_come_out_as_nan(value: float) -> None:
    logits = torch.zeros(2, 3000, device="cuda")
    logits[0, 1500] = value
    labels = torch.tensor([7, 8], device="cuda")
    loss, _, dlogits = results(ops.masked_cross_entropy, logits, labels)
    assert loss.isnan()
    assert dlogits[0].isnan().all()
    assert dlogits[1].isfinite().all()


def test_agrees_with_the_cpu() -> None:
    logits, labels = draw(30, 700, 690, torch.float32)
    here = results(ops.masked_cross_entropy, logits, labels, vocab_size=690)
    there = results(ops.masked_cross_entropy, logits.cpu(), labels.cpu(), vocab_size=690)
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)


def test_same_bits_every_time() -> None:
    logits, labels = draw(3000, 5000, 5000, torch.bfloat16)
    first = results(ops.masked_cross_entropy, logits, labels)
    for _ in range(5):
        assert_same_bits(results(ops.masked_cross_entropy, logits, labels), first)


def test_runs_on_the_current_stream() -> None:
    logits, labels = draw(64, 1024, 1024, torch.float32)
    assert_runs_on_the_current_stream(
        lambda late: results(ops.masked_cross_entropy, late, labels), logits
    )


def test_graphs_take_new_logits_and_labels() -> None:
    logits, labels = draw(64, 1024, 1024, torch.bfloat16)
    dloss = torch.tensor(0.37, device="cuda")
    op = torch.ops.bert_unpad

    def both() -> list[Tensor]:
        loss, correct, lse = op.masked_cross_entropy(logits, labels, 1024, -100)
        dlogits = op.masked_cross_entropy_backward(dloss, logits, labels, lse, 1024, -100)
        return [loss, correct, dlogits]

    def change() -> None:
        logits.neg_()
        labels.copy_(labels.roll(1))
        dloss.fill_(2.0)

    assert_graph_takes_new_values(both, change)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_tensors() -> None:
    logits, labels = draw(64, 1024, 1000, torch.bfloat16)
    want = results(ops.masked_cross_entropy, logits, labels, vocab_size=1000)
    there = [x.to("cuda:1") for x in (logits, labels)]
    got = results(ops.masked_cross_entropy, *there, vocab_size=1000)
    assert_same_bits([x.to("cuda:0") for x in got], want)


def test_opcheck() -> None:
    logits, labels = draw(6, 40, 38, torch.float32)
    op, tail = torch.ops.bert_unpad, (38, -100)
    opcheck(op.masked_cross_entropy, (logits.clone().requires_grad_(), labels, *tail))
    lse = torch.logsumexp(logits[:, :38], -1)
    args = (torch.tensor(2.0, device="cuda"), logits, labels, lse, *tail)
    opcheck(op.masked_cross_entropy_backward, args)
    opcheck(op.masked_cross_entropy_backward_, args)


# Values are functions, so that the file can be read where there is no GPU.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: {"logits": torch.randn(3, 8, device="cuda").double()}, "logits must be float32"),
        (lambda: {"logits": torch.randn(3, 2, 4, device="cuda")}, "logits must have shape"),
        (lambda: {"labels": torch.tensor([0, 1], device="cuda")}, "labels must have shape"),
        (lambda: {"labels": torch.tensor([0, 1, 2])}, "labels must be on the same device"),
        (lambda: {"labels": torch.zeros(3, device="cuda")}, "labels must be int64"),
        (lambda: {"vocab_size": 9}, "vocab_size must be between 1 and the number of columns, 8"),
        (lambda: {"vocab_size": 0}, "vocab_size must be between 1"),
    ],
)
def test_bad_arguments_are_named(change, message: str) -> None:
    good = {
        "logits": torch.randn(3, 8, device="cuda"),
        "labels": torch.tensor([0, 1, 2], device="cuda"),
    }
    with pytest.raises(RuntimeError, match=message):
        ops.masked_cross_entropy(**(good | change()))


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
def test_labels_out_of_range_stop_the_kernel(label: int) -> None:
    """In its own process: the CUDA context is lost."""
    command = [sys.executable, "-c", _OUT_OF_RANGE, str(label)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode != 0
    assert "no error" not in done.stdout
    assert "a label is neither ignore_index nor in" in done.stderr


def test_more_columns_than_are_counted_are_refused() -> None:
    logits = torch.empty(0, 2**30 + 8, dtype=torch.bfloat16, device="cuda")
    labels = torch.empty(0, dtype=torch.int64, device="cuda")
    with pytest.raises(RuntimeError, match=r"at most 2\^30 columns on a GPU, got 1073741832"):
        torch.ops.bert_unpad.masked_cross_entropy(logits, labels, 8, -100)


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
