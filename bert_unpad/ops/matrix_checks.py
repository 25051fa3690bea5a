"""What the operators on matrices refuse that Python implements on a CPU; their CUDA bindings check
the same in C++ (csrc/linear/linear_cuda.cpp, fp8_cuda.cpp, csrc/gelu/gelu_fp8_cuda.cpp).

Each function takes its operator's arguments. A CPU multiplies any sizes, and float32 weights too,
which it takes where it has no 16-bit products.
"""

import torch
from torch import Tensor

from bert_unpad.ops.tensor_checks import DTYPES

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP8_MULTIPLE = 16


def _check_shape(op: str, name: str, t: Tensor, *sizes: int | str) -> None:
    """Checks for these sizes; a word stands for any."""
    given = tuple(t.shape)
    if len(given) != len(sizes) or any(
        isinstance(want, int) and want != found for want, found in zip(sizes, given, strict=True)
    ):
        wanted = ", ".join(map(str, sizes))
        raise RuntimeError(f"{op}: {name}: expected shape [{wanted}], got {list(given)}")


def _check_dtype(op: str, name: str, dtype: torch.dtype, *allowed: torch.dtype) -> None:
    if dtype not in allowed:
        words = " or ".join(str(each) for each in dict.fromkeys(allowed))
        raise RuntimeError(f"{op}: {name}: expected dtype {words}, got {dtype}")


def _check_multiple(op: str, name: str, t: Tensor, *dims: int) -> None:
    for dim in dims:
        if t.shape[dim] % _FP8_MULTIPLE:
            what = ("rows", "columns")[dim]
            raise RuntimeError(
                f"{op}: {name}: expected a multiple of {_FP8_MULTIPLE} {what}, got {list(t.shape)}"
            )


def _check_scalar(op: str, name: str, t: Tensor) -> None:
    if t.numel() != 1:
        raise RuntimeError(f"{op}: {name}: expected one element, got shape {list(t.shape)}")
    _check_dtype(op, name, t.dtype, torch.float32)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> None:
    op = "linear"
    _check_shape(op, "x", x, "tokens", "in_features")
    _check_dtype(op, "x", x.dtype, *DTYPES)
    _check_shape(op, "weight", weight, "out_features", x.shape[1])
    _check_dtype(op, "weight", weight.dtype, x.dtype, torch.float32)
    if bias is not None:
        _check_shape(op, "bias", bias, weight.shape[0])
        _check_dtype(op, "bias", bias.dtype, x.dtype, torch.float32)
    elif gelu:
        raise RuntimeError(f"{op}: bias: expected a tensor with gelu, got None")


def check_dgrad(dy: Tensor, weight: Tensor, addend: Tensor | None, pre: Tensor | None) -> None:
    op = "linear_dgrad"
    _check_shape(op, "dy", dy, "tokens", "out_features")
    _check_dtype(op, "dy", dy.dtype, *DTYPES)
    _check_shape(op, "weight", weight, dy.shape[1], "in_features")
    _check_dtype(op, "weight", weight.dtype, dy.dtype, torch.float32)
    if addend is not None and pre is not None:
        raise RuntimeError(f"{op}: pre: expected None with an addend, got a tensor")
    for name, t in (("addend", addend), ("pre", pre)):
        if t is not None:
            _check_shape(op, name, t, dy.shape[0], weight.shape[1])
            _check_dtype(op, name, t.dtype, dy.dtype)


def check_wgrad(dy: Tensor, x: Tensor, bias: bool, dtype: torch.dtype) -> None:
    op = "linear_wgrad"
    _check_wgrad(op, dy, x)
    _check_dtype(op, "dtype", dtype, torch.float32, dy.dtype)


def check_wgrad_(dy: Tensor, x: Tensor, dweight: Tensor, accumulate: bool, bias: bool) -> None:
    op = "linear_wgrad_"
    _check_wgrad(op, dy, x)
    _check_shape(op, "dweight", dweight, dy.shape[1], x.shape[1])
    _check_dtype(op, "dweight", dweight.dtype, torch.float32, dy.dtype)


def _check_wgrad(op: str, dy: Tensor, x: Tensor) -> None:
    _check_shape(op, "dy", dy, "tokens", "out_features")
    _check_dtype(op, "dy", dy.dtype, *DTYPES)
    _check_shape(op, "x", x, dy.shape[0], "in_features")
    _check_dtype(op, "x", x.dtype, dy.dtype)


def check_quantize(x: Tensor, e5m2: bool, transpose: bool) -> None:
    _check_operand("quantize_fp8", "x", x)


def check_quantize_scaled(
    x: Tensor,
    e5m2: bool,
    transpose: bool,
    scale: Tensor,
    largest: Tensor | None,
    sum: bool = False,
) -> None:
    _check_operand("quantize_fp8_scaled", "x", x)
    check_delayed("quantize_fp8_scaled", scale, largest)


def _check_operand(op: str, name: str, x: Tensor) -> None:
    _check_shape(op, name, x, "rows", "columns")
    _check_dtype(op, name, x.dtype, *DTYPES)
    _check_multiple(op, name, x, 1)


def check_delayed(op: str, scale: Tensor, largest: Tensor | None) -> None:
    """Checks a delayed scale, an argument of several operators."""
    _check_scalar(op, "scale", scale)
    if largest is not None:
        _check_shape(op, "largest", largest, 1024)
        _check_dtype(op, "largest", largest.dtype, torch.float32)


def check_quantize_weights(
    weights: list[Tensor], q: list[Tensor], q_transposed: list[Tensor], scales: list[Tensor]
) -> None:
    op = "quantize_weights_fp8_"
    for name, tensors in (("q", q), ("q_transposed", q_transposed), ("scales", scales)):
        if len(tensors) != len(weights):
            raise RuntimeError(
                f"{op}: {name}: expected {len(weights)} tensors like weights, got {len(tensors)}"
            )
    for i, weight in enumerate(weights):
        _check_shape(op, f"weights[{i}]", weight, "rows", "columns")
        _check_dtype(op, f"weights[{i}]", weight.dtype, torch.float32)
        _check_multiple(op, f"weights[{i}]", weight, 0, 1)
        for name, t, sizes in (
            (f"q[{i}]", q[i], weight.shape),
            (f"q_transposed[{i}]", q_transposed[i], weight.shape[::-1]),
        ):
            _check_shape(op, name, t, *sizes)
            _check_dtype(op, name, t.dtype, torch.float8_e4m3fn)
        _check_scalar(op, f"scales[{i}]", scales[i])


def check_fp8_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    sum_over_tokens: bool,
) -> None:
    op = "fp8_product"
    _check_fp8_operands(op, a, b, a_scale, b_scale)
    _check_dtype(op, "dtype", dtype, *DTYPES)
    if bias is not None:
        _check_shape(op, "bias", bias, a.shape[0])
        _check_dtype(op, "bias", bias.dtype, torch.bfloat16 if dtype == torch.float32 else dtype)


def check_fp8_product_(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, accumulate: bool
) -> None:
    op = "fp8_product_"
    _check_fp8_operands(op, a, b, a_scale, b_scale)
    _check_shape(op, "out", out, b.shape[0], a.shape[0])
    _check_dtype(op, "out", out.dtype, *DTYPES)


def _check_fp8_operands(op: str, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> None:
    _check_shape(op, "a", a, "rows", "k")
    _check_shape(op, "b", b, "rows", a.shape[1])
    _check_multiple(op, "a", a, 0, 1)
    for name, t in (("a", a), ("b", b)):
        _check_dtype(op, name, t.dtype, *_FP8)
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise RuntimeError(f"{op}: b: expected dtype {_FP8[0]} where a is E5M2, got {b.dtype}")
    _check_scalar(op, "a_scale", a_scale)
    _check_scalar(op, "b_scale", b_scale)


def check_gelu(
    x: Tensor,
    bias: Tensor | None,
    tanh: bool,
    scale: Tensor,
    largest: Tensor | None,
    transpose: bool,
) -> None:
    _check_gelu("bias_gelu_fp8", x, bias, scale, largest)


def check_gelu_backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    tanh: bool,
    scale: Tensor,
    largest: Tensor | None,
    transpose: bool,
) -> None:
    op = "bias_gelu_fp8_backward"
    _check_gelu(op, x, bias, scale, largest)
    _check_shape(op, "dy", dy, *x.shape)
    _check_dtype(op, "dy", dy.dtype, x.dtype)


def _check_gelu(
    op: str, x: Tensor, bias: Tensor | None, scale: Tensor, largest: Tensor | None
) -> None:
    _check_operand(op, "x", x)
    if bias is not None:
        _check_shape(op, "bias", bias, x.shape[1])
        _check_dtype(op, "bias", bias.dtype, torch.float32, x.dtype)
    check_delayed(op, scale, largest)


def check_norm(x: Tensor, *arguments) -> None:
    op = "dropout_add_layer_norm_fp8"
    *_norm, scale, largest, _transpose = arguments
    _check_operand(op, "x", x)  # dropout_add_layer_norm checks the others
    check_delayed(op, scale, largest)
