"""The operators as an implementation of `torch.nn.attention.varlen.varlen_attn` on a CPU.

PyTorch has kernels for packed sequences on GPUs alone. It lets others take the place of its
operators `_flash_attention_forward` and `_flash_attention_backward` by
`torch.nn.attention.register_flash_attention_impl`. On GPUs its own kernels stay.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library

from bert_unpad.flash.functions import bounds
from bert_unpad.ops import rng as _rng
from bert_unpad.ops.attention import scale_of

__all__ = ["NAME", "register"]

NAME = "bert_unpad"
_ops = torch.ops.bert_unpad


class _Handle:
    """What PyTorch keeps while the implementation is active."""

    def __init__(self, library: Library) -> None:
        self._library: Library | None = library

    def remove(self) -> None:
        """Takes the kernels out again."""
        if self._library is not None:
            self._library._destroy()
        self._library = None


def register() -> None:
    """Registers the implementation "bert_unpad", which is not active yet.

    After `torch.nn.attention.activate_flash_attention_impl("bert_unpad")` `varlen_attn` takes
    tensors on a CPU: float32, bfloat16 or float16, any head_dim from 1 to 256, windows, fewer heads
    of keys, gradients, and `torch.compile`.
    """
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)


def _activate() -> _Handle:
    library = Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    return _Handle(library)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Tensor | int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if cum_seq_q is None or cum_seq_k is None:
        raise ValueError("_flash_attention_forward: cum_seq_q: expected packed sequences, got None")
    for name, given in others.items():
        if given is not None:
            raise ValueError(f"_flash_attention_forward: {name}: expected None, got a value")
    rng = _rng.draw(dropout_p, None, query.device)
    out, lse = _ops.varlen_cross_attention(
        query, torch.stack([key, value], 1), cum_seq_q, cum_seq_k, max_q, max_k,
        scale_of(query, scale), dropout_p, rng, None, None,
        *bounds(window_size_left, window_size_right, is_causal),
    )  # fmt: skip
    rng = torch.zeros(2, dtype=torch.int64) if rng is None else rng
    return out, lse, rng, query.new_empty(0), query.new_empty(0)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dkv, *_ = _ops.varlen_cross_attention_backward(
        grad_out.contiguous(), query, torch.stack([key, value], 1), out, logsumexp, cum_seq_q,
        cum_seq_k, max_q, max_k, scale_of(query, scale), dropout_p,
        rng_state if dropout_p else None, None, None,
        *bounds(window_size_left, window_size_right, is_causal),
    )  # fmt: skip
    return dq, *(x.contiguous() for x in dkv.unbind(1))
