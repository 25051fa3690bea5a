"""Norm, scaling, Adam, LAMB and StableAdamW over lists of tensors: functions and fake kernels.

The optimizers of `bert_unpad.optim` call these operators and keep their state. Everything that
differs between steps is a tensor on the data's device. So the host does not wait, and a captured
CUDA graph can be replayed for the next step. The same inputs give the same bits with any number of
threads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bert_unpad.ops.registration import register_fake, register_in_place, register_no_autograd

_ops = torch.ops.bert_unpad


def multi_tensor_l2norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Computes the L2 norm of all tensors together and of each one, in one pass over them.

    Args:
        tensors: at least one, float32, bfloat16 or float16 (also mixed), contiguous, any shapes.

    Returns:
        The norm of all, float32 [], and of each tensor, float32 [len(tensors)]. An infinity or NaN
        in a tensor makes both of its norms infinite or NaN.

    Raises:
        ValueError: the list is empty.
        RuntimeError: a tensor has another dtype, device or layout; the message names it.
    """
    if not tensors:
        raise ValueError("multi_tensor_l2norm: tensors must not be empty")
    return _ops.multi_tensor_l2norm(list(tensors))


def multi_tensor_scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies all tensors by `factor`, in place.

    Args:
        tensors: float32, bfloat16 or float16 (also mixed), contiguous.
        factor: float32 [] on the tensors' device.

    Raises:
        RuntimeError: a tensor has another dtype, device or layout; the message names it.
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
    """Makes one Adam step for all parameters, in one pass.

    Kingma and Ba, "Adam" (ICLR 2015). With `decoupled`, weight decay follows Loshchilov and Hutter,
    "Decoupled weight decay regularization" (ICLR 2019); else it is added to the gradient.

    Args:
        params: parameters, float32, bfloat16 or float16, all of one dtype and device, contiguous.
        grads: gradients of the same shapes; float32, the parameters' dtype, or 16-bit gradients of
            float32 parameters.
        exp_avgs, exp_avg_sqs: moments, float32, of the same shapes.
        steps: number of updates of each parameter so far, float32 []; the operator adds 1.
        lr: the learning rate, float32 [].
        masters: float32 master weights of 16-bit parameters, or none.
        grad_scale: factor of all gradients, float32 [] (1 / loss scale, or a clip coefficient).
        norm: norm of all gradients before `grad_scale`, float32 []. If it or `grad_scale` is not
            finite, the step only adds 1 to `skipped`.
        skipped: number of skipped steps, int64 [].
        max_grad_norm: divide gradients by max(1, norm * grad_scale / max_grad_norm); 0 does not
            clip.
        maximize: ascend instead of descend.

    Raises:
        RuntimeError: a list, shape, dtype, device or number is wrong; the message names it.
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
    """Makes one LAMB step for all parameters, in two passes.

    You et al., "Large batch optimization for deep learning" (ICLR 2020): the update
    u = m / (sqrt(v) + eps) + weight_decay * w of each tensor is scaled by lr * |w| / |u|. The first
    pass computes these norms; the second computes u again instead of reading it from memory. With
    `nesterov` this is LANS (Zheng et al., "Accelerated large batch optimization of BERT pretraining
    in 54 minutes", 2020): each gradient is divided by its own norm, and the updates by the momentum
    and by the gradient are scaled separately.

    Args:
        grad_norms: norm of each gradient, float32 [len(params)]; needed with `nesterov`, and only
            then allowed. `grad_scale` and `max_grad_norm` then have no effect.
        grad_averaging: the gradient enters the momentum times 1 - betas[0], else times 1.
        trust_ratio: scale updates by |w| / |u|.

        The other arguments are those of `adam_`.

    Raises:
        RuntimeError: a list, shape, dtype, device or number is wrong; the message names it.
    """
    _ops.lamb_(
        *map(list, (params, grads, exp_avgs, exp_avg_sqs, masters, steps)),
        *(lr, grad_scale, norm, grad_norms, skipped, *betas, eps, weight_decay, max_grad_norm),
        *(grad_averaging, bias_correction, trust_ratio, nesterov, maximize),
    )


def stable_adamw_(
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
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    maximize: bool = False,
) -> None:
    """Makes one StableAdamW step for all parameters, in two passes.

    Wortsman et al., "Stable and low-precision training for large-scale vision-language models"
    (NeurIPS 2023, arXiv:2304.13013), Algorithm 2. A tensor's update is that of AdamW, with its
    learning rate divided by max(1, RMS): RMS^2 is the mean of g^2 / max(v, eps^2), where v is the
    second moment after this step's gradient, corrected for its bias. Weight decay is multiplied by
    the same smaller learning rate.

    Args:
        betas: decay rates of the moments; the paper corrects their bias by changing the rates with
            the step, which gives the same moments.

        The other arguments are those of `adam_`.

    Raises:
        RuntimeError: a list, shape, dtype, device or number is wrong; the message names it.
    """
    _ops.stable_adamw_(
        *map(list, (params, grads, exp_avgs, exp_avg_sqs, masters, steps)),
        *(lr, grad_scale, norm, skipped, *betas, eps, weight_decay, max_grad_norm, maximize),
    )


def frozen_adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: Tensor,
    variance_step: Tensor | None = None,
    masters: Sequence[Tensor] = (),
    grad_scale: Tensor | None = None,
    norm: Tensor | None = None,
    skipped: Tensor | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    averaged: bool = False,
    bias_correction: bool = True,
) -> None:
    """Makes one Adam step by a variance that does not change, in one pass.

    That is what 1-bit Adam does after its warm-up (Tang et al., 2021, arXiv:2102.02888). A weight
    whose variance is 0, because it had no gradient, only decays, and its momentum becomes 0: the
    update would be the momentum divided by `eps`.

    Args:
        grads: with `averaged` the new momenta, which replace `exp_avgs`; else gradients.
        exp_avg_sqs: read only.
        lr: the learning rate, float32 []; or one for each tensor, float32 [len(params)].
        variance_step: number of updates of `exp_avg_sqs`, float32 [], for the correction of their
            bias; by default as many as of the parameters.

        The other arguments are those of `adam_`, with decoupled weight decay.

    Raises:
        RuntimeError: a list, shape, dtype, device or number is wrong; the message names it.
    """
    _ops.frozen_adam_(
        *map(list, (params, grads, exp_avgs, exp_avg_sqs, masters, steps)),
        *(variance_step, lr, grad_scale, norm, skipped, *betas, eps, weight_decay),
        *(averaged, bias_correction),
    )


def frozen_lamb_sums_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    fresh_sqs: Sequence[Tensor],
    *,
    norm: Tensor | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Tensor:
    """Moves 1-bit LAMB's fresh variances on, and computes what its coefficients come from.

    Li et al., "1-bit LAMB" (2021, arXiv:2104.06069): the gradient is reconstructed from two momenta
    that follow each other, g = (m - betas[0] * exp_avg) / (1 - betas[0]), and enters the fresh
    variance. The first two sums leave out, and the ratio ignores, weights whose frozen variance is
    0.

    Args:
        params: parameters, or their master weights, of one dtype and device, contiguous.
        grads: the new momenta, of the same shapes.
        exp_avgs: the momenta before, float32; read only.
        exp_avg_sqs: the frozen variances, float32; read only.
        fresh_sqs: the fresh variances, float32; overwritten.
        norm: float32 []; where it is not finite, nothing changes and all results are 0.

    Returns:
        float32 [len(params), 3]: for each tensor the squared norm of u = m / (sqrt(v) + eps), that
        of u + weight_decay * weight, and the largest (sqrt(v) + eps) / (sqrt(fresh) + eps).

    Raises:
        ValueError: the lists are empty.
        RuntimeError: a list, shape, dtype, device or number is wrong; the message names it.
    """
    if not params:
        raise ValueError("frozen_lamb_sums_: params must not be empty")
    return _ops.frozen_lamb_sums_(
        *map(list, (params, grads, exp_avgs, exp_avg_sqs, fresh_sqs)),
        *(norm, *betas, eps, weight_decay),
    )


@register_fake("multi_tensor_l2norm")
def _(tensors):
    return tensors[0].new_empty((), dtype=torch.float32), tensors[0].new_empty(
        (len(tensors),), dtype=torch.float32
    )


@register_fake("frozen_lamb_sums_")
def _(params):
    return params[0].new_empty((len(params), 3), dtype=torch.float32)


@register_fake("lamb_moments_")
@register_fake("stable_adamw_moments_")
def _(params, lr):
    rows = [lr.new_empty((len(params), width), dtype=torch.float32) for width in (3, 4)]
    return tuple(rows)


register_in_place("multi_tensor_scale_", "adam_", "frozen_adam_")
register_in_place("lamb_", "lamb_apply_", "stable_adamw_", "stable_adamw_apply_")
register_no_autograd("multi_tensor_l2norm")
