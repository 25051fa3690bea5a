"""Clipping of gradient buckets: function and fake kernels over the C++ operators; no autograd."""

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
    """Multiplies a gradient by factor * min(1, max_norm / norm); returns the norm before that.

    The operator passes over memory twice: for the norm, then for scaling and the cast to `out`. The
    coefficient stays on the device, so the host does not wait and a CUDA graph can capture the
    call. The norm is summed in float32, in an order that depends only on the size (on a GPU also on
    the device). So the same inputs give the same bits.

    A bucket whose norm is not finite in float32, or whose bound is NaN, becomes NaN throughout.
    Then every element of a sum with other ranks' buckets shows that.

    With a `residual` this is error feedback (Seide et al., "1-bit stochastic gradient descent",
    Interspeech 2014; Karimireddy et al., 2019, arXiv:1901.09847): bucket + residual is clipped, and
    the rounding error of `out`, divided by `factor`, becomes the next residual. The result obeys
    the bound however large the residual is. A bucket that becomes NaN does not change the residual.

    Args:
        bucket: any shape, contiguous, float32, bfloat16 or float16; overwritten without `out`.
        max_norm: bound on the norm, at least 0; or a float32 tensor of one element on the bucket's
            device. Infinity does not clip.
        factor: positive factor of the clipped gradient, for example 1 / number of ranks.
        out: receives the result instead of the bucket; contiguous, with as many elements. It must
            have the bucket's dtype, or one of the two must be float32.
        residual: float32 with as many elements; needs a float32 bucket and a 16-bit `out`.

    Returns:
        float32 []: the norm of bucket, or of bucket + residual.

    Raises:
        RuntimeError: a size, dtype, device or number is wrong; the message names it.
        ValueError: a residual is given without `out`.
    """
    number, bound = (1.0, max_norm) if isinstance(max_norm, Tensor) else (float(max_norm), None)
    if out is not None:
        return _ops.clip_bucket_into(bucket, out, residual, number, bound, factor)
    if residual is not None:
        raise ValueError("clip_bucket_: residual needs out, a bfloat16 or float16 tensor")
    return _ops.clip_bucket_(bucket, number, bound, factor)


@register_fake("clip_bucket_")
def _(bucket):
    return bucket.new_empty((), dtype=torch.float32)


@register_fake("clip_bucket_into")
def _(bucket):
    return bucket.new_empty((), dtype=torch.float32)
