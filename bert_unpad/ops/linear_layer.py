"""Linear layers whose weights stay fp32 while activations are bf16 or fp16."""

import torch
from torch import Tensor
from torch.nn import functional

from bert_unpad.ops import matmul
from bert_unpad.ops.registration import first_order
from bert_unpad.ops.rounded_weights import rounded
from bert_unpad.ops.tensor_checks import DTYPES, check_tensors


def _matrix(x: Tensor) -> Tensor:
    """[..., features] -> [rows, features], contiguous."""
    return (x if x.dim() == 2 else x.reshape(-1, x.shape[-1])).contiguous()


class _Linear(torch.autograd.Function):
    """x weight^T + bias, and x; see `linear_residual`. Gradients have their argument's dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        dtype = matmul.product_dtype(x)
        wide = rounded(weight, dtype)
        y = matmul.forward(_matrix(x), wide, None if bias is None else matmul.as_dtype(bias, dtype))
        ctx.save_for_backward(x, wide, weight, bias)
        ctx.set_materialize_grads(False)
        # A view could not be changed in place, as `rotary_` does.
        y = y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])
        return y, x.view_as(x)

    @staticmethod
    @first_order("linear", ("x", "weight"))
    def backward(ctx, saved, dy: Tensor | None, addend: Tensor | None):
        if dy is None:
            return addend, None, None
        x, wide, weight, bias = saved
        shape = x.shape
        x, dy = _matrix(x), _matrix(dy)
        dx = dweight = dbias = None
        # A backward pass within autocast would otherwise compute products in another dtype.
        with matmul.no_autocast(dy.device.type):
            if ctx.needs_input_grad[0]:
                dx = matmul.dgrad(dy, wide, None if addend is None else _matrix(addend))
                dx = dx if len(shape) == 2 else dx.view(shape)
            if ctx.needs_input_grad[1]:
                dweight, dbias = matmul.wgrad(dy, x, weight, bias)
            elif ctx.needs_input_grad[2]:
                dbias = dy.sum(0, dtype=torch.float32).to(bias.dtype)
        return dx, dweight, dbias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, in x's dtype, with weights of x's dtype or float32.

    On a GPU, 16-bit products use cuBLASLt if the numbers of features are multiples of 8.

    Args:
        x: [..., in_features], float32, bfloat16 or float16.
        weight: [out_features, in_features], x's dtype or float32 (master weights).
        bias: [out_features] or None, x's dtype or float32.

    Returns:
        The output, [..., out_features], of x's dtype. Products are accumulated in float32.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: a shape or dtype is wrong.
        RuntimeError: a tensor is on another device than x, or its storage was freed.
    """
    check_linear("linear", x, weight, bias)
    dtype = matmul.product_dtype(x)
    with matmul.no_autocast(x.device.type):
        same = weight.dtype == x.dtype == dtype and (bias is None or bias.dtype == dtype)
        if same and not matmul.fused(x, weight) and not matmul.by_us(x, weight):
            return functional.linear(x, weight, bias)
        return _Linear.apply(x, weight, bias)[0]


def linear_residual(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns `linear(x, weight, bias)`, and x for a residual connection.

    Use the second result instead of x in the residual connection. The product that computes x's
    gradient then also adds the residual's gradient, for which autograd would need another pass over
    memory.

    Args:
        x, weight, bias: as in `linear`.

    Returns:
        The output [..., out_features] and x [..., in_features], both of x's dtype.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: a shape or dtype is wrong.
        RuntimeError: a tensor is on another device than x, or its storage was freed.
    """
    check_linear("linear_residual", x, weight, bias)
    with matmul.no_autocast(x.device.type):
        return _Linear.apply(x, weight, bias)


def check_linear(
    function: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    number: str = "",
    **others: Tensor,
) -> None:
    """Checks the tensors of a linear layer before PyTorch's products read them.

    Args:
        function: the name that the message begins with.
        x, weight, bias: as in `linear`.
        number: of the layer in the names of the function's arguments, such as "1" of weight1.
        others: what PyTorch reads besides; their shapes and dtypes are not looked at.

    Raises:
        TypeError, ValueError, RuntimeError: as in `linear`.
    """
    required = {"x": x, f"weight{number}": weight, **others}
    check_tensors(function, required, {f"bias{number}": bias}, read=True)
    dtype, shape = x.dtype, weight.shape
    if dtype not in DTYPES:
        raise ValueError(f"{function}: x: expected float32, bfloat16 or float16, got {dtype}")
    if len(shape) != 2 or x.shape[-1:] != shape[1:]:
        raise ValueError(
            f"{function}: expected x [..., in_features] and weight{number} "
            f"[out_features, in_features], got {list(x.shape)} and {list(shape)}"
        )
    if bias is not None and bias.shape != shape[:1]:
        raise ValueError(
            f"{function}: bias{number} must have shape [{shape[0]}], got {list(bias.shape)}"
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dtype not in (dtype, torch.float32):
            raise ValueError(
                f"{function}: {name}{number} must be {dtype} like x or torch.float32, "
                f"got {parameter.dtype}"
            )
