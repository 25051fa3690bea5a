"""Operators over lists of tensors: norm, scaling, Adam and LAMB; documentation and fake kernels.

They are what `bert_unpad.optim` is made of; the optimizers there keep the state. Everything that
differs between steps is a tensor on the data's device, so nothing waits and a captured CUDA graph
can be replayed for the next step. The same inputs give the same bits, whatever the threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bert_unpad.ops.registration import register_autograd, register_fake

_ops = torch.ops.bert_unpad


def multi_tensor_l2norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The L2 norm of all tensors together and of each one, in one pass over them.

    Args:
        tensors: at least one, float32, bfloat16 or float16 (also mixed), contiguous, any shapes.

    Returns:
        total: float32 [], each: float32 [len(tensors)]. An infinity or NaN among the elements makes
        its norms infinite or NaN.

    Raises:
        ValueError: for an empty list.
        RuntimeError: for a tensor of another dtype, device or layout, naming it.
    """
    if not tensors:
        raise ValueError("multi_tensor_l2norm: tensors must not be empty")
    return _ops.multi_tensor_l2norm(list(tensors))


def multi_tensor_scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies all tensors by `factor`, in place.

    Args:
        tensors: float32, bfloat16 or float16 (also mixed), contiguous.
        factor: float32 [] on their device.

    Raises:
        RuntimeError: for a tensor of another dtype, device or layout, naming it.
    """
    _ops.multi_tensor_scale_(list(tensors), factor)


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    masters: Sequence[Tensor] = (),
    grad_scale: Tensor | None = None,
    norm: Tensor | None = None,
    skipped: Tensor | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    decoupled: bool = True,
    bias_correction: bool = True,
    maximize: bool = False,
) -> None:
    """One Adam step of all parameters, in one pass.

    Kingma and Ba, "Adam" (ICLR 2015); with `decoupled` weight decay Loshchilov and Hutter,
    "Decoupled weight decay regularization" (ICLR 2019), else the decay is added to the gradient.

    Args:
        params: float32, bfloat16 or float16, all of one dtype and device, contiguous.
        grads: of the same shapes; float32 or the parameters' dtype, or 16 bits under float32.
        exp_avgs, exp_avg_sqs: float32 of the same shapes.
        steps: float32 [] each, the updates so far; 1 is added.
        lr: float32 [], the learning rate.
        masters: float32 weights of 16-bit parameters, from which those are rounded; or none.
        grad_scale: float32 []; gradients count times this (1 / loss scale, clip coefficient).
        norm: float32 [], of all gradients as they are handed in. Where it (or grad_scale) is not
            finite, nothing is changed except that 1 is added to `skipped`.
        skipped: int64 [], counts steps left out.
        max_grad_norm: gradients are divided by max(1, norm * grad_scale / max_grad_norm); 0: never.
        maximize: ascend.

    Raises:
        RuntimeError: for lists, shapes, dtypes, devices or numbers that do not fit, naming them.
    """
    _ops.adam_(
        *map(list, (params, grads, exp_avgs, exp_avg_sqs, masters, steps)),
        *(lr, grad_scale, norm, skipped, *betas, eps, weight_decay, max_grad_norm),
        *(decoupled, bias_correction, maximize),
    )


def lamb_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    masters: Sequence[Tensor] = (),
    grad_scale: Tensor | None = None,
    norm: Tensor | None = None,
    grad_norms: Tensor | None = None,
    skipped: Tensor | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    grad_averaging: bool = True,
    bias_correction: bool = True,
    trust_ratio: bool = True,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """One LAMB step of all parameters.

    You et al., "Large batch optimization for deep learning" (ICLR 2020): the update
    u = m / (sqrt(v) + eps) + weight_decay * w counts times lr * |w| / |u|, norms by tensor. The
    second pass, which knows them, computes u again instead of having stored it. With `nesterov`
    LANS (Zheng et al., "Accelerated large batch optimization of BERT pretraining in 54 minutes",
    2020): gradients are divided by their own norms, and the momentum's and the gradient's updates
    are scaled apart.

    Args:
        grad_norms: float32 [len(params)], by tensor; with `nesterov` only, and needed there.
            `grad_scale` and `max_grad_norm` have no effect then.
        grad_averaging: the gradient enters the momentum times 1 - betas[0], else times 1.
        trust_ratio: False takes 1 for |w| / |u|.

        The others are those of `adam_`.

    Raises:
        RuntimeError: for lists, shapes, dtypes, devices or numbers that do not fit, naming them.
    """
    _ops.lamb_(
        *map(list, (params, grads, exp_avgs, exp_avg_sqs, masters, steps)),
        *(lr, grad_scale, norm, grad_norms, skipped, *betas, eps, weight_decay, max_grad_norm),
        *(grad_averaging, bias_correction, trust_ratio, nesterov, maximize),
    )


@register_fake("multi_tensor_l2norm")
def _(tensors):
    return tensors[0].new_empty((), dtype=torch.float32), tensors[0].new_empty(
        (len(tensors),), dtype=torch.float32
    )


@register_fake("lamb_moments_")
def _(params, grads, exp_avgs, exp_avg_sqs, masters, steps, lr, *rest):
    rows = [lr.new_empty((len(params), width), dtype=torch.float32) for width in (3, 4)]
    return tuple(rows)


register_autograd("multi_tensor_l2norm")


def _changes_in_place(*arguments):
    return None


for _name in ("multi_tensor_scale_", "adam_", "lamb_", "lamb_apply_"):
    register_fake(_name)(_changes_in_place)
