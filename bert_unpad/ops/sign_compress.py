"""Compression to one bit a value, with error feedback: functions and fake kernels; no autograd.

A value travels as its sign, and a whole buffer has one scale: the root of the mean square, so that
what arrives has the norm of what was sent. What is lost is kept as an error and added to the next
values (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014). 1-bit Adam (Tang et
al., 2021, arXiv:2102.02888), 1-bit LAMB (arXiv:2104.06069) and 0/1 Adam (arXiv:2202.06009) scale in
this way in their authors' implementation (DeepSpeed).

Signs are packed 8 to a byte: bit j % 8 of byte j // 8 is 1 where value j is negative, -0 too, and
what follows the last value is 0. Sums are in an order that depends on the size alone (on a GPU also
on the device), so the same inputs give the same bits. The host never waits.
"""

import torch
from torch import Tensor

from bert_unpad.ops.registration import register_fake, register_in_place, register_no_autograd

_ops = torch.ops.bert_unpad


def sign_scale(value: Tensor | None, error: Tensor) -> Tensor:
    """Computes the root of the mean square of value + error.

    Args:
        value: any shape, contiguous, float32, bfloat16 or float16; None for zero.
        error: float32 with as many elements, contiguous.

    Returns:
        float32 []; 0 for no elements, not finite where an element is not, or its square is too
        large for float32.

    Raises:
        RuntimeError: a size, dtype, device or layout is wrong; the message names it.
    """
    return _ops.sign_scale(value, error)


def sign_pack_(
    value: Tensor | None,
    error: Tensor,
    bits: Tensor,
    scale: Tensor,
    *,
    guard: Tensor | None = None,
) -> None:
    """Packs the signs of value + error, and keeps in `error` what they do not say.

    error = value + error - scale * sign(value + error), in place.

    Args:
        value: any shape, contiguous, float32, bfloat16 or float16; None for zero.
        error: float32 with as many elements, contiguous.
        bits: uint8 [ceil(elements / 8)], contiguous; overwritten.
        scale: float32 [], as `sign_scale` computes it.
        guard: float32 []; where it is not finite, nothing changes.

    Raises:
        RuntimeError: a size, dtype, device or layout is wrong; the message names it.
    """
    _ops.sign_pack_(value, error, bits, scale, guard)


def sign_mean_(
    bits: Tensor,
    scales: Tensor,
    out: Tensor,
    *,
    factor: float | None = None,
    add: bool = False,
    guard: Tensor | None = None,
) -> None:
    """Writes the mean over ranks of scale * sign to `out`, added up in float32 in order of ranks.

    Args:
        bits: uint8 [ranks, bytes], contiguous: the packed signs of each rank.
        scales: float32 [ranks].
        out: float32 with at most 8 * bytes elements, contiguous.
        factor: of the sum; by default 1 / ranks.
        add: add the mean to what is in `out`.
        guard: float32 []; where it is not finite, nothing changes.

    Raises:
        RuntimeError: a size, dtype, device, layout or number is wrong; the message names it.
    """
    factor = 1 / max(len(bits), 1) if factor is None else factor
    _ops.sign_mean_(bits, scales, out, factor, add, guard)


def sign_unpack_(bits: Tensor, scales: Tensor, out: Tensor) -> None:
    """Writes scale * sign of parts that follow each other to `out`.

    Args:
        bits: uint8 [parts, bytes], contiguous: the packed signs of 8 * bytes elements each.
        scales: float32 [parts].
        out: float32 with at most 8 * parts * bytes elements, contiguous.

    Raises:
        RuntimeError: a size, dtype, device or layout is wrong; the message names it.
    """
    _ops.sign_unpack_(bits, scales, out)


@register_fake("sign_scale")
def _(error):
    return error.new_empty((), dtype=torch.float32)


register_in_place("sign_pack_", "sign_mean_", "sign_unpack_")
register_no_autograd("sign_scale")
