"""Clipping of gradient buckets: fake kernels over the C++ operators; nothing to differentiate."""

import torch
from torch import Tensor

from bert_unpad.ops.registration import register_fake

_ops = torch.ops.bert_unpad


def clip_bucket_(
    bucket: Tensor,
    max_norm: float | Tensor,
    *,
    factor: float = 1.0,
    out: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Multiplies a flat gradient with factor * min(1, max_norm / norm); returns the norm before.

    Two passes over memory: the norm; scaling and the cast to `out`. The coefficient stays on the
    device, so the host waits for nothing and a CUDA graph can hold the call. The norm is summed in
    float32, in an order that depends on the size (on a GPU also on the device) alone: the same
    inputs give the same bits.

    A bucket whose norm is no finite float32 number becomes NaN from end to end: whoever adds it to
    others sees that, wherever they look. So does one whose bound is NaN.

    With a `residual` this is error feedback (Seide et al., "1-bit stochastic gradient descent",
    Interspeech 2014; Karimireddy et al., 2019, arXiv:1901.09847): bucket + residual is clipped, and
    what rounding to `out` loses of the result, divided by `factor`, is the next residual. What is
    sent so obeys the bound, whatever is left over. A bucket that became NaN leaves it as it was.

    Args:
        bucket: any shape, contiguous, float32, bfloat16 or float16; overwritten without `out`.
        max_norm: bound on the norm, at least 0; or a float32 tensor of one element on the bucket's
            device. Infinity: no bound.
        factor: of the clipped gradient, for example 1 / number of ranks; positive.
        out: contiguous, as many elements; gets the result instead of the bucket. Of the bucket's
            dtype, or one of the two must be float32.
        residual: float32, as many elements; needs a float32 bucket and a 16-bit `out`.

    Returns:
        float32 []: the norm of bucket, or of bucket + residual.

    Raises:
        RuntimeError: for a size, dtype, device or number that does not fit, naming it.
        ValueError: a residual without `out`.
    """
    number, bound = (1.0, max_norm) if isinstance(max_norm, Tensor) else (float(max_norm), None)
    if out is not None:
        return _ops.clip_bucket_into(bucket, out, residual, number, bound, factor)
    if residual is not None:
        raise ValueError("clip_bucket_: residual needs out, a bfloat16 or float16 tensor")
    return _ops.clip_bucket_(bucket, number, bound, factor)


@register_fake("clip_bucket_")
def _(bucket, max_norm, bound, factor):
    return bucket.new_empty((), dtype=torch.float32)


@register_fake("clip_bucket_into")
def _(bucket, out, residual, max_norm, bound, factor):
    return bucket.new_empty((), dtype=torch.float32)
