"""The attention implementation "bert_unpad", for any model that uses transformers' interface.

Only attention runs on packed tokens; the rest of the model stays padded. That gains less than
`bert_unpad.hf.unpad`, but works with every model that uses transformers' attention interface:

    AutoModel.from_pretrained(name, attn_implementation="bert_unpad")

The mask function passes the [batch, tokens] mask on. It must be registered under the same name:
otherwise transformers passes no mask, and results are silently wrong. Anything but plain
self-attention (causal, cross-attention, a prepared 4-D mask, a cache) runs transformers' own sdpa.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from bert_unpad.hf.fallback import recording_reason, warn_stock
from bert_unpad.hf.models import missing_operator
from bert_unpad.hf.packing import Packing
from bert_unpad.ops.attention import HEAD_DIMS

NAME = "bert_unpad"

_last: tuple[weakref.ref, int, Packing] | None = None


def register() -> None:
    """Registers the implementation and its mask function with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(*args, **kwargs) -> Tensor | None:
    """Returns the [batch, tokens] mask for bidirectional attention, and sdpa's mask otherwise."""
    from transformers import masking_utils

    function = kwargs.get("mask_function", masking_utils.bidirectional_mask_function)
    if function is masking_utils.bidirectional_mask_function:
        return kwargs.get("attention_mask")
    return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Computes self-attention of the tokens that the mask keeps; other tokens get zeros.

    Args:
        module: the calling attention module.
        query, key, value: [batch, heads, tokens, head_dim].
        attention_mask: [batch, tokens] of zeros and ones, or None.
        dropout: probability that an attention weight is dropped.
        scaling: factor of the scores; None means 1 / sqrt(head_dim).
        kwargs: with `cu_seq_lens_q` and `max_length_q`, the only row of the batch holds packed
            sequences.

    Returns:
        The attention output, [batch, tokens, heads, head_dim]; and None instead of weights.
    """
    reason = _reason(module, query, key, value, attention_mask, kwargs)
    if reason is None:
        try:
            packing = _packing(query, attention_mask, kwargs)
        except (TypeError, ValueError) as error:
            if kwargs.get("cu_seq_lens_q") is not None or torch.compiler.is_compiling():
                raise
            reason = str(error)
    if reason is not None:
        warn_stock(type(module).__name__, reason)
        return _sdpa(module, query, key, value, attention_mask, dropout, scaling, kwargs)
    rows = torch.stack([x.transpose(1, 2) for x in (query, key, value)], 2)
    out = packing.attend(packing.pack(rows)[0], dropout, scaling)
    return packing.pad(out[None]), None


def _reason(module, query, key, value, mask, kwargs) -> str | None:
    if key.shape != query.shape or value.shape != query.shape:
        return "queries and keys differ in number"
    if getattr(module, "is_causal", False) or kwargs.get("is_causal"):
        return "it is causal attention"
    if kwargs.get("position_bias") is not None:
        return "it has a position bias"
    if mask is not None and mask.dim() != 2:
        return f"its mask has {mask.dim()} dimensions, not 2"
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its tensors are {query.dtype}"
    if query.shape[-1] not in HEAD_DIMS.get(query.device.type, ()):
        return f"its heads have dimension {query.shape[-1]}"
    return recording_reason() or missing_operator(query.device.type)


def _packing(query: Tensor, mask: Tensor | None, kwargs) -> Packing:
    """Returns the packing of a call; keeps that of the last mask, which all layers share."""
    global _last
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is not None:
        if query.shape[0] != 1 or mask is not None:
            raise ValueError("cu_seq_lens_q: expected a batch of one row without a mask")
        return Packing.from_cu_seqlens(cu_seqlens, kwargs.get("max_length_q"), query.shape[2])
    if mask is None:
        return Packing.dense(query.shape[0], query.shape[2], query.device)
    if torch.compiler.is_compiling():
        return Packing.from_mask(mask, reads_first=False)
    last = _last
    if last is not None and last[0]() is mask and last[1] == mask._version:
        return last[2]
    packing = Packing.from_mask(mask, reads_first=False)
    _last = (weakref.ref(mask), mask._version, packing)
    return packing


def _sdpa(module, query, key, value, mask, dropout, scaling, kwargs) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if mask is not None and mask.dim() == 2:
        mask = (mask != 0)[:, None, None, :]
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
    )
