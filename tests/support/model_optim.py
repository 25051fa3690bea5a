"""The operators over lists of tensors on the model of a block."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from gpu_model.block_model import Model
from gpu_model.build import KERNELS, load
from tests.support.backends import on_the_model
from tests.support.model_checks import DTYPES, Buffers

CHUNK = 1 << 14  # kBlockElements
LAMB, STABLE = 1, 2  # Ratio of csrc/optim/update.h, of which 0 is none
Tensors = Sequence[Tensor]


@cache
def model() -> Model:
    return Model(load(KERNELS / "optim.cpp"))


def _pointers(*columns: Tensors) -> ctypes.Array:
    """Those of each row; an empty column has none."""
    count = len(columns[0])
    rows = zip(*(column or [None] * count for column in columns), strict=True)
    values = [None if t is None else t.data_ptr() for row in rows for t in row]
    return (ctypes.c_void_p * len(values))(*values)


def _numbers(values: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*map(int, values))


def _plain(tensors: Tensors) -> tuple[object, ...]:
    kinds = _numbers([DTYPES[t.dtype] for t in tensors])
    return len(tensors), _pointers(tensors), _numbers([t.numel() for t in tensors]), kinds


def _chunks(tensors: Tensors) -> int:
    return sum(-(-t.numel() // CHUNK) for t in tensors)


def _open(read: Sequence[Tensor | None], written: Sequence[Tensor | None]) -> Buffers:
    """Lets kernels read and change what they get."""
    buffers = Buffers(model())
    for tensor in read:
        buffers.read(tensor)
    for tensor in written:
        if tensor is not None:
            model().register(tensor)
    return buffers


@on_the_model(model)
def multi_tensor_l2norm(tensors: Tensors) -> tuple[Tensor, Tensor]:
    buffers = _open(tensors, ())
    total, each, partials = (torch.empty(shape) for shape in ((), len(tensors), _chunks(tensors)))
    results = map(buffers.write, (partials, total, each))
    model().call("optim_norm", *_plain(tensors), *results)
    return total, each


@on_the_model(model)
def multi_tensor_scale_(tensors: Tensors, factor: Tensor) -> None:
    _open([factor], tensors)
    model().call("optim_scale", *_plain(tensors), factor)


def _update(
    lists: Sequence[Tensors], numbers: Sequence[float], flags: Sequence[int],
    scalars: Sequence[Tensor | None] = (None,) * 5, *, rows: Tensor | None = None,
    sums: Tensor | None = None, first: bool = True, second: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Adam where both passes are asked for at once, else one of two passes.

    Args:
        lists: params, grads, exp_avgs, exp_avg_sqs, masters, steps.
        numbers: beta1, beta2, eps, weight_decay, max_grad_norm.
        flags: decoupled, bias_correction, grad_averaging, ratio, nesterov, maximize.
        scalars: lr, grad_scale, norm, the norm of each gradient, skipped.
        rows, sums: what the first pass leaves; of a second pass alone, what it gets.
        first, second: which passes.

    Returns:
        Sums and rows.
    """
    params, grads, exp_avgs, exp_avg_sqs, masters, steps = lists
    *given, skipped = scalars
    moved, moments = [*params, *masters], [*exp_avgs, *exp_avg_sqs, *steps, skipped]
    read = [*grads, *given, *([] if first else moments), *([] if second else moved)]
    buffers = _open(read, [*(moments if first else []), *(moved if second else [])])
    count, of_sums = len(params), 3
    if rows is None:
        rows, sums = torch.empty(count, 4), None if second else torch.empty(count, of_sums)
        buffers.write(rows)
        buffers.write(sums)
    else:
        buffers.read(rows)
        buffers.read(sums)
    partials = torch.empty(_chunks(grads), of_sums)
    buffers.write(partials)
    model().call(
        *("optim_update", count, _pointers(*lists), _numbers([g.numel() for g in grads])),
        *(DTYPES[params[0].dtype], DTYPES[grads[0].dtype]),
        *((ctypes.c_double * 5)(*numbers), _numbers(flags), *scalars),
        *(rows, partials, sums, first, second),
    )
    return sums, rows


@on_the_model(model)
def adam_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors,
    steps: Tensors, lr: Tensor, grad_scale: Tensor | None, norm: Tensor | None,
    skipped: Tensor | None, beta1: float, beta2: float, eps: float, weight_decay: float,
    max_grad_norm: float, decoupled: bool, bias_correction: bool, maximize: bool,
) -> None:  # fmt: skip
    lists = (params, grads, exp_avgs, exp_avg_sqs, masters, steps)
    numbers = (beta1, beta2, eps, weight_decay, max_grad_norm)
    flags = (decoupled, bias_correction, True, 0, False, maximize)
    if params:
        _update(lists, numbers, flags, (lr, grad_scale, norm, None, skipped))


@on_the_model(model)
def lamb_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors,
    steps: Tensors, lr: Tensor, grad_scale: Tensor | None, norm: Tensor | None,
    grad_norms: Tensor | None, skipped: Tensor | None, beta1: float, beta2: float, eps: float,
    weight_decay: float, max_grad_norm: float, grad_averaging: bool, bias_correction: bool,
    trust_ratio: bool, nesterov: bool, maximize: bool,
) -> None:  # fmt: skip
    head = (params, grads, exp_avgs, exp_avg_sqs, masters)
    if params:
        sums, rows = lamb_moments_(
            *(*head, steps, lr, grad_scale, norm, grad_norms, skipped, beta1, beta2, eps),
            *(weight_decay, max_grad_norm, grad_averaging, bias_correction, nesterov, maximize),
        )
        lamb_apply_(*head, sums, rows, beta1, eps, weight_decay, trust_ratio, nesterov)


@on_the_model(model)
def lamb_moments_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors,
    steps: Tensors, lr: Tensor, grad_scale: Tensor | None, norm: Tensor | None,
    grad_norms: Tensor | None, skipped: Tensor | None, beta1: float, beta2: float, eps: float,
    weight_decay: float, max_grad_norm: float, grad_averaging: bool, bias_correction: bool,
    nesterov: bool, maximize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    lists = (params, grads, exp_avgs, exp_avg_sqs, masters, steps)
    numbers = (beta1, beta2, eps, weight_decay, max_grad_norm)
    flags = (True, bias_correction, grad_averaging, LAMB, nesterov, maximize)
    scalars = (lr, grad_scale, norm, grad_norms, skipped)
    return _update(lists, numbers, flags, scalars, second=False)


@on_the_model(model)
def lamb_apply_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors,
    sums: Tensor, coefficients: Tensor, beta1: float, eps: float, weight_decay: float,
    trust_ratio: bool, nesterov: bool,
) -> None:  # fmt: skip
    lists = (params, grads, exp_avgs, exp_avg_sqs, masters, ())
    flags = (True, False, True, LAMB if trust_ratio else 0, nesterov, False)
    numbers = (beta1, 0.0, eps, weight_decay, 0.0)
    _update(lists, numbers, flags, rows=coefficients, sums=sums, first=False)


@on_the_model(model)
def stable_adamw_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors,
    steps: Tensors, lr: Tensor, grad_scale: Tensor | None, norm: Tensor | None,
    skipped: Tensor | None, beta1: float, beta2: float, eps: float, weight_decay: float,
    max_grad_norm: float, maximize: bool,
) -> None:  # fmt: skip
    head = (params, grads, exp_avgs, exp_avg_sqs, masters)
    if params:
        sums, rows = stable_adamw_moments_(
            *(*head, steps, lr, grad_scale, norm, skipped, beta1, beta2, eps, weight_decay),
            *(max_grad_norm, maximize),
        )
        stable_adamw_apply_(*head, sums, rows, eps, weight_decay)


@on_the_model(model)
def stable_adamw_moments_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors,
    steps: Tensors, lr: Tensor, grad_scale: Tensor | None, norm: Tensor | None,
    skipped: Tensor | None, beta1: float, beta2: float, eps: float, weight_decay: float,
    max_grad_norm: float, maximize: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    lists = (params, grads, exp_avgs, exp_avg_sqs, masters, steps)
    numbers = (beta1, beta2, eps, weight_decay, max_grad_norm)
    flags = (True, True, True, STABLE, False, maximize)
    return _update(lists, numbers, flags, (lr, grad_scale, norm, None, skipped), second=False)


@on_the_model(model)
def stable_adamw_apply_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors,
    sums: Tensor, coefficients: Tensor, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    lists = (params, grads, exp_avgs, exp_avg_sqs, masters, ())
    numbers, flags = (0.0, 0.0, eps, weight_decay, 0.0), (True, True, True, STABLE, False, False)
    _update(lists, numbers, flags, rows=coefficients, sums=sums, first=False)


@on_the_model(model)
def frozen_adam_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors,
    steps: Tensors, variance_step: Tensor | None, lr: Tensor, grad_scale: Tensor | None,
    norm: Tensor | None, skipped: Tensor | None, beta1: float, beta2: float, eps: float,
    weight_decay: float, averaged: bool, bias_correction: bool,
) -> None:  # fmt: skip
    scalars, count = (lr, variance_step, grad_scale, norm), len(params)
    read, rows = [*grads, *exp_avg_sqs, *scalars], torch.empty(count, 4)
    _open(read, [*params, *exp_avgs, *masters, *steps, skipped]).write(rows)
    model().call(
        "optim_frozen_adam", count,
        _pointers(params, grads, exp_avgs, exp_avg_sqs, masters, steps),
        _numbers([g.numel() for g in grads]), DTYPES[params[0].dtype], DTYPES[grads[0].dtype],
        (ctypes.c_double * 4)(beta1, beta2, eps, weight_decay),
        _numbers([lr.numel() > 1, averaged, bias_correction]), *scalars, skipped, rows,
    )  # fmt: skip


@on_the_model(model)
def frozen_lamb_sums_(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, fresh_sqs: Tensors,
    norm: Tensor | None, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> Tensor:  # fmt: skip
    buffers = _open([*params, *grads, *exp_avgs, *exp_avg_sqs, norm], fresh_sqs)
    sums, partials = torch.empty(len(params), 3), torch.empty(_chunks(grads), 3)
    saved = map(buffers.write, (partials, sums))
    model().call(
        "optim_frozen_lamb_sums", len(params),
        _pointers(params, grads, exp_avgs, exp_avg_sqs, fresh_sqs, ()),
        _numbers([g.numel() for g in grads]), DTYPES[params[0].dtype],
        (ctypes.c_double * 4)(beta1, beta2, eps, weight_decay), norm, *saved,
    )  # fmt: skip
    return sums
