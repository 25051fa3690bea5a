"""What the operators are given from Python: fake kernels, derivatives, and some CPU kernels.

Derivatives are of first order and reverse mode. Anything else raises an error: without that,
PyTorch would take the second derivative of a compiled operator, or its forward-mode tangent, for
zero.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from bert_unpad import _library as _library  # schemas must exist

Backward = Callable[..., tuple[Tensor | None, ...]]


def register_fake(name: str, *, host: Sequence[str] = ()) -> Callable[[Callable], Callable]:
    """Decorates the function that gives the shapes and dtypes of `bert_unpad::name`'s results.

    PyTorch also calls it for a mixture of meta tensors and others, which it refuses.

    Args:
        host: arguments that lie on the CPU wherever the data is.
    """
    names = _argument_names(name)

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def checked(*args: Any) -> Any:
            first = None
            for argument, tensor in _tensors(names, args):
                if argument in host:
                    continue
                first = first or (argument, tensor.device)
                if tensor.device != first[1]:
                    raise RuntimeError(
                        f"{name}: {argument}: expected a tensor on {first[1]} like {first[0]}, "
                        f"got one on {tensor.device}"
                    )
            return function(*args)

        torch.library.register_fake(f"bert_unpad::{name}")(checked)
        return function

    return decorate


def register_cpu(name: str) -> Callable[[Callable], Callable]:
    """Decorates a function that is what `bert_unpad::name` does on a CPU.

    As in csrc/common/checks.h, a tensor whose storage was freed is an error: PyTorch's own
    operators would crash.
    """
    names = _argument_names(name)

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def checked(*args: Any) -> Any:
            for argument, t in _tensors(names, args):
                needed, there = _bytes_needed(t), t.untyped_storage().nbytes()
                if there < needed:
                    raise RuntimeError(
                        f"{name}: {argument} must have a storage of at least {needed} bytes for "
                        f"shape {list(t.shape)}, got one of {there}; was it freed?"
                    )
            return function(*args)

        torch.library.impl(f"bert_unpad::{name}", "CPU")(checked)
        return function

    return decorate


def register_autograd(
    name: str, backward: Backward | None = None, setup_context: Callable[..., None] | None = None
) -> None:
    """Gives `bert_unpad::name` its derivative, or, without one, an error where it is asked for.

    Args:
        backward: called as `first_order` says.
        setup_context: as in `torch.library.register_autograd`.
    """
    torch.library.register_autograd(
        f"bert_unpad::{name}",
        _no_derivative(name) if backward is None else first_order(name)(backward),
        setup_context=setup_context,
        lib=_library_of_kernels,
    )


def first_order(name: str) -> Callable[[Backward], Callable[..., tuple[Tensor | None, ...]]]:
    """Decorates the backward function of an autograd node whose derivative is not known.

    The function is called with (ctx, saved tensors, *gradients). Where a graph of the backward pass
    is asked for (`create_graph=True`), its results are marked: whoever differentiates them again
    gets an error. Such a second derivative is one with respect to `gradients` or to what was saved,
    so save the node's differentiable inputs, or an output of the node, as they are.

    Args:
        name: of the operator, for the message.
    """

    def decorate(backward: Backward) -> Callable[..., tuple[Tensor | None, ...]]:
        @functools.wraps(backward)
        def marked(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            # A compiler refuses second derivatives itself.
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, saved, *gradients)
            results = backward(ctx, [_detached(t) for t in saved], *map(_detached, gradients))
            tensors = [t for t in results if t is not None]
            inputs = [t for t in (*saved, *gradients) if t is not None]
            out = iter(_Undifferentiable.apply(name, len(tensors), *tensors, *inputs))
            return tuple(None if t is None else next(out) for t in results)

        return marked

    return decorate


def _detached(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach()


class _Undifferentiable(torch.autograd.Function):
    """The first `count` tensors, as functions of all that have a derivative nobody knows."""

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.name = inputs[0]
        ctx.inputs = len(inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[None, ...]:
        if any(t is not None for t in gradients):
            raise NotImplementedError(
                f"bert_unpad::{ctx.name}: second derivatives are not supported; do not "
                "differentiate a gradient that passed through it"
            )
        return (None,) * ctx.inputs


def _no_derivative(name: str) -> Backward:
    def backward(ctx, *gradients):
        raise NotImplementedError(f"bert_unpad::{name}: gradients are not supported")

    return backward


class _Library(torch.library.Library):
    """Kernels that refuse the tangents of forward-mode differentiation."""

    def impl(self, op_name: str, fn: Callable, *args: Any, **options: Any) -> None:
        @functools.wraps(fn)
        def kernel(keyset, *args: Any, **kwargs: Any) -> Any:
            if forward_ad._current_level >= 0:
                _refuse_tangents(op_name, args)
            return fn(keyset, *args, **kwargs)

        super().impl(op_name, kernel, *args, **options)


_library_of_kernels = _Library("bert_unpad", "IMPL")


def _refuse_tangents(name: str, args: Sequence[Any]) -> None:
    for argument, tensor in _tensors(_argument_names(name), args):
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"bert_unpad::{name}: forward-mode differentiation is not supported, but "
                f"{argument} has a tangent; use reverse mode"
            )


def _argument_names(name: str) -> list[str]:
    schema = getattr(torch.ops.bert_unpad, name).default._schema
    return [argument.name for argument in schema.arguments]


def _bytes_needed(t: Tensor) -> int:
    if t.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (t.storage_offset() + last + 1) * t.element_size()


def _tensors(names: Sequence[str], args: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """All tensors among an operator's arguments, also those in lists."""
    for name, value in zip(names, args, strict=False):  # defaults may be left out
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for i, element in enumerate(value):
                if isinstance(element, Tensor):
                    yield f"{name}[{i}]", element
