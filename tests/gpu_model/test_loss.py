"""The CUDA kernels of masked_cross_entropy, run on the model of a block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu_model import build
from gpu_model.block_model import POLICIES, Model
from tests.support import reference
from tests.support.model_checks import DTYPES, assert_every_site_is_needed
from tests.support.seeds import derived

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
DLOSS = 0.37


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(build.load(build.KERNELS / "loss.cpp"))


def unaligned(x: Tensor, elements: int) -> Tensor:
    """A contiguous copy whose address is so many elements past a multiple of 16 bytes."""
    store = torch.empty(x.numel() + 64, dtype=x.dtype)
    begin = -store.data_ptr() % 16 // x.element_size() + elements
    copy = store[begin : begin + x.numel()].view(x.shape)
    return copy.copy_(x)


def run(
    model: Model,
    logits: Tensor,
    labels: Tensor,
    vocab: int | None = None,
    *,
    inplace: bool = False,
    shift: tuple[int, int] = (0, 0),
) -> list[Tensor]:
    """The kernels' loss, correct, lse and the gradient of DLOSS * loss. `shift`: elements that the
    addresses of logits and gradient are past a multiple of 16 bytes."""
    rows, columns = logits.shape
    vocab = columns if vocab is None else vocab
    x = unaligned(logits, shift[0])
    lse, losses = torch.full((rows,), torch.nan), torch.full((rows, 2), torch.nan)
    loss, correct = torch.full((), torch.nan), torch.full((), -7)
    dloss = torch.tensor(DLOSS)
    head = (DTYPES[logits.dtype], rows, columns, vocab, x, labels, lse)
    model.clear()
    for tensor in (x, labels, dloss):
        model.register(tensor, writable=False)
    for tensor in (lse, losses, loss, correct):
        model.register(tensor)
    model.call("loss_forward", *head, losses, loss, correct)
    model.clear()
    for tensor in (labels, dloss, lse):
        model.register(tensor, writable=False)
    dx = x
    if not inplace:
        model.register(x, writable=False)
        dx = unaligned(torch.full_like(logits, torch.nan), shift[1])
    model.register(dx)
    model.call("loss_backward", *head, dloss, dx)
    return [loss, correct, lse, dx]


def draw(rows: int, columns: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and labels: every third row is ignored, row 1 is right, padding would win."""
    generator = torch.Generator().manual_seed(derived(columns))
    logits = (3 * torch.randn(rows, columns, generator=generator)).to(dtype)
    logits[:, vocab:] = 100.0
    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[2::3] = -100
    if rows > 1:
        labels[1] = logits[1, :vocab].float().argmax()
    return logits, labels


def exact(logits: Tensor, labels: Tensor, vocab: int | None, dtype: torch.dtype) -> list[Tensor]:
    """Loss, correct and gradient of the formula in plain PyTorch, computed in `dtype`."""
    leaf = logits.to(dtype).requires_grad_()
    loss, correct = reference.masked_cross_entropy(leaf, labels, vocab)
    (DLOSS * loss).backward()
    return [loss.detach(), correct, leaf.grad]


def check(results: list[Tensor], logits: Tensor, labels: Tensor, vocab: int | None = None) -> None:
    loss, correct, lse, dlogits = results
    true_loss, true_correct, _ = exact(logits, labels, vocab, torch.float64)
    assert loss.item() == pytest.approx(true_loss.item(), rel=1e-5, abs=1e-6)
    assert correct.item() == true_correct.item()
    counted = labels != -100
    true_lse = logits[:, :vocab].double().logsumexp(-1).where(counted, 0.0)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=1e-6)
    reference.assert_as_good_as_pytorch(
        lambda: [dlogits],
        lambda dtype: [exact(logits, labels, vocab, dtype)[2]],
        logits.dtype,
        ["dlogits"],
    )
    zeros = dlogits.clone()
    zeros[counted, :vocab] = 0
    assert torch.equal(zeros, torch.zeros_like(zeros))


def assert_same_bits(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "vocab"),
    [(1, 1, 1), (8, 2, 2), (7, 7, 5), (6, 64, 64), (5, 1000, 991), (5, 1021, 1021), (0, 64, 64)],
)
def test_matches_the_reference(
    model: Model, rows: int, columns: int, vocab: int, dtype: torch.dtype
) -> None:
    logits, labels = draw(rows, columns, vocab, dtype)
    results = []
    for policy in POLICIES:
        model.configure(policy, seed=2)
        for inplace in (False, True):
            results.append(run(model, logits, labels, vocab, inplace=inplace))
            assert_same_bits(results[-1], results[0])
    check(results[0], logits, labels, vocab)


def test_more_rows_than_threads_add_up(model: Model) -> None:
    logits, labels = draw(2500, 2, 2, torch.float32)
    model.configure("uniform", seed=1)
    check(run(model, logits, labels), logits, labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_berts_vocabulary(model: Model, dtype: torch.dtype) -> None:
    logits, labels = draw(2, 30528, 30522, dtype)
    model.configure("warp_first", seed=1)
    check(run(model, logits, labels, 30522), logits, labels, 30522)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [(1, 1), (3, 3), (0, 1), (2, 0)])
def test_rows_may_begin_anywhere(model: Model, shift: tuple[int, int], dtype: torch.dtype) -> None:
    for columns in (3, 67, 680):
        logits, labels = draw(5, columns, columns - 1, dtype)
        model.configure("uniform", seed=3)
        got = run(model, logits, labels, columns - 1, shift=shift)
        check(got, logits, labels, columns - 1)
        if shift[0] == shift[1]:
            inplace = run(model, logits, labels, columns - 1, shift=shift, inplace=True)
            assert_same_bits(inplace, got)


def test_only_ignored_rows_are_not_read(model: Model) -> None:
    logits = torch.full((4, 40), torch.nan)
    loss, correct, lse, dlogits = run(model, logits, torch.full((4,), -100))
    assert (loss.item(), correct.item()) == (0.0, 0)
    assert torch.equal(lse, torch.zeros(4))
    assert torch.equal(dlogits, torch.zeros(4, 40))


@pytest.mark.parametrize("column", [0, 3, 17, 1030, 2049])
def test_first_of_equal_maxima_counts(model: Model, column: int) -> None:
    logits = torch.zeros(3, 2100)
    logits[:, [column, column + 1, 2098]] = 5.0
    labels = torch.tensor([column, column + 1, 2098])
    for row in range(3):
        _, correct, _, _ = run(model, logits[row : row + 1], labels[row : row + 1])
        assert correct.item() == int(row == 0)


def test_large_logits_and_masked_columns(model: Model) -> None:
    # Ascending very negative, -inf and huge logits: rescaling must not overflow.
    logits = torch.full((3, 4000), -torch.inf)
    logits[0, 1500], logits[0, 3000] = -3e4, -2e4
    logits[1, :2000], logits[1, 2000:] = -1e30, 100.0
    logits[2, 7] = 3e38
    labels = torch.tensor([3000, 2000, 7])
    loss, correct, _, dlogits = run(model, logits, labels)
    true_loss, true_correct, gradient = exact(logits, labels, None, torch.float64)
    torch.testing.assert_close(loss.double(), true_loss)
    assert correct == true_correct == 3
    torch.testing.assert_close(dlogits.double(), gradient, rtol=1e-5, atol=1e-6)


def test_a_label_without_probability_costs_infinity(model: Model) -> None:
    logits = torch.zeros(1, 40)
    logits[0, 5] = -torch.inf
    loss, correct, _, dlogits = run(model, logits, torch.tensor([5]))
    assert loss.item() == torch.inf
    assert correct.item() == 0
    torch.testing.assert_close(dlogits[0, 5].item(), -DLOSS)


@pytest.mark.parametrize("column", [0, 5, 1500, 2999])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_come_out_as_nan(model: Model, column: int, value: float) -> None:
    logits = torch.zeros(2, 3000)
    logits[0, column] = value
    loss, _, lse, dlogits = run(model, logits, torch.tensor([7, 8]))
    assert loss.isnan()
    assert lse[0].isnan()
    assert dlogits[0].isnan().all()
    assert dlogits[1].isfinite().all()


@pytest.mark.parametrize("label", [-1, -101, 40, 2**40])
def test_labels_out_of_range_stop_the_kernel(model: Model, label: int) -> None:
    logits, labels = torch.zeros(3, 48), torch.tensor([0, label, 1])
    lse, losses, dloss = torch.zeros(3), torch.zeros(3, 2), torch.zeros(())
    model.clear()
    for tensor in (logits, labels, lse, losses, dloss):
        model.register(tensor)
    common = (DTYPES[torch.float32], 3, 48, 40, logits, labels, lse)
    message = "a label is neither ignore_index nor in"
    with pytest.raises(RuntimeError, match=message):
        model.call("loss_forward", *common, losses, torch.zeros(()), torch.zeros((), dtype=int))
    with pytest.raises(RuntimeError, match=message):
        model.call("loss_backward", *common, dloss, logits)


def test_every_barrier_is_needed(model: Model) -> None:
    logits, labels = draw(5, 680, 680, torch.bfloat16)
    sites = assert_every_site_is_needed(model, lambda: run(model, logits, labels), seeds=range(3))
    assert [site.kind for site in sites] == ["sync_block"] * 2
