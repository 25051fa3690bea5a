"""Rotary position embeddings: function, fake kernels and autograd over the C++ operators."""

import torch
from torch import Size, Tensor
from torch._C._autograd import CreationMeta
from torch._C._autograd import _get_creation_meta as get_creation_meta

from bert_unpad.batch import VarlenBatch
from bert_unpad.ops.registration import (
    first_order,
    register_autograd,
    register_fake,
    register_in_place,
)
from bert_unpad.ops.tensor_checks import check_tensors

_ops = torch.ops.bert_unpad


def rotary_(
    x: Tensor,
    positions: VarlenBatch | Tensor,
    *,
    heads: int,
    theta: float = 10000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    position_scale: float = 1.0,
) -> Tensor:
    """Rotates the first heads of packed tokens by their positions, in place.

    Rotary position embeddings of Su et al., "RoFormer" (2021, arXiv:2104.09864). Pair i of a head
    turns by position * position_scale * theta^(-2i / rotary_dim) radians: (a, b) becomes
    (a cos - b sin, b cos + a sin). Angles are exact at every position; cosines and sines are
    float32, computed again in each call. Nothing but the positions is kept for the backward pass,
    which turns the gradient back, in new memory, because other nodes may hold that gradient.

    As with PyTorch's in-place functions, a tensor that another backward pass needs unchanged makes
    that pass raise an error. Under `torch.compile` the rotation is a new tensor that takes the
    place of x.

    Args:
        x: [tokens, N, head_dim], float32, bfloat16 or float16; any outer strides without overlap,
            contiguous in the last dimension. For queries and keys of a packed qkv
            [tokens, 3, H, head_dim] it is `qkv.view(tokens, 3 * H, head_dim)`, with heads = 2 H.
        positions: a VarlenBatch, for its `position_ids`, which start again in every sequence; or
            int32 or int64 [tokens] on the data's device.
        heads: how many of the N heads are rotated, from the first on.
        theta: base of the angles, above 0.
        rotary_dim: how many elements of a head are rotated, from the first on; even, at most 256.
            None rotates all.
        interleaved: False pairs elements i and i + rotary_dim / 2, as GPT-NeoX and Llama do; True
            pairs 2i and 2i + 1, as RoFormer and GPT-J do.
        position_scale: factor of all positions, above 0; 1 / s stretches a model to s times its
            context (position interpolation, Chen et al., 2023, arXiv:2306.15595).

    Returns:
        x, rotated: the same memory.

    Raises:
        TypeError: x or positions is not a tensor.
        RuntimeError: a shape, stride, dtype, device or number is wrong; the message names it.
        ValueError: x does not have three dimensions.
    """
    if isinstance(positions, VarlenBatch):
        positions = positions.position_ids
    check_tensors("rotary_", {"x": x, "positions": positions})
    if x.dim() != 3:
        raise ValueError(
            f"rotary_: x must have shape [tokens, heads, head_dim], got {list(x.shape)}"
        )
    rotary_dim = x.shape[-1] if rotary_dim is None else rotary_dim
    settings = (heads, theta, rotary_dim, interleaved, position_scale)
    if torch.compiler.is_compiling():
        return x.copy_(_ops.rotary(x, positions, *settings, False))
    base = x._base
    if torch.is_grad_enabled() and x.requires_grad:
        if (x if base is None else base).is_leaf:
            raise RuntimeError(
                "rotary_: x must not be a leaf that requires grad, or a view of one; it is changed "
                "in place"
            )
        if x._is_view() and get_creation_meta(x) != CreationMeta.DEFAULT:
            raise RuntimeError(
                "rotary_: x must not be a view that cannot be changed in place, such as those of "
                "unbind, split and chunk; rotate what it is a view of"
            )
        # After a change of a view, autograd copies the whole gradient of its base twice. Where the
        # view is all of its base, changing the base instead saves both copies.
        if base is not None and _whole(x, base):
            return _Rotary.apply(base, x.shape, positions, settings).view(x.shape)
    _Rotary.apply(x, x.shape, positions, settings)
    return x


def _whole(x: Tensor, base: Tensor) -> bool:
    same = base.numel() == x.numel() and base.dtype == x.dtype
    return same and base.is_contiguous() and x.is_contiguous()


class _Rotary(torch.autograd.Function):
    """The rotation of x as a tensor of `shape`, in place."""

    @staticmethod
    def forward(ctx, x: Tensor, shape: Size, positions: Tensor, settings: tuple) -> Tensor:
        _ops.rotary_(x.view(shape), positions, *settings, False)
        ctx.save_for_backward(positions)
        ctx.shape, ctx.settings = shape, settings
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @first_order("rotary_")
    def backward(ctx, saved, dy: Tensor):
        dx = _rotate_back(dy.reshape(ctx.shape), *saved, *ctx.settings, True)
        return dx.view(dy.shape), None, None, None


def _rotate_back(dy: Tensor, *arguments) -> Tensor:
    return _ops.rotary(dy if dy.stride(-1) == 1 else dy.contiguous(), *arguments)


@register_fake("rotary")
def _(x):
    return x.new_empty(x.shape)


def _backward(kept, dy):
    settings = [getattr(kept, name) for name in _SETTINGS]
    return {"x": _rotate_back(dy, kept.positions, *settings, not kept.inverse)}


_SETTINGS = ["heads", "theta", "rotary_dim", "interleaved", "position_scale"]

register_in_place("rotary_")
register_autograd("rotary", _backward, ["positions", *_SETTINGS, "inverse"])
