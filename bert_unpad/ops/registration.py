"""Registers the Python parts of operators: fake kernels, derivatives, and some CPU kernels.

Derivatives are first-order and reverse-mode. Second derivatives and forward mode raise an error;
without it, PyTorch would silently treat them as zero.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

Backward = Callable[..., tuple[Tensor | None, ...]]


def register_fake(name: str, *, host: Sequence[str] = ()) -> Callable[[Callable], Callable]:
    """Decorates the function that computes the shapes and dtypes of `bert_unpad::name`'s results.

    PyTorch also calls it for a mixture of meta and other tensors, for which it raises an error.

    Args:
        name: name of the operator.
        host: arguments that are on the CPU on every device.
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


def register_in_place(*names: str) -> None:
    """Registers operators that only change their arguments, and return nothing."""
    for name in names:
        register_fake(name)(lambda *arguments: None)


def register_cpu(name: str) -> Callable[[Callable], Callable]:
    """Decorates the function that implements `bert_unpad::name` on a CPU.

    A tensor whose storage was freed raises an error, as in csrc/common/checks.h; PyTorch's own
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
    """Registers the derivative of `bert_unpad::name`.

    Args:
        name: name of the operator.
        backward: the backward function; see `first_order` for its arguments. None raises an error
            when a derivative is needed.
        setup_context: as in `torch.library.register_autograd`.
    """
    torch.library.register_autograd(
        f"bert_unpad::{name}",
        _no_derivative(name) if backward is None else first_order(name)(backward),
        setup_context=setup_context,
        lib=_library_of_kernels,
    )


def first_order(name: str) -> Callable[[Backward], Callable[..., tuple[Tensor | None, ...]]]:
    """Decorates the backward function of an autograd node that has no second derivative.

    The function is called with (ctx, saved tensors, *gradients). With `create_graph=True`,
    differentiating its results raises an error. That needs a path from the results to the node's
    inputs: save the differentiable inputs of the node, or one of its outputs, unchanged.

    Args:
        name: name of the operator, for the message.
    """

    def decorate(backward: Backward) -> Callable[..., tuple[Tensor | None, ...]]:
        @functools.wraps(backward)
        def marked(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            # torch.compile raises an error for second derivatives itself.
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
    """Returns its first `count` tensors, as functions of all tensors without a known derivative."""

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
    """A library whose kernels raise an error for tangents of forward-mode differentiation."""

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
    """Yields all tensors among an operator's arguments, including those in lists."""
    for name, value in zip(names, args, strict=False):  # arguments with defaults may be missing
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for i, element in enumerate(value):
                if isinstance(element, Tensor):
                    yield f"{name}[{i}]", element
