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
    _are_functorch_transforms_active,
    _AutoDispatchBelowAutograd,
    _get_tracing_state,
)
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

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
    unread: Callable[[Any], tuple[str, ...]] | None = None,
) -> Callable[..., Any]:
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

    Returns:
        A function that calls the operator with all of its arguments, by place.
    """
    schema = _schema(name)
    names = argument_names(name)
    inputs = [n for n in names if _is_tensor(schema, n)]
    places = {n: i for i, n in enumerate([*names, *(result.name for result in schema.returns)])}
    tensors = [n for n in keep if n not in names or n in inputs]
    others = [n for n in keep if n not in tensors]
    kept_as = _tuple_type("Kept", [*tensors, *others, "needs"])
    others_as = _tuple_type("Kept", others)
    take_inputs, take_others, take_constant = (
        _picker([places[n] for n in part]) for part in (inputs, others, constant)
    )
    input_places = {n: 2 + i for i, n in enumerate(inputs)}  # among what the node takes

    @functools.cache
    def take_tensors(without: tuple[str, ...]) -> Callable[[tuple], tuple]:
        """What takes the tensors to keep out of all values, whose last one is None."""
        return _picker([len(places) if n in without else places[n] for n in tensors])

    @first_order(name, read=False)
    def by_place(ctx, saved: Sequence[Tensor | None], *gradients: Tensor | None) -> tuple:
        need = ctx.needs_input_grad

        def needs(argument: str) -> bool:
            return need[input_places[argument]]

        found = backward(kept_as(*saved, *ctx.others, needs), *gradients)
        if not input_places.keys() >= found.keys():
            raise KeyError(f"bert_unpad::{name} has tensors {inputs}, got {list(found)}")
        return (None, None, *map(found.get, inputs))

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, call: Callable[..., Any], args: tuple, *_: Tensor | None) -> Any:
            output = _below_autograd(call, args)
            ctx.set_materialize_grads(False)  # statistics have none, and zeros would be written
            values = (*args, *(output if isinstance(output, tuple) else (output,)), None)
            ctx.others = take_others(values)
            without = () if unread is None else unread(others_as(*ctx.others))
            ctx.save_for_backward(*take_tensors(without)(values))
            if constant:
                ctx.mark_non_differentiable(*take_constant(values))
            return output

        @staticmethod
        def backward(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            if all(gradient is None for gradient in gradients):
                return (None,) * len(ctx.needs_input_grad)
            return by_place(ctx, *gradients)

    Node.__name__ = Node.__qualname__ = f"{name}_node"  # shown by profilers and in graphs

    def derive(call: Callable[..., Any], args: tuple) -> Any:
        return Node.apply(call, args, *take_inputs(args))

    return _register_kernel(name, derive)


def _picker(places: Sequence[int]) -> Callable[[tuple], tuple]:
    """What takes the elements at these places out of a tuple."""
    if len(places) > 1:  # itemgetter of one place gives no tuple
        return operator.itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


def _tuple_type(title: str, names: Sequence[str]) -> Callable[..., Any]:
    return collections.namedtuple(title, names)  # type: ignore[misc]


def _is_tensor(schema: torch.FunctionSchema, name: str) -> bool:
    return any("Tensor" in str(a.type) for a in schema.arguments if a.name == name)


def register_no_autograd(name: str) -> None:
    """Lets a derivative of `bert_unpad::name` raise an error, once it is needed."""
    names = argument_names(name)

    def derive(call: Callable[..., Any], args: tuple) -> Any:
        output = _below_autograd(call, args)
        results = output if isinstance(output, tuple) else (output,)
        inputs = (t for _, t in _tensors(names, args))
        message = f"bert_unpad::{name}: gradients are not supported"
        marked = _Undifferentiable.apply(message, len(results), *results, *inputs)
        return marked if isinstance(output, tuple) else marked[0]

    _register_kernel(name, derive)


def _below_autograd(call: Callable[..., Any], args: tuple) -> Any:
    with _AutoDispatchBelowAutograd():
        return call(*args)


def _register_kernel(
    name: str, derive: Callable[[Callable[..., Any], tuple], Any]
) -> Callable[..., Any]:
    """Registers what runs before the kernels of a device: `derive` where gradients are needed.

    The dispatcher takes 4 microseconds to call a kernel in Python. The function that is returned
    calls the operator without them, unless something else may stand before the derivative.
    """
    packet = getattr(torch.ops.bert_unpad, name)
    overload = packet.default
    defaults = _defaults(name)

    def run(call: Callable[..., Any], args: tuple) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, args)
        if torch.is_grad_enabled() and _any_requires_grad(*args):
            return derive(call, args)
        return _below_autograd(call, args)

    def kernel(keyset: DispatchKeySet, *given: Any) -> Any:
        # The dispatcher cuts off arguments at the end that have their default values.
        args = (*given, *defaults[len(given) :])
        return run(functools.partial(overload.redispatch, keyset & _after_autograd_keyset), args)

    def direct(*args: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or _are_functorch_transforms_active()
            or _get_tracing_state() is not None
            or has_torch_function(args)
        ):
            return packet(*args)  # which modes of __torch_function__ see, and no overload
        return run(overload, args)

    _library.impl(name, kernel, "Autograd", with_keyset=True)
    return direct


def first_order(
    name: str, saved_names: Sequence[str | None] = (), *, read: bool = True
) -> Callable[[Backward], Callable[..., tuple[Tensor | None, ...]]]:
    """Decorates the backward function of an autograd node that has no second derivative.

    The function is called with (ctx, saved tensors, *gradients). With `create_graph=True`,
    differentiating its results raises an error. That needs a path from the results to the node's
    inputs: save the differentiable inputs of the node, or one of its outputs, unchanged.

    A gradient whose storage was freed raises an error, as do saved tensors that have a name here.

    Args:
        name: name of the operator, for the messages.
        saved_names: of the saved tensors that PyTorch's own code reads; None for others.
        read: PyTorch's own code reads the gradients, not an operator of C++, which would check
            them: check contiguous ones too.
    """

    def decorate(backward: Backward) -> Callable[..., tuple[Tensor | None, ...]]:
        @functools.wraps(backward)
        def marked(ctx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            compiling = torch.compiler.is_compiling()
            if not compiling:
                for argument, t in zip(saved_names, saved, strict=False):
                    if argument is not None and t is not None:
                        check_storage(name, argument, t)
                for i, t in enumerate(gradients):
                    if t is not None and (read or not t.is_contiguous()):
                        check_storage(name, f"the gradient of result {i}", t)
            # torch.compile raises an error for second derivatives itself.
            if compiling or not torch.is_grad_enabled():
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
