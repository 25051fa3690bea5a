"""Peers of our encoder with windows, built on one Hugging Face ModernBERT: its weights and modules.

`padded`     Hugging Face as it is: a padded batch, logits at every position.
`unpadded`   what a careful user writes in plain PyTorch: packed tokens, one sdpa call a sequence
             with a mask where there is a window, logits at masked positions only.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lib.peers import PaddedInputs
from bert_unpad.batch import PackedInputs, VarlenBatch


def padded(model: nn.Module, inputs: PaddedInputs) -> Tensor:
    """Mean loss over masked tokens of a transformers ModernBertForMaskedLM."""
    return model(
        input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, labels=inputs.labels
    ).loss


def unpadded(model: nn.Module, inputs: PackedInputs) -> Tensor:
    """The same loss on packed tokens."""
    from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

    bert, batch = model.model, inputs.batch
    x = bert.embeddings(input_ids=inputs.input_ids[None])
    angles = {
        kind: bert.rotary_emb(x, batch.position_ids[None], kind)
        for kind in set(bert.config.layer_types)
    }
    for layer in bert.layers:
        attention = layer.attn
        qkv = attention.Wqkv(layer.attn_norm(x)).view(batch.total, 3, -1, attention.head_dim)
        q, k, v = (part.transpose(0, 1) for part in qkv.unbind(1))  # [heads, T, head_dim]
        q, k = apply_rotary_pos_emb(q[None], k[None], *angles[layer.attention_type])
        # Its own count has the token itself.
        window = None if attention.sliding_window is None else attention.sliding_window - 1
        out = attend(q[0], k[0], v, batch, window)
        x = x + attention.out_drop(attention.Wo(out.flatten(1)))[None]
        x = x + layer.mlp(layer.mlp_norm(x))
    masked = bert.final_norm(x)[0].index_select(0, inputs.masked_positions)
    logits = model.decoder(model.head(masked))
    return functional.cross_entropy(logits.float(), inputs.masked_labels)


def attend(q: Tensor, k: Tensor, v: Tensor, batch: VarlenBatch, window: int | None) -> Tensor:
    """One sdpa call a sequence: [heads, T, head_dim] each -> [T, heads, head_dim]."""
    lengths = batch.lengths.tolist()
    outs = [
        functional.scaled_dot_product_attention(a[None], b[None], c[None], band(len_, window))[0]
        for len_, a, b, c in zip(
            lengths, *(part.split(lengths, 1) for part in (q, k, v)), strict=True
        )
    ]
    return torch.cat(outs, 1).transpose(0, 1)


@lru_cache(maxsize=64)
def band(length: int, window: int | None) -> Tensor | None:
    """Which keys a query sees, bool [length, length]; None: all."""
    if window is None or length <= window + 1:
        return None
    places = torch.arange(length)
    return (places[:, None] - places).abs() <= window
