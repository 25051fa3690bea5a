"""Registers the Python parts of operators: fake kernels, derivatives, and some CPU kernels.

Derivatives are first-order and reverse-mode. Second derivatives and forward mode raise an error;
without it, PyTorch would silently treat them as zero.
"""

import collections
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    DispatchKeySet,
    _after_autograd_keyset,
    _any_requires_grad,
    _AutoDispatchBelowAutograd,
)
from torch.autograd import forward_ad

from bert_unpad.ops.tensor_checks import check_devices, check_storage

Backward = Callable[..., tuple[Tensor | None, ...]]
ByName = Callable[..., Mapping[str, Tensor | None]]

_library = torch.library.Library("bert_unpad", "IMPL")


def register_fake(name: str, *, host: Sequence[str] = ()) -> Callable[[Callable], Callable]:
    """Decorates the function that computes the shapes and dtypes of `bert_unpad::name`'s results.

    Its parameters are the arguments that it reads, by the names of the schema. PyTorch also calls
    it for a mixture of meta and other tensors, for which it raises an error.

    Args:
        name: name of the operator.
        host: arguments that are on the CPU on every device.
    """
    names, defaults = argument_names(name), _defaults(name)

    def decorate(function: Callable) -> Callable:
        places = [names.index(read) for read in inspect.signature(function).parameters]

        def checked(*args: Any) -> Any:
            check_devices(name, {n: t for n, t in _tensors(names, args) if n not in host})
            values = (*args, *defaults[len(args) :])
            return function(*[values[place] for place in places])

        torch.library.register_fake(f"bert_unpad::{name}")(checked)
        return function

    return decorate


def register_in_place(*names: str) -> None:
    """Registers operators that only change their arguments, and return nothing."""
    for name in names:
        register_fake(name)(lambda: None)


def register_cpu(
    name: str, check: Callable[[str, Any], None] | None = None
) -> Callable[[Callable], Callable]:
    """Decorates the function that implements `bert_unpad::name` on a CPU.

    A tensor whose storage was freed raises an error, as in csrc/common/checks.h; PyTorch's own
    operators would crash.

    Args:
        name: name of the operator.
        check: called before the function with the operator's name, and its arguments by name;
            raises a RuntimeError for wrong ones. Calls of the function itself are not checked.
    """
    names, defaults = argument_names(name), _defaults(name)
    given_as = _tuple_type("Given", names)

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def checked(*args: Any) -> Any:
            for argument, t in _tensors(names, args):
                check_storage(name, argument, t)
            if check is not None:
                check(name, given_as(*args, *defaults[len(args) :]))
            return function(*args)

        torch.library.impl(f"bert_unpad::{name}", "CPU")(checked)
        return function

    return decorate


def register_autograd(
    name: str,
    backward: ByName,
    keep: Sequence[str],
    constant: Sequence[str] = (),
    unread: Callable[[Any], Sequence[str]] | None = None,
) -> None:
    """Registers the derivative of `bert_unpad::name`, which takes no lists of tensors.

    What `torch.library.register_autograd` does, in less than half the time of a call: PyTorch's
    reads the operator's schema again at each call, whole for each argument. Arguments and results
    have the names of the schema.

    Args:
        name: name of the operator.
        backward: called with `kept`, a named tuple, and the gradient of each result, which is None
            where nothing was computed from that result; at least one is a tensor. Returns the
            gradients by the names of arguments; None, or no entry, where there is none.
        keep: the arguments and results in `kept`. Its `needs` says whether an argument, by its
            name, needs a gradient.
        constant: the results that have no derivative.
        unread: called in the forward pass with what `keep` names besides tensors; returns names of
            tensors that the backward pass of such a call does not read, and that are None in `kept`
            then.
    """
    schema = _schema(name)
    names = argument_names(name)
    defaults = _defaults(name)
    places = {n: i for i, n in enumerate([*names, *(result.name for result in schema.returns)])}
    tensors = [n for n in keep if n not in names or _is_tensor(schema, n)]
    others = [n for n in keep if n not in tensors]
    kept_as, others_as = (
        _tuple_type("Kept", [*tensors, *others, "needs"]),
        _tuple_type("Kept", others),
    )
    take_tensors, take_others, take_constant = (
        _picker([places[n] for n in part]) for part in (tensors, others, constant)
    )

    @first_order(name)
    def by_place(ctx, saved: Sequence[Tensor | None], *gradients: Tensor | None) -> tuple:
        need = ctx.needs_input_grad  # not of arguments at the end that were left out

        def needs(argument: str) -> bool:
            return places[argument] < len(need) and need[places[argument]]

        found = backward(kept_as(*saved, *ctx.others, needs), *gradients)
        if not places.keys() >= found.keys():
            raise KeyError(f"bert_unpad::{name} has arguments {names}, got {list(found)}")
        return (*map(found.get, names), None)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args: Any) -> Any:
            *inputs, call = args
            output = call(inputs)
            ctx.set_materialize_grads(False)  # statistics have none, and zeros would be written
            results = output if isinstance(output, tuple) else (output,)
            # The dispatcher cuts off arguments at the end that have their default values.
            values = (*inputs, *defaults[len(inputs) :], *results)
            saved: Sequence[Tensor | None] = take_tensors(values)
            ctx.others = take_others(values)
            if unread is not None:
                without = unread(others_as(*ctx.others))
                saved = [None if n in without else t for n, t in zip(tensors, saved, strict=True)]
            ctx.save_for_backward(*saved)
            if constant:
                ctx.mark_non_differentiable(*take_constant(values))
            return output

        @staticmethod
        def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            if all(gradient is None for gradient in gradients):
                return (None,) * len(ctx.needs_input_grad)
            return by_place(ctx, *gradients)

    Node.__name__ = Node.__qualname__ = f"{name}_node"  # shown by profilers and in graphs

    def derive(call: Callable[[Sequence[Any]], Any], args: tuple) -> Any:
        return Node.apply(*args, call)

    _register_kernel(name, derive)


def _picker(places: Sequence[int]) -> Callable[[tuple], tuple]:
    """What takes the elements at these places out of a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


def _tuple_type(title: str, names: Sequence[str]) -> Callable[..., Any]:
    return collections.namedtuple(title, names)  # type: ignore[misc]


def _is_tensor(schema: torch.FunctionSchema, name: str) -> bool:
    return any("Tensor" in str(a.type) for a in schema.arguments if a.name == name)


def register_no_autograd(name: str) -> None:
    """Lets a derivative of `bert_unpad::name` raise an error, once it is needed."""
    names = argument_names(name)

    def derive(call: Callable[[Sequence[Any]], Any], args: tuple) -> Any:
        output = call(args)
        results = output if isinstance(output, tuple) else (output,)
        inputs = (t for _, t in _tensors(names, args))
        message = f"bert_unpad::{name}: gradients are not supported"
        marked = _Undifferentiable.apply(message, len(results), *results, *inputs)
        return marked if isinstance(output, tuple) else marked[0]

    _register_kernel(name, derive)


def _register_kernel(name: str, derive: Callable[[Callable, tuple], Any]) -> None:
    """Registers what runs before the kernels of a device: `derive` where gradients are needed."""
    kernels = getattr(torch.ops.bert_unpad, name).default

    def kernel(keyset: DispatchKeySet, *args: Any) -> Any:
        def call(args: Sequence[Any]) -> Any:
            with _AutoDispatchBelowAutograd():
                return kernels.redispatch(keyset & _after_autograd_keyset, *args)

        if forward_ad._current_level >= 0:
            _refuse_tangents(name, args)
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            return derive(call, args)
        return call(args)

    _library.impl(name, kernel, "Autograd", with_keyset=True)


def first_order(
    name: str, saved_names: Sequence[str | None] = ()
) -> Callable[[Backward], Callable[..., tuple[Tensor | None, ...]]]:
    """Decorates the backward function of an autograd node that has no second derivative.

    The function is called with (ctx, saved tensors, *gradients). With `create_graph=True`,
    differentiating its results raises an error. That needs a path from the results to the node's
    inputs: save the differentiable inputs of the node, or one of its outputs, unchanged.

    A gradient whose storage was freed raises an error, as do saved tensors that have a name here.

    Args:
        name: name of the operator, for the messages.
        saved_names: of the saved tensors that PyTorch's own code reads; None for others.
    """

    def decorate(backward: Backward) -> Callable[..., tuple[Tensor | None, ...]]:
        @functools.wraps(backward)
        def marked(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            if not torch.compiler.is_compiling():
                for argument, t in zip(saved_names, saved, strict=False):
                    if argument is not None and t is not None:
                        check_storage(name, argument, t)
                for i, t in enumerate(gradients):
                    if t is not None:
                        check_storage(name, f"the gradient of result {i}", t)
            # torch.compile raises an error for second derivatives itself.
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, saved, *gradients)
            results = backward(ctx, [_detached(t) for t in saved], *map(_detached, gradients))
            tensors = [t for t in results if t is not None]
            inputs = [t for t in (*saved, *gradients) if t is not None]
            message = (
                f"bert_unpad::{name}: second derivatives are not supported; do not differentiate "
                "a gradient that passed through it"
            )
            out = iter(_Undifferentiable.apply(message, len(tensors), *tensors, *inputs))
            return tuple(None if t is None else next(out) for t in results)

        return marked

    return decorate


def _detached(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach()


class _Undifferentiable(torch.autograd.Function):
    """Returns its first `count` tensors, as functions of all tensors without a known derivative."""

    @staticmethod
    def forward(message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.message = inputs[0]
        ctx.inputs = len(inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[None, ...]:
        if any(t is not None for t in gradients):
            raise NotImplementedError(ctx.message)
        return (None,) * ctx.inputs


def _refuse_tangents(name: str, args: Sequence[Any]) -> None:
    for argument, tensor in _tensors(argument_names(name), args):
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"bert_unpad::{name}: forward-mode differentiation is not supported, but "
                f"{argument} has a tangent; use reverse mode"
            )


def _schema(name: str) -> torch.FunctionSchema:
    return getattr(torch.ops.bert_unpad, name).default._schema


def _defaults(name: str) -> tuple[Any, ...]:
    return tuple(argument.default_value for argument in _schema(name).arguments)


def argument_names(name: str) -> list[str]:
    """Returns the names of an operator's arguments, in order."""
    return [argument.name for argument in _schema(name).arguments]


def _tensors(names: Sequence[str], args: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors among an operator's arguments, including those in lists."""
    for name, value in zip(names, args, strict=False):  # arguments with defaults may be missing
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            for i, element in enumerate(value):
                if isinstance(element, Tensor):
                    yield f"{name}[{i}]", element
