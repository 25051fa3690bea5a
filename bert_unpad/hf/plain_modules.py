"""Computes plain modules of Hugging Face's layers with our operators, and calls all others.

A module is plain if it is exactly PyTorch's class, has no hooks, and its parameters are ordinary
tensors. An adapter (LoRA), a quantised layer or a module with a hook is called unchanged; only the
fusion with its neighbours is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from bert_unpad import ops
from bert_unpad.ops import matmul
from bert_unpad.ops.matmul import no_autocast, product_dtype
from bert_unpad.ops.registration import first_order

# The `approximate` of GELU for transformers' classes of activations. FastGELU and QuickGELU are not
# among them, because they use other formulas.
_GELU = {
    "GELUActivation": "none",
    "NewGELUActivation": "tanh",
    "GELUTanh": "tanh",
    "PytorchGELUTanh": "tanh",
}


def untouched(module: nn.Module) -> bool:
    """Whether calling the module runs only the forward function of its class."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def unchanged(module: nn.Module) -> bool:
    """Whether calling the module runs only a forward function of transformers, or plain dropout."""
    kind = type(module)
    ours = kind is nn.Dropout or kind.__module__.startswith("transformers.models.")
    return ours and untouched(module)


def _plain(parameter: Tensor | None) -> bool:
    return type(parameter) is nn.Parameter or type(parameter) is Tensor


def _linear_parameters(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Returns weight and bias of a plain linear layer in dtypes that fit x; None for others."""
    if type(module) is not nn.Linear or not untouched(module):
        return None
    parameters = module._parameters  # faster than the module's attribute lookup
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if not _plain(weight):
        return None
    return _parameter(weight, x), _parameter(bias, x)


def _parameter(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    if parameter is None or parameter.dtype in (x.dtype, torch.float32):
        return parameter
    return parameter.to(x.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    plain = x.is_cpu and x.dtype == weight.dtype == torch.float32
    if plain and not torch.is_autocast_enabled("cpu") and not matmul.by_us(x, weight):
        return functional.linear(x, weight, bias)  # ops.linear does the same with more overhead
    return ops.linear(x, weight, bias)


def dense(module: nn.Module, x: Tensor) -> Tensor:
    """Computes the linear layer `module` of x, in x's dtype."""
    found = _linear_parameters(module, x)
    return module(x).to(x.dtype) if found is None else _linear(x, *found)


def project(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Computes the linear layer of x; returns the bias too if it is still to be added."""
    found = _linear_parameters(module, x)
    if found is None:
        return module(x).to(x.dtype), None
    return _linear(x, found[0], None), found[1]


def project_side_by_side(modules: tuple[nn.Module, ...], x: Tensor) -> Tensor:
    """Computes n linear layers of equal width of x [T, hidden] into one [T, n, features] buffer.

    In fp32 the n products write into one buffer.
    One product with concatenated weights would have to concatenate them in every call. For queries,
    keys and values of width 768 and 1 thread: 1.8 instead of 6.6 ms forward with 16 tokens; 292
    instead of 384 ms forward and backward with 2,089.
    With fp32 weights and bf16 products on a CPU it is one product: the weights are rounded in every
    call, and rounding them into one matrix costs no more.
    """
    found = [_linear_parameters(module, x) for module in modules]
    if all(pair is not None and pair[1] is not None for pair in found):
        weights, biases = zip(*found, strict=True)
        if not torch.compiler.is_compiling():
            dtype = product_dtype(x)
            parameters = (*weights, *biases)
            rounded = x.is_cpu and dtype == torch.bfloat16
            rounded = rounded and all(weight.dtype == torch.float32 for weight in weights)
            # Partly frozen layers need the gradients of some weights only.
            if rounded and len({parameter.requires_grad for parameter in parameters}) == 1:
                return _Concatenated.apply(x, *parameters)
            if not torch.is_grad_enabled():
                return _side_by_side(
                    x, [t.to(dtype) for t in weights], [t.to(dtype) for t in biases]
                )
            return _SideBySide.apply(x, dtype, *parameters)
        out = ops.linear(x, torch.cat(weights), torch.cat(biases))
        return out.unflatten(1, (len(modules), weights[0].shape[0]))
    return torch.stack([dense(module, x) for module in modules], 1)


def _concatenate(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Rounds and concatenates tensors of one shape, in one pass."""
    first = tensors[0]
    out = first.new_empty((len(tensors), *first.shape), dtype=dtype)
    for part, tensor in zip(out, tensors, strict=True):
        part.copy_(tensor)
    return out.flatten(0, 1)


class _Concatenated(torch.autograd.Function):
    """x W_i^T + b_i for all i as one product, in x's dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, *parameters: Tensor) -> Tensor:
        count = len(parameters) // 2
        weight = _concatenate(parameters[:count], x.dtype)
        bias = _concatenate(parameters[count:], x.dtype)
        ctx.save_for_backward(x, weight, *parameters[:count])
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        with no_autocast(x.device.type):
            out = matmul.forward(x, weight, bias)
        return out.unflatten(1, (count, parameters[0].shape[0]))

    @staticmethod
    @first_order("project_side_by_side")
    def backward(ctx, saved, dy: Tensor):
        x, weight, *weights = saved
        count = len(weights)
        dy = dy.flatten(1)
        dx, gradients = None, [None] * (2 * count)
        # A backward pass within autocast would otherwise compute products in another dtype.
        with no_autocast(dy.device.type):
            if ctx.needs_input_grad[0]:
                dx = matmul.dgrad(dy, weight)
            if any(ctx.needs_input_grad[1:]):  # then all of them
                dweight, dbias = matmul.cpu_wgrad(dy, x, True, torch.float32)
                gradients = [*dweight.chunk(count), *dbias.chunk(count)]
        return dx, *(
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )


def _side_by_side(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """The products in the weights' dtype, into one buffer of it, in x's dtype; no derivative."""
    input = x.to(weights[0].dtype)
    out = input.new_empty((x.shape[0], len(weights), weights[0].shape[0]))
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        matmul.product_into(out[:, i], input, weight, bias)
    return out.to(x.dtype)


class _SideBySide(torch.autograd.Function):
    """x W_i^T + b_i for all i, computed in `dtype` into one buffer."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        ctx.dtypes = dtype, [parameter.dtype for parameter in parameters]
        wide = [parameter.to(dtype) for parameter in parameters]
        weights, biases = wide[: len(wide) // 2], wide[len(wide) // 2 :]
        ctx.save_for_backward(x, *weights, *parameters[: len(weights)])
        return _side_by_side(x, weights, biases)

    @staticmethod
    @first_order("project_side_by_side")
    def backward(ctx, saved, dy: Tensor):
        # A backward pass within autocast would otherwise compute products in another dtype.
        with no_autocast(dy.device.type):
            return _SideBySide._gradients(ctx, saved, dy)

    @staticmethod
    def _gradients(ctx, saved, dy: Tensor):
        dtype, parameter_dtypes = ctx.dtypes
        count = len(parameter_dtypes) // 2
        x, weights = saved[0], saved[1 : 1 + count]
        dy = dy.to(dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            for part, weight in zip(dy.unbind(1), weights, strict=True):
                dx = matmul.product(part, weight.t(), None, dx)
            dx = dx.to(x.dtype)
        needs = ctx.needs_input_grad[2:]
        wide = x.to(dtype)
        gradients = [
            matmul.cpu_wgrad(dy[:, i], wide, False, dtype)[0] if needs[i] else None
            for i in range(count)
        ]
        if any(needs[count:]):
            sums = dy.sum(0, dtype=torch.float32)
            gradients += [sums[i] if needs[count + i] else None for i in range(count)]
        else:
            gradients += [None] * count
        return (
            dx,
            None,
            *(
                gradient if gradient is None else gradient.to(kind)
                for gradient, kind in zip(gradients, parameter_dtypes, strict=True)
            ),
        )


def gelu_kind(module: nn.Module) -> str | None:
    """Returns the `approximate` of a GELU module of transformers; None for other activations."""
    return _GELU.get(type(module).__name__) if untouched(module) else None


def activation(module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """Computes module(x + bias)."""
    kind = gelu_kind(module) if isinstance(module, nn.Module) else None
    if kind is not None:
        return ops.bias_gelu(x, bias, approximate=kind)
    return module(x if bias is None else x + bias).to(x.dtype)


def close_block(
    x: Tensor, x_bias: Tensor | None, residual: Tensor, norm: nn.Module, dropout: nn.Module | None
) -> Tensor:
    """Computes norm(residual + dropout(x + x_bias)); no dropout if `dropout` is None."""
    p = 0.0
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    fused = type(norm) is nn.LayerNorm and untouched(norm) and _plain(weight) and _plain(bias)
    fused = fused and weight.dim() == 1
    if dropout is not None:
        fused = fused and type(dropout) is nn.Dropout and untouched(dropout) and dropout.p < 1
        p = dropout.p if fused and dropout.training else 0.0
    if fused:
        weight, bias = _parameter(weight, x), _parameter(bias, x)
        return ops.dropout_add_layer_norm(
            x, residual, weight, bias, dropout_p=p, eps=norm.eps, x_bias=x_bias
        )
    x = x if x_bias is None else x + x_bias
    x = x if dropout is None else dropout(x)
    return norm(x + residual).to(residual.dtype)
