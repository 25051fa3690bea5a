"""Computes plain modules of Hugging Face's layers with our operators, and calls all others.

A module is plain if it is exactly PyTorch's class, has no hooks, and its parameters are ordinary
tensors. An adapter (LoRA), a quantised layer or a module with a hook is called unchanged; only the
fusion with its neighbours is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bert_unpad import ops
from bert_unpad.ops import matmul
from bert_unpad.ops.glu import GluKind
from bert_unpad.ops.matmul import no_autocast, product_dtype
from bert_unpad.ops.norm import NormOptions
from bert_unpad.ops.registration import first_order

# The `approximate` of GELU for transformers' classes of activations. FastGELU and QuickGELU are not
# among them, because they use other formulas.
_GELU: dict[str, Literal["none", "tanh"]] = {
    "GELUActivation": "none",
    "NewGELUActivation": "tanh",
    "GELUTanh": "tanh",
    "PytorchGELUTanh": "tanh",
}
# The `kind` of `ops.glu` for them, and for other activations of gates.
_GLU: dict[str, GluKind] = {
    **{name: "gelu" if kind == "none" else "gelu_tanh" for name, kind in _GELU.items()},
    **{"SiLU": "silu", "SiLUActivation": "silu", "ReLU": "relu"},
}
_Kind = TypeVar("_Kind")


def untouched(module: nn.Module) -> bool:
    """Whether calling the module runs only the forward function of its class."""
    return not hooked(module.__dict__)


def hooked(attributes: Mapping[str, Any]) -> bool:
    """Whether calling a module with these attributes runs more, or something else, than its class
    says.

    The hooks that transformers 5 leaves on modules after a call with `output_hidden_states` or
    `output_attentions` do nothing in other calls.
    """
    after = attributes["_forward_hooks"]
    return bool(
        (after and any(getattr(x, "__module__", None) != _CAPTURING for x in after.values()))
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
        or "forward" in attributes
    )


_CAPTURING = "transformers.utils.output_capturing"


def unchanged(module: nn.Module) -> bool:
    """Whether calling the module runs only a forward function of transformers, or plain dropout."""
    kind = type(module)
    ours = kind is nn.Dropout or kind.__module__.startswith("transformers.models.")
    return ours and untouched(module)


def _plain(parameter: Tensor | None) -> TypeGuard[Tensor]:
    return type(parameter) is nn.Parameter or type(parameter) is Tensor


def linear_parameters(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Returns weight and bias of a plain linear layer in dtypes that fit x; None for others."""
    if type(module) is not nn.Linear or not untouched(module):
        return None
    parameters = module._parameters  # faster than the module's attribute lookup
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if not _plain(weight):
        return None
    return _parameter(weight, x), None if bias is None else _parameter(bias, x)


def _parameter(parameter: Tensor, x: Tensor) -> Tensor:
    if parameter.dtype in (x.dtype, torch.float32):
        return parameter
    return parameter.to(x.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    plain = x.is_cpu and x.dtype == weight.dtype == torch.float32
    if plain and not torch.is_autocast_enabled("cpu") and not matmul.by_us(x, weight):
        return functional.linear(x, weight, bias)  # ops.linear does the same with more overhead
    return ops.linear(x, weight, bias)


def dense(module: nn.Module, x: Tensor) -> Tensor:
    """Computes the linear layer `module` of x, in x's dtype."""
    found = linear_parameters(module, x)
    return module(x).to(x.dtype) if found is None else _linear(x, *found)


def project(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Computes the linear layer of x; returns the bias too if it is still to be added."""
    found = linear_parameters(module, x)
    if found is None:
        return module(x).to(x.dtype), None
    return _linear(x, found[0], None), found[1]


def project_side_by_side(modules: tuple[nn.Module, ...], x: Tensor) -> Tensor:
    """Computes n linear layers of x [T, hidden], their features side by side: [T, n * features].

    One module in all places computes all of them. In fp32 n products of equal width write into one
    buffer.
    One product with concatenated weights would have to concatenate them in every call. For queries,
    keys and values of width 768 and 1 thread: 1.8 instead of 6.6 ms forward with 16 tokens; 292
    instead of 384 ms forward and backward with 2,089.
    With fp32 weights and bf16 products on a CPU it is one product: the weights are rounded in every
    call, and rounding them into one matrix costs no more.
    """
    if all(module is modules[0] for module in modules):
        return dense(modules[0], x)
    parameters_of = [linear_parameters(module, x) for module in modules]
    found = [pair for pair in parameters_of if pair is not None]
    alike = len({(weight.shape, bias is None) for weight, bias in found}) == 1
    if len(found) < len(modules) or not alike:
        return torch.cat([dense(module, x) for module in modules], 1)
    weights = tuple(weight for weight, _ in found)
    biases = tuple(bias for _, bias in found if bias is not None)
    parameters = (*weights, *biases)
    if torch.compiler.is_compiling():
        return ops.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    dtype = product_dtype(x)
    rounded = x.is_cpu and dtype == torch.bfloat16
    rounded = rounded and all(weight.dtype == torch.float32 for weight in weights)
    # Partly frozen layers need the gradients of some weights only.
    if rounded and len({parameter.requires_grad for parameter in parameters}) == 1:
        return _Concatenated.apply(x, len(weights), *parameters)
    if not torch.is_grad_enabled():
        return _side_by_side(x, [t.to(dtype) for t in weights], [t.to(dtype) for t in biases])
    return _SideBySide.apply(x, dtype, len(weights), *parameters)


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
    def forward(ctx, x: Tensor, count: int, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        weight = _concatenate(weights, x.dtype)
        bias = _concatenate(biases, x.dtype) if biases else None
        ctx.save_for_backward(x, weight, *weights)
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        with no_autocast(x.device.type):
            return matmul.forward(x, weight, bias)

    @staticmethod
    @first_order("project_side_by_side")
    def backward(ctx, saved, dy: Tensor):
        x, weight, *weights = saved
        count, biases = len(weights), len(ctx.dtypes) > len(weights)
        dx = None
        gradients: list[Tensor | None] = [None] * len(ctx.dtypes)
        # A backward pass within autocast would otherwise compute products in another dtype.
        with no_autocast(dy.device.type):
            if ctx.needs_input_grad[0]:
                dx = matmul.dgrad(dy, weight)
            if any(ctx.needs_input_grad[2:]):  # then all of them
                dweight, dbias = matmul.cpu_wgrad(dy, x, biases, torch.float32)
                gradients = [*dweight.chunk(count), *(dbias.chunk(count) if biases else ())]
        return (
            dx,
            None,
            *(
                None if gradient is None else gradient.to(dtype)
                for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
            ),
        )


def _side_by_side(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """The products in the weights' dtype, into one buffer of it, in x's dtype; no derivative."""
    input = x.to(weights[0].dtype)
    out = input.new_empty((x.shape[0], len(weights) * weights[0].shape[0]))
    parts = out.chunk(len(weights), 1)
    for part, weight, bias in zip_longest(parts, weights, biases):
        matmul.product_into(part, input, weight, bias)
    return out.to(x.dtype)


class _SideBySide(torch.autograd.Function):
    """x W_i^T + b_i for all i, computed in `dtype` into one buffer."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype, count: int, *parameters: Tensor) -> Tensor:
        ctx.dtypes = dtype, [parameter.dtype for parameter in parameters]
        wide = [parameter.to(dtype) for parameter in parameters]
        ctx.save_for_backward(x, *wide[:count], *parameters[:count])
        return _side_by_side(x, wide[:count], wide[count:])

    @staticmethod
    @first_order("project_side_by_side")
    def backward(ctx, saved, dy: Tensor):
        # A backward pass within autocast would otherwise compute products in another dtype.
        with no_autocast(dy.device.type):
            return _SideBySide._gradients(ctx, saved, dy)

    @staticmethod
    def _gradients(ctx, saved, dy: Tensor):
        dtype, parameter_dtypes = ctx.dtypes
        count = len(saved) // 2
        x, weights = saved[0], saved[1 : 1 + count]
        dy = dy.to(dtype)
        parts = dy.chunk(count, 1)
        dx = None
        if ctx.needs_input_grad[0]:
            for part, weight in zip(parts, weights, strict=True):
                dx = matmul.product(part, weight.t(), None, dx)
            dx = None if dx is None else dx.to(x.dtype)
        needs = ctx.needs_input_grad[3:]
        wide = x.to(dtype)
        gradients = [
            matmul.cpu_wgrad(part, wide, False, dtype)[0] if needed else None
            for part, needed in zip(parts, needs, strict=False)
        ]
        biases = needs[count:]
        sums = dy.sum(0, dtype=torch.float32).chunk(count) if any(biases) else [None] * count
        gradients += [x if needed else None for x, needed in zip(sums, biases, strict=False)]
        return (
            dx,
            None,
            None,
            *(
                gradient if gradient is None else gradient.to(kind)
                for gradient, kind in zip(gradients, parameter_dtypes, strict=True)
            ),
        )


def activated(
    linears: tuple[nn.Module, nn.Module | None], activation: nn.Module | None, x: Tensor
) -> Tensor:
    """Computes the activation of a linear layer of x [1, T, hidden], times a gate if there is one.

    Args:
        linears: the layer, and the one that the gate is of; one for both if it computes both.
        activation: None: GELU.
        x: the input.
    """
    first, gate = linears
    if gate is None:
        y, bias = project(first, x)
        kind = "none" if activation is None else _kind(activation, _GELU)
        if activation is not None and kind is None:
            return activation(y if bias is None else y + bias).to(y.dtype)
        return ops.bias_gelu(y, bias, approximate=kind or "none")
    if gate is first:
        y, bias = project(first, x)
    else:
        y, bias = project_side_by_side((first, gate), x[0])[None], None
    glu = glu_kind(activation)
    if activation is not None and glu is None:
        a, b = (y if bias is None else y + bias).chunk(2, -1)
        return (activation(a) * b).to(y.dtype)
    return ops.glu(y, glu or "gelu", bias)


def _kind(module: nn.Module, kinds: Mapping[str, _Kind]) -> _Kind | None:
    fits = isinstance(module, nn.Module) and untouched(module)
    return kinds.get(type(module).__name__) if fits else None


def glu_kind(activation: nn.Module | None) -> GluKind | None:
    """The activation of a feed-forward half for operators, None: GELU; None for others."""
    return "gelu" if activation is None else _kind(activation, _GLU)


def rate(dropout: nn.Module | None) -> float | None:
    """The rate of dropout that an operator can do, now; None if its module has to be called."""
    if dropout is None or (type(dropout) is nn.Identity and untouched(dropout)):
        return 0.0
    if type(dropout) is not nn.Dropout or not untouched(dropout) or dropout.p >= 1:
        return None
    return dropout.p if dropout.training else 0.0


class NormParameters(NamedTuple):
    """A norm that operators compute."""

    rms: bool
    weight: Tensor
    bias: Tensor | None
    eps: float


def norm_of(module: nn.Module, x: Tensor) -> NormParameters | None:
    """What an operator needs to normalise x by a plain LayerNorm or RMSNorm; None for others."""
    rms = type(module).__name__ == "EuroBertRMSNorm"
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    plain = (rms or type(module) is nn.LayerNorm) and untouched(module)
    if not plain or not _plain(weight) or weight.dim() != 1 or not (bias is None or _plain(bias)):
        return None
    eps = getattr(module, "variance_epsilon" if rms else "eps")
    return NormParameters(
        rms, _parameter(weight, x), None if bias is None else _parameter(bias, x), eps
    )


def normalise(module: nn.Module, x: Tensor) -> Tensor:
    """Computes the norm of x, or what else the module does, in x's dtype."""
    norm = norm_of(module, x)
    if norm is None:
        return module(x).to(x.dtype)
    if norm.rms:
        return ops.rms_norm(x, norm.weight, norm.eps)
    return ops.layer_norm(x, norm.weight, norm.bias, norm.eps)


def close_block(
    x: Tensor, x_bias: Tensor | None, residual: Tensor, norm: nn.Module, dropout: nn.Module | None
) -> Tensor:
    """Computes norm(residual + dropout(x + x_bias)); no dropout if `dropout` is None."""
    return add_and_normalise(x, x_bias, residual, norm, dropout, False)[0]


def add_and_normalise(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor,
    module: nn.Module,
    dropout: nn.Module | None,
    return_sum: bool = True,
) -> tuple[Tensor, Tensor]:
    """Computes the sum residual + dropout(x + x_bias), in residual's dtype, and its norm, in x's.

    Args:
        x, residual: of one shape.
        x_bias: of x's last dimension, or None.
        module: the norm.
        dropout: None: no dropout.
        return_sum: return the sum too.

    Returns:
        The norm, and the sum, in whose place the norm may stand if it was not asked for.
    """
    p, norm = rate(dropout), norm_of(module, x)
    if p is None or norm is None or x.dtype != residual.dtype:
        total = add(x, x_bias, residual, dropout)
        return normalise(module, total).to(x.dtype), total
    more: NormOptions = {
        "dropout_p": p,
        "eps": norm.eps,
        "x_bias": x_bias,
        "rng": None,
        "return_sum": return_sum,
    }
    if norm.rms:
        found = ops.dropout_add_rms_norm(x, residual, norm.weight, **more)
    else:
        found = ops.dropout_add_layer_norm(x, residual, norm.weight, norm.bias, **more)
    if isinstance(found, Tensor):
        return found, found
    total, y = found
    return y, total


def add(x: Tensor, x_bias: Tensor | None, residual: Tensor, dropout: nn.Module | None) -> Tensor:
    """Computes residual + dropout(x + x_bias), in residual's dtype; no dropout for None."""
    x = x if x_bias is None else x + x_bias
    x = x if dropout is None else dropout(x)
    return (x + residual).to(residual.dtype)
