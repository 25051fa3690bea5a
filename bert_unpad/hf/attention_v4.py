"""The attention implementation "bert_unpad" in transformers 4.57, which uses tables of classes.

There the BERT-like models do not call the attention interface. Each has a table of attention
classes by implementation, and looks one up when a model is created. So each table gets another
class, a subclass of the "eager" one: it has the same parameters, and its forward packs plain
self-attention. Any other call runs the "eager" forward.
"""

from __future__ import annotations

import importlib
import weakref

import torch
from torch import Tensor, nn

from bert_unpad.hf.attention import NAME, attention, with_packing
from bert_unpad.hf.fallback import warn_stock

_TABLES = {
    "bert": "BERT_SELF_ATTENTION_CLASSES",
    "roberta": "ROBERTA_SELF_ATTENTION_CLASSES",
    "xlm_roberta": "XLM_ROBERTA_SELF_ATTENTION_CLASSES",
    "camembert": "CAMEMBERT_SELF_ATTENTION_CLASSES",
    "electra": "ELECTRA_SELF_ATTENTION_CLASSES",
    "distilbert": "DISTILBERT_ATTENTION_CLASSES",
}

_last: tuple[weakref.ref, int, Tensor] | None = None


def register() -> None:
    """Adds a class to the table of each BERT-like model.

    Raises:
        ImportError: this version has no such table.
    """
    for family, name in _TABLES.items():
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        table = getattr(modeling, name, None)
        if table is None or "eager" not in table:
            raise ImportError(
                f"bert_unpad.hf: expected {family} in this version of transformers to use the "
                f"attention interface or to have {name}: pip install 'transformers>=5.0'"
            )
        make = packed_distilbert_attention if family == "distilbert" else packed_bert_attention
        table[NAME] = make(table["eager"])


def packed_bert_attention(stock: type[nn.Module]) -> type[nn.Module]:
    """Makes a subclass of BERT's self-attention class (or of one of its copies) that packs.

    Args:
        stock: a class with `query`, `key`, `value`, `dropout` and the sizes of the heads.
    """

    class PackedSelfAttention(stock):
        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Tensor | None = None,
            head_mask: Tensor | None = None,
            encoder_hidden_states: Tensor | None = None,
            past_key_values: object = None,
            output_attentions: bool = False,
            cache_position: Tensor | None = None,
        ) -> tuple[Tensor, Tensor | None]:
            reason = _reason(attention_mask, head_mask, output_attentions)
            if encoder_hidden_states is not None or past_key_values is not None:
                reason = "it is cross-attention or has a cache"
            elif self.is_decoder:
                reason = "it is causal attention"
            elif self.position_embedding_type != "absolute":
                reason = "its positions are relative"
            if reason is not None:
                warn_stock(type(self).__name__, reason)
                return super().forward(
                    hidden_states,
                    attention_mask,
                    head_mask,
                    encoder_hidden_states,
                    past_key_values,
                    output_attentions,
                    cache_position,
                )
            heads = (self.num_attention_heads, self.attention_head_size)
            projections = (self.query, self.key, self.value)
            out = _attend(self, [p(hidden_states) for p in projections], attention_mask, heads)
            return out, None

    return _named(PackedSelfAttention, stock)


def packed_distilbert_attention(stock: type[nn.Module]) -> type[nn.Module]:
    """Makes a subclass of DistilBERT's attention class that packs.

    Args:
        stock: a class with `q_lin`, `k_lin`, `v_lin`, `out_lin`, `dropout` and the sizes of the
            heads.
    """

    class PackedSelfAttention(stock):
        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor,
            head_mask: Tensor | None = None,
            output_attentions: bool = False,
        ) -> tuple[Tensor, ...]:
            reason = _reason(mask, head_mask, output_attentions)
            if reason is not None:
                warn_stock(type(self).__name__, reason)
                return super().forward(query, key, value, mask, head_mask, output_attentions)
            qkv = [self.q_lin(query), self.k_lin(key), self.v_lin(value)]
            out = _attend(self, qkv, mask, (self.n_heads, self.dim // self.n_heads))
            return (self.out_lin(out),)

    return _named(PackedSelfAttention, stock)


def _named(packed: type[nn.Module], stock: type[nn.Module]) -> type[nn.Module]:
    packed.__name__ = packed.__qualname__ = f"Packed{stock.__name__}"
    return packed


def _reason(mask: Tensor | None, head_mask: Tensor | None, output_attentions: bool) -> str | None:
    if output_attentions:
        return "it is asked for attention weights"
    if head_mask is not None:
        return "it has a head mask"
    if mask is not None and mask.dim() != 2 and mask.shape[1:-1] != (1, 1):
        return f"its mask has the shape {list(mask.shape)}, not one row for each sequence"
    return None


def _attend(
    module: nn.Module, qkv: list[Tensor], mask: Tensor | None, heads: tuple[int, int]
) -> Tensor:
    """Calls the implementation with queries, keys and values of shape [batch, tokens, hidden].

    `mask` is [batch, tokens] of zeros and ones, or [batch, 1, 1, tokens] to be added to scores.
    """
    query, key, value = (x.unflatten(-1, heads).transpose(1, 2) for x in qkv)
    if mask is not None and mask.dim() == 4:
        mask = _tokens(mask)
    dropout = module.dropout.p if module.training else 0.0
    out, _ = attention(module, query, key, value, mask, dropout)
    return out.flatten(2)


def _tokens(mask: Tensor) -> Tensor:
    """Returns which tokens an additive mask keeps; computed once for all layers of a call."""
    global _last
    if torch.compiler.is_compiling() or mask.is_inference():
        return mask[:, 0, 0] == 0
    last = _last
    if last is None or last[0]() is not mask or last[1] != mask._version:
        last = _last = (weakref.ref(mask), mask._version, with_packing(mask[:, 0, 0] == 0))
    return last[2]
