"""The attention implementation "bert_unpad", for any model that uses transformers' interface.

Only attention runs on packed tokens; the rest of the model stays padded. That gains less than
`bert_unpad.hf.unpad`, but works with every model that uses transformers' attention interface:

    AutoModel.from_pretrained(name, attn_implementation="bert_unpad")

The mask function passes the [batch, tokens] mask on. It must be registered under the same name:
otherwise transformers passes no mask, and results are silently wrong. Padded batches that need
anything but plain self-attention (causal or cross-attention, windows, a prepared 4-D mask, a cache)
run transformers' own sdpa. It knows nothing of packed sequences, so packed input that cannot be
computed here raises.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bert_unpad.hf.fallback import recording_reason, warn_stock
from bert_unpad.hf.models import missing_operator
from bert_unpad.hf.packing import Packing, refuse_restarts
from bert_unpad.ops.attention import HEAD_DIMS

NAME = "bert_unpad"


def register() -> None:
    """Registers the implementation and its mask function with transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(*args, **kwargs) -> Tensor | None:
    """Returns the [batch, tokens] mask for plain bidirectional attention, else sdpa's 4-D mask.

    A single row without a mask may hold packed sequences, for which sdpa's mask would be wrong:
    there a window reaches `attention` as its argument alone.
    """
    from transformers import masking_utils

    mask, window = kwargs.get("attention_mask"), kwargs.get("local_size")
    # Only masks that are bidirectional, but for their window, may be skipped without padding.
    if kwargs.get("allow_is_bidirectional_skip"):
        if window is None:
            return None if mask is None else with_packing(mask)
        if mask is None and kwargs.get("batch_size") == 1:
            return None
    return masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


def with_packing(mask: Tensor) -> Tensor:
    """Returns a copy of a [batch, tokens] mask that holds its packing, for all layers of a call."""
    if torch.compiler.is_compiling() or recording_reason() or mask.dim() != 2:
        return mask
    mask = mask.clone()  # the caller's may be changed in place
    mask._bert_unpad_packing = Packing.from_mask(mask, reads_first=False)
    return mask


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
            sequences. `sliding_window` counts keys on one side, and a query's own.

    Returns:
        The attention output, [batch, tokens, heads, head_dim]; and None instead of weights.

    Raises:
        ValueError: the input is packed, but this attention cannot be computed packed; or it has
            attention sinks (`s_aux`).
    """
    name = type(module).__name__
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{name}: s_aux: expected None, as {NAME!r} has no attention sinks")
    packed = kwargs.get("cu_seq_lens_q") is not None
    reason = _reason(module, query, key, value, attention_mask, kwargs)
    if reason is None:
        try:
            packing = _packing(query, attention_mask, kwargs)
        except (TypeError, ValueError) as error:
            if packed or attention_mask is None or torch.compiler.is_compiling():
                raise
            reason = str(error)
    elif packed:
        raise ValueError(
            f"{name}: packed input (cu_seq_lens_q) cannot be computed, because {reason}; pass a "
            "padded batch"
        )
    if reason is not None:
        warn_stock(name, reason)
        return _sdpa(module, query, key, value, attention_mask, dropout, scaling, kwargs)
    heads = torch.cat([x.transpose(1, 2) for x in (query, key, value)], 2)
    window = _window(module, kwargs.get("sliding_window"))
    out = packing.attend(packing.pack(heads)[0], dropout, scaling, window, query.shape[1])
    return packing.pad(out[None]), None


def _reason(module, query, key, value, mask, kwargs) -> str | None:
    if getattr(module, "is_causal", False) or kwargs.get("is_causal"):
        return "it is causal attention"
    if getattr(getattr(module, "config", None), "is_decoder", False):
        return "it belongs to a decoder"  # a mask may then be that of an encoder's tokens
    if key.shape != value.shape or key.shape[2:] != query.shape[2:]:
        return "queries, keys and values differ in number or width"
    for name in ("position_bias", "softcap"):
        if kwargs.get(name) is not None:
            return f"it has a {name}"
    if mask is not None and mask.dim() != 2:
        return f"its mask has {mask.dim()} dimensions, not 2"
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its tensors are {query.dtype}"
    if query.shape[-1] not in HEAD_DIMS.get(query.device.type, ()):
        return f"its heads have dimension {query.shape[-1]}"
    return recording_reason() or missing_operator(query.device.type)


def _window(module: nn.Module, given: int | None) -> tuple[int, int]:
    """Returns how many keys before and after its own a query sees.

    Encoders pass one more than their configuration's window, as flash attention in transformers
    counts; a few models pass the configuration's own number.
    """
    if given is None:
        return -1, -1
    config = getattr(module, "config", None)
    width = given if given == getattr(config, "sliding_window", None) else given - 1
    return width, width


def _packing(query: Tensor, mask: Tensor | None, kwargs) -> Packing:
    cu_seqlens, tokens = kwargs.get("cu_seq_lens_q"), query.shape[2]
    if cu_seqlens is not None:
        if query.shape[0] != 1 or mask is not None:
            raise ValueError("cu_seq_lens_q: expected a batch of one row without a mask")
        return Packing.from_cu_seqlens(cu_seqlens, kwargs.get("max_length_q"), tokens)
    if mask is None:
        refuse_restarts(kwargs.get("position_ids"), query.shape[0])
        return Packing.dense(query.shape[0], tokens, query.device)
    packing = getattr(mask, "_bert_unpad_packing", None)
    return Packing.from_mask(mask, reads_first=False) if packing is None else packing


def _sdpa(module, query, key, value, mask, dropout, scaling, kwargs) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if mask is not None and mask.dim() == 2:
        mask = (mask != 0)[:, None, None, :]
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
    )
