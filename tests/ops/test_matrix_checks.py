"""What operators on matrices that Python implements on a CPU say of wrong arguments."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import op_examples

OPERATORS = (
    "linear",
    "linear_dgrad",
    "linear_wgrad",
    "linear_wgrad_",
    "quantize_fp8",
    "quantize_fp8_scaled",
    "quantize_weights_fp8_",
    "fp8_product",
    "fp8_product_",
    "bias_gelu_fp8",
    "bias_gelu_fp8_backward",
)

# Numbers of rows and columns that fit all the same.
FREE = {
    ("linear", "x", "rows"),
    ("linear_wgrad", "dy", "columns"),
    ("linear_wgrad", "x", "columns"),
    ("quantize_fp8", "x", "rows"),
    ("quantize_fp8_scaled", "x", "rows"),
    ("fp8_product", "b", "rows"),
    ("bias_gelu_fp8", "x", "rows"),
}


def wrong(t: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors that do not fit where this one does."""
    if t.dim() == 0:
        yield "rows", torch.ones(3, dtype=t.dtype)
    else:
        yield "rows", torch.ones((t.shape[0] + 3, *t.shape[1:])).to(t.dtype)
        yield "dimensions", t[None]
    if t.dim() > 1:
        yield "columns", torch.ones((*t.shape[:-1], t.shape[-1] + 3)).to(t.dtype)
    yield "dtype", t.to(torch.complex64)


def arguments(name: str) -> list[Any]:
    args = op_examples.example(name)
    if name == "linear_dgrad":
        args[2] = torch.ones(args[0].shape[0], args[1].shape[1])
    return args


@pytest.mark.parametrize("name", OPERATORS)
def test_an_error_names_the_operator_an_argument_and_what_was_expected(name: str) -> None:
    for argument, tensor in op_examples.tensor_arguments(name, arguments(name)):
        for what, _ in wrong(tensor):
            if (name, argument, what) in FREE:
                continue
            args = arguments(name)
            old = dict(op_examples.tensor_arguments(name, args))[argument]
            args = op_examples.replaced(args, old, dict(wrong(old))[what])
            with pytest.raises(RuntimeError, match=rf"^{name}: \S+: expected .*, got "):
                getattr(torch.ops.bert_unpad, name)(*args)


def test_a_wrong_weight_is_said_to_be_the_weight() -> None:
    x, weight = torch.ones(8, 32), torch.ones(16, 30)
    with pytest.raises(
        RuntimeError,
        match=r"^linear: weight: expected shape \[out_features, 32\], got \[16, 30\]$",
    ):
        torch.ops.bert_unpad.linear(x, weight, None, False)
    with pytest.raises(RuntimeError, match=r"^linear: bias: expected a tensor with gelu, got None"):
        torch.ops.bert_unpad.linear(x, torch.ones(16, 32), None, True)
    dy, weight, addend = torch.ones(8, 16), torch.ones(16, 32), torch.ones(8, 32)
    with pytest.raises(RuntimeError, match=r"^linear_dgrad: pre: expected None with an addend"):
        torch.ops.bert_unpad.linear_dgrad(dy, weight, addend, addend)


def test_sizes_and_lists_for_8_bits() -> None:
    op = torch.ops.bert_unpad
    a, b = (torch.ones(rows, 32).to(torch.float8_e4m3fn) for rows in (8, 16))
    more = (torch.ones(()), torch.ones(()), None, torch.float32, False)
    with pytest.raises(RuntimeError, match=r"quantize_fp8: x: expected a multiple of 16 columns"):
        op.quantize_fp8(torch.ones(4, 24), False, True)
    with pytest.raises(RuntimeError, match="fp8_product: a: expected a multiple of 16 rows"):
        op.fp8_product(a, b, *more)
    wide = b.to(torch.float8_e5m2)
    with pytest.raises(RuntimeError, match=r"fp8_product: b: expected dtype torch.float8_e4m3fn"):
        op.fp8_product(wide, wide, *more)
    with pytest.raises(RuntimeError, match="quantize_weights_fp8_: q: expected 1 tensors like w"):
        op.quantize_weights_fp8_([torch.ones(16, 16)], [], [], [])
