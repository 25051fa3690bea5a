"""flash-attention's functions over the operators of `bert_unpad.ops`.

Arguments that all of them share:

- dropout_p: probability in [0, 1) that an attention weight is dropped.
- softmax_scale: factor of q k^T; None means 1 / sqrt(head_dim).
- causal: a query sees no key after its own position. Queries are the last of the keys: query i of n
  is at position keys - n + i.
- window_size: (left, right), the keys before and after its position that a query sees, both
  inclusive; -1 for no bound.
- deterministic: nothing changes, gradients always have the same bits.
- return_attn_probs: return (out, softmax_lse, None). softmax_lse is the log-sum-exp of each row of
  scores, float32, without a gradient; in place of the last, which only flash-attention's own tests
  use, stands None.

q may have more heads than k and v, by a whole factor: query head h reads key head
h // (heads / kv_heads). A query that sees no key gives zeros. All tensors are float32, bfloat16 or
float16, of one dtype on one device; head_dim as in `bert_unpad.ops.varlen_attention`.

All raise ValueError where a shape is wrong or an argument asks for what is not computed (softcap,
alibi_slopes, block_table), and RuntimeError with the name of what else is wrong.
"""

import torch
from torch import Tensor

from bert_unpad.ops import rng as _rng
from bert_unpad.ops.attention import scale_of

_ops = torch.ops.bert_unpad

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of sequences of one length: q [batch, queries, heads, head_dim], k and v [batch,
    keys, kv_heads, head_dim]; see the module for the other arguments.

    Returns:
        The output, of q's shape; softmax_lse is [batch, heads, queries].
    """
    name = "flash_attn_func"
    _refuse(name, softcap=softcap, alibi_slopes=alibi_slopes)
    _check_dims(name, 4, "[batch, tokens, heads, head_dim]", q=q, k=k, v=v)
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    if k.shape[0] != batch:
        raise ValueError(f"{name}: k: expected q's batch of {batch}, got {k.shape[0]}")
    cu_q = _starts(batch, queries, q.device)
    cu_k = cu_q if keys == queries else _starts(batch, keys, q.device)
    out, lse = _attend(
        name, q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k, queries, keys,
        dropout_p, softmax_scale, causal, window_size,
    )  # fmt: skip
    lse = lse.view(heads, batch, queries).transpose(0, 1)
    return _result(out.view(q.shape), lse, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Attention of packed sequences: q [query tokens, heads, head_dim], k and v [key tokens,
    kv_heads, head_dim], cu_seqlens int32 [sequences + 1] on their device and max_seqlen the longest
    sequence; see the module for the other arguments.

    Returns:
        The output, of q's shape; softmax_lse is [heads, query tokens].
    """
    name = "flash_attn_varlen_func"
    _refuse(name, softcap=softcap, alibi_slopes=alibi_slopes, block_table=block_table)
    _check_dims(name, 3, "[tokens, heads, head_dim]", q=q, k=k, v=v)
    out, lse = _attend(
        name, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size,
    )  # fmt: skip
    return _result(out, lse, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv [batch, tokens, 3, heads, head_dim]."""
    name = "flash_attn_qkvpacked_func"
    _refuse(name, softcap=softcap, alibi_slopes=alibi_slopes)
    _check_dims(name, 5, "[batch, tokens, 3, heads, head_dim]", qkv=qkv)
    batch, tokens, _, heads, head_dim = qkv.shape
    out, lse = _attend_to_self(
        qkv.flatten(0, 1), _starts(batch, tokens, qkv.device), tokens,
        dropout_p, softmax_scale, _window(name, window_size, causal),
    )  # fmt: skip
    lse = lse.view(heads, batch, tokens).transpose(0, 1)
    return _result(out.view(batch, tokens, heads, head_dim), lse, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q and kv [batch, keys, 2, kv_heads, head_dim]."""
    _check_dims("flash_attn_kvpacked_func", 5, "[batch, keys, 2, kv_heads, head_dim]", kv=kv)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of qkv [tokens, 3, heads, head_dim]; nothing is copied."""
    name = "flash_attn_varlen_qkvpacked_func"
    _refuse(name, softcap=softcap, alibi_slopes=alibi_slopes)
    _check_dims(name, 4, "[tokens, 3, heads, head_dim]", qkv=qkv)
    window = _window(name, window_size, causal)
    out, lse = _attend_to_self(qkv, cu_seqlens, max_seqlen, dropout_p, softmax_scale, window)
    return _result(out, lse, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q and kv [key tokens, 2, kv_heads, head_dim]."""
    _check_dims("flash_attn_varlen_kvpacked_func", 4, "[tokens, 2, kv_heads, head_dim]", kv=kv)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    scale: float | None,
    causal: bool,
    window_size: Window,
) -> tuple[Tensor, Tensor]:
    """Returns the attention of packed tokens and its log-sum-exp, [heads, query tokens]."""
    if k.shape != v.shape:
        raise ValueError(f"{name}: v: expected k's shape {list(k.shape)}, got {list(v.shape)}")
    window = _window(name, window_size, causal)
    rng = _rng.draw(dropout_p, None, q.device)
    return attend(q, k, v, cu_q, cu_k, max_q, max_k, scale_of(q, scale), dropout_p, rng, window)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    dropout_p: float,
    rng: Tensor | None,
    window: Window,
) -> tuple[Tensor, Tensor]:
    """Returns the attention of packed tokens and its log-sum-exp, of arguments that are checked."""
    if is_to_self(q, k, cu_q, cu_k):
        heads = torch.cat([q, k, v], 1)
        return _ops.varlen_attention(
            heads, cu_q, max_q, scale, dropout_p, rng, None, None, q.shape[1], *window
        )
    return _ops.varlen_cross_attention(
        q, torch.stack([k, v], 1), cu_q, cu_k, max_q, max_k, scale, dropout_p, rng, None, None,
        *window,
    )  # fmt: skip


def is_to_self(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor) -> bool:
    """Whether queries and keys are those of the same tokens: what has kernels of its own."""
    return cu_q is cu_k and q.shape[0] == k.shape[0]


def _attend_to_self(
    qkv: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    dropout_p: float,
    scale: float | None,
    window: Window,
) -> tuple[Tensor, Tensor]:
    """Returns the attention of qkv [tokens, 3, heads, head_dim], and its log-sum-exp."""
    rng = _rng.draw(dropout_p, None, qkv.device)
    return _ops.varlen_attention(
        qkv, cu_seqlens, longest, scale_of(qkv, scale), dropout_p, rng, None, None, 0, *window
    )


def _window(name: str, window_size: Window, causal: bool) -> Window:
    if len(window_size) != 2:
        raise ValueError(f"{name}: window_size: expected a pair (left, right), got {window_size!r}")
    return bounds(*window_size, causal)


def bounds(left: int | None, right: int | None, causal: bool) -> Window:
    """Returns a window as the operators take it; None is no bound."""
    return -1 if left is None else left, 0 if causal else -1 if right is None else right


def _starts(batch: int, tokens: int, device: torch.device) -> Tensor:
    """cu_seqlens of sequences of one length."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens


def _refuse(name: str, **arguments: Tensor | float | None) -> None:
    for argument, value in arguments.items():
        if value is not None and (isinstance(value, Tensor) or value != 0):
            given = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"{name}: {argument}: expected none, which is all that is computed, got {given}"
            )


def _check_dims(name: str, dims: int, shape: str, **tensors: Tensor) -> None:
    for argument, x in tensors.items():
        if not isinstance(x, Tensor):
            kind = type(x).__name__
            raise TypeError(f"{name}: {argument}: expected a tensor {shape}, got {kind}")
        if x.dim() != dims:
            raise ValueError(f"{name}: {argument}: expected shape {shape}, got {list(x.shape)}")


def _result(out: Tensor, lse: Tensor, return_attn_probs: bool) -> Result:
    return (out, lse, None) if return_attn_probs else out
