"""The operators as an implementation of `torch.nn.attention.varlen.varlen_attn`.

PyTorch has kernels for packed sequences on GPUs alone. It lets others take the place of its
operators `_flash_attention_forward` and `_flash_attention_backward` by
`torch.nn.attention.register_flash_attention_impl`. On a GPU what our kernels do not compute stays
with PyTorch's: batches that are not packed, dropout, paged keys, other head dimensions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from bert_unpad._library import cuda_missing
from bert_unpad.flash.functions import attend, bounds, is_to_self
from bert_unpad.ops import rng as _rng
from bert_unpad.ops.attention import scale_of

NAME = "bert_unpad"
GPU_HEAD_DIMS = (32, 64, 96, 128)
_COMPUTED = {"scale", "window_size_left", "window_size_right"}  # of the arguments by name
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
    of keys, gradients, and `torch.compile`. On a GPU our kernels compute head dimensions of 32, 64,
    96 and 128, float32 too, and PyTorch's what else there is.
    """
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)


def _activate() -> _Handle:
    library = Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Any]]
    kernels = {"_flash_attention_forward": _forward, "_flash_attention_backward": _backward}
    for name, ours in kernels.items():
        library.impl(name, ours, "CPU")
        if torch.version.cuda is not None and cuda_missing is None:
            library.impl(name, _or_pytorch(name, ours), "CUDA", with_keyset=True)
    return _Handle(library)


def _or_pytorch(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a kernel that is ours for what it computes, else PyTorch's own."""
    pytorch = get_kernel(f"aten::{name}", "CUDA")
    # In its arguments (after the output, its gradient and the log-sum-exp in a backward pass).
    query, cum_seq, dropout = (1, 6, 10) if "backward" in name else (0, 3, 7)

    def kernel(keys: torch.DispatchKeySet, *args: Any, **more: Any) -> Any:
        fits = (
            args[cum_seq] is not None
            and args[cum_seq + 1] is not None
            and args[query].shape[-1] in GPU_HEAD_DIMS
            and args[dropout] == 0
            and all(more.get(other) is None for other in more.keys() - _COMPUTED)
        )
        return ours(*args, **more) if fits else pytorch.call_boxed(keys, *args, **more)

    return kernel


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
    scale, window = scale_of(query, scale), bounds(window_size_left, window_size_right, is_causal)
    out, lse = attend(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, scale, dropout_p, rng, window
    )
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
    grad_out, rng = grad_out.contiguous(), rng_state if dropout_p else None
    scale, window = scale_of(query, scale), bounds(window_size_left, window_size_right, is_causal)
    heads, kv_heads = query.shape[1], key.shape[1]
    if is_to_self(query, key, cum_seq_q, cum_seq_k):
        dqkv, *_ = _ops.varlen_attention_backward(
            grad_out, torch.cat([query, key, value], 1), out, logsumexp, cum_seq_q, max_q, scale,
            dropout_p, rng, None, None, heads, *window,
        )  # fmt: skip
        dq, dk, dv = dqkv.split([heads, kv_heads, kv_heads], 1)
        return dq.contiguous(), dk.contiguous(), dv.contiguous()
    dq, dkv, *_ = _ops.varlen_cross_attention_backward(
        grad_out, query, torch.stack([key, value], 1), out, logsumexp, cum_seq_q, cum_seq_k,
        max_q, max_k, scale, dropout_p, rng, None, None, *window,
    )  # fmt: skip
    return dq, *(x.contiguous() for x in dkv.unbind(1))
