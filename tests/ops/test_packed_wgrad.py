"""Weight gradients by our own product on a CPU, against fp64."""

import pytest
import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.ops import matmul

DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            not matmul.CPU_MULTIPLIES_BF16, reason="needs a CPU that multiplies bf16"
        ),
    ),
]
packed_wgrad_ = torch.ops.bert_unpad.packed_wgrad_


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def limit(want: Tensor) -> float:
    return 1e-6 * max(1.0, want.abs().max().item()) * 3


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("tokens", "out", "width"),
    [(0, 32, 64), (1, 32, 32), (77, 32, 544), (300, 320, 288), (1000, 224, 416)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_gradients(
    dtype: torch.dtype, tokens: int, out: int, width: int, accumulate: bool
) -> None:
    dy, x = rows(tokens, out, dtype=dtype), rows(tokens, width, dtype=dtype)
    before = torch.randn(out, width)
    dweight = before.clone()
    dbias = packed_wgrad_(dy, x, dweight, accumulate, True)
    want = dy.double().T @ x.double() + (before.double() if accumulate else 0)
    assert (dweight - want).abs().max() <= limit(want)
    sums = dy.double().sum(0)
    assert dbias.dtype == torch.float32
    assert (dbias - sums).abs().max() <= limit(sums)
    other = before.clone()
    assert packed_wgrad_(dy, x, other, accumulate, False).numel() == 0
    assert torch.equal(other, dweight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    dy, x = rows(700, 416, dtype=dtype), rows(700, 224, dtype=dtype)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            dweight = torch.empty(416, 224)
            found.append((packed_wgrad_(dy, x, dweight, False, True), dweight))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_a_linear_layer(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_PACKED_DTYPES", (torch.float32, torch.bfloat16))
    x, dy = rows(90, 64, dtype=dtype), rows(90, 96, dtype=dtype)
    weight, bias = (t.requires_grad_() for t in (rows(96, 64), rows(96)))
    ops.linear_residual(x, weight, bias)[0].backward(dy)
    want = dy.double().T @ x.double()
    assert (weight.grad - want).abs().max() <= limit(want)
    assert (bias.grad - dy.double().sum(0)).abs().max() <= limit(dy.double().sum(0))
    matmul.accumulate_in_place(weight)
    ops.linear_residual(x, weight, bias)[0].backward(dy)
    assert (weight.grad - 2 * want).abs().max() <= 2 * limit(want)


def test_what_does_not_fit_is_named() -> None:
    dy, x, dweight = rows(3, 32), rows(3, 64), torch.zeros(32, 64)
    for change, message in (
        ((dy.double(), x, dweight), "dy must be float32 or bfloat16"),
        ((dy, x.bfloat16(), dweight), "x must be float32 like dy"),
        ((dy, x[:2], dweight), "x must have shape"),
        ((dy, x, dweight.T), "dweight must have shape"),
        ((dy, x, dweight.bfloat16()), "dweight must be float32"),
        ((rows(3, 31), x, torch.zeros(31, 64)), "multiple of 32 columns, got 31"),
    ):
        with pytest.raises(RuntimeError, match=message):
            packed_wgrad_(*change, False, True)
