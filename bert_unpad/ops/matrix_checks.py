"""What the operators on matrices refuse that Python implements on a CPU; their CUDA bindings check
the same in C++ (csrc/linear/linear_cuda.cpp, fp8_cuda.cpp, csrc/gelu/gelu_fp8_cuda.cpp).

Each function takes the operator's name, and its arguments by the names of the schema. A CPU
multiplies any sizes, and float32 weights too, which it takes where it has no 16-bit products.
"""

from typing import Any

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


def check_linear(op: str, given: Any) -> None:
    x, weight, bias = given.x, given.weight, given.bias
    _check_shape(op, "x", x, "tokens", "in_features")
    _check_dtype(op, "x", x.dtype, *DTYPES)
    _check_shape(op, "weight", weight, "out_features", x.shape[1])
    _check_dtype(op, "weight", weight.dtype, x.dtype, torch.float32)
    if bias is not None:
        _check_shape(op, "bias", bias, weight.shape[0])
        _check_dtype(op, "bias", bias.dtype, x.dtype, torch.float32)
    elif given.gelu:
        raise RuntimeError(f"{op}: bias: expected a tensor with gelu, got None")


def check_dgrad(op: str, given: Any) -> None:
    dy, weight = given.dy, given.weight
    _check_shape(op, "dy", dy, "tokens", "out_features")
    _check_dtype(op, "dy", dy.dtype, *DTYPES)
    _check_shape(op, "weight", weight, dy.shape[1], "in_features")
    _check_dtype(op, "weight", weight.dtype, dy.dtype, torch.float32)
    if given.addend is not None and given.pre is not None:
        raise RuntimeError(f"{op}: pre: expected None with an addend, got a tensor")
    for name, t in (("addend", given.addend), ("pre", given.pre)):
        if t is not None:
            _check_shape(op, name, t, dy.shape[0], weight.shape[1])
            _check_dtype(op, name, t.dtype, dy.dtype)


def check_wgrad(op: str, given: Any) -> None:
    _check_wgrad(op, given)
    _check_dtype(op, "dtype", given.dtype, torch.float32, given.dy.dtype)


def check_wgrad_(op: str, given: Any) -> None:
    _check_wgrad(op, given)
    _check_shape(op, "dweight", given.dweight, given.dy.shape[1], given.x.shape[1])
    _check_dtype(op, "dweight", given.dweight.dtype, torch.float32, given.dy.dtype)


def _check_wgrad(op: str, given: Any) -> None:
    dy, x = given.dy, given.x
    _check_shape(op, "dy", dy, "tokens", "out_features")
    _check_dtype(op, "dy", dy.dtype, *DTYPES)
    _check_shape(op, "x", x, dy.shape[0], "in_features")
    _check_dtype(op, "x", x.dtype, dy.dtype)


def check_quantize(op: str, given: Any) -> None:
    _check_shape(op, "x", given.x, "rows", "columns")
    _check_dtype(op, "x", given.x.dtype, *DTYPES)
    _check_multiple(op, "x", given.x, 1)


def check_quantize_scaled(op: str, given: Any) -> None:
    """Also of a norm to 8 bits, the rest of whose arguments the norm itself checks."""
    check_quantize(op, given)
    _check_scalar(op, "scale", given.scale)
    if given.largest is not None:
        _check_shape(op, "largest", given.largest, 1024)
        _check_dtype(op, "largest", given.largest.dtype, torch.float32)


def check_quantize_weights(op: str, given: Any) -> None:
    weights, q, q_transposed = given.weights, given.q, given.q_transposed
    for name, tensors in (("q", q), ("q_transposed", q_transposed), ("scales", given.scales)):
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
        _check_scalar(op, f"scales[{i}]", given.scales[i])


def check_fp8_product(op: str, given: Any) -> None:
    _check_fp8_operands(op, given)
    bias, dtype = given.bias, given.dtype
    _check_dtype(op, "dtype", dtype, *DTYPES)
    if bias is not None:
        _check_shape(op, "bias", bias, given.a.shape[0])
        _check_dtype(op, "bias", bias.dtype, torch.bfloat16 if dtype == torch.float32 else dtype)


def check_fp8_product_(op: str, given: Any) -> None:
    _check_fp8_operands(op, given)
    _check_shape(op, "out", given.out, given.b.shape[0], given.a.shape[0])
    _check_dtype(op, "out", given.out.dtype, *DTYPES)


def _check_fp8_operands(op: str, given: Any) -> None:
    a, b = given.a, given.b
    _check_shape(op, "a", a, "rows", "k")
    _check_shape(op, "b", b, "rows", a.shape[1])
    _check_multiple(op, "a", a, 0, 1)
    for name, t in (("a", a), ("b", b)):
        _check_dtype(op, name, t.dtype, *_FP8)
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise RuntimeError(f"{op}: b: expected dtype {_FP8[0]} where a is E5M2, got {b.dtype}")
    _check_scalar(op, "a_scale", given.a_scale)
    _check_scalar(op, "b_scale", given.b_scale)


def check_gelu(op: str, given: Any) -> None:
    check_quantize_scaled(op, given)
    if given.bias is not None:
        _check_shape(op, "bias", given.bias, given.x.shape[1])
        _check_dtype(op, "bias", given.bias.dtype, torch.float32, given.x.dtype)


def check_gelu_backward(op: str, given: Any) -> None:
    check_gelu(op, given)
    _check_shape(op, "dy", given.dy, *given.x.shape)
    _check_dtype(op, "dy", given.dy.dtype, given.x.dtype)
