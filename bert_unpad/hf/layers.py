"""One transformer layer on packed tokens, from the modules of Hugging Face's layer.

The class of a stock layer is swapped for a subclass with `PackedLayer` in front. Called with a
packing, it computes [1, T, hidden] by our operators; without one it is the stock layer. Being
called through `__call__`, it keeps gradient checkpointing, FSDP and the users' hooks on the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from bert_unpad.hf import dense
from bert_unpad.hf.packing import Packing

__all__ = ["LayerParts", "PackedLayer", "bert_parts", "distilbert_parts"]


class LayerParts(NamedTuple):
    """The modules of a post-LayerNorm layer, under one name for all families."""

    attention: nn.Module
    """The module whose dropout and training flag attention weights follow."""
    query: nn.Module
    key: nn.Module
    value: nn.Module
    heads: int
    scaling: float
    attention_out: nn.Module
    attention_dropout: nn.Module | None
    attention_norm: nn.Module
    ffn_in: nn.Module
    ffn_activation: nn.Module
    ffn_out: nn.Module
    ffn_dropout: nn.Module
    ffn_norm: nn.Module
    containers: tuple[nn.Module, ...]
    """Modules that are not called: a hook on one of them would not run."""


def bert_parts(layer: nn.Module) -> LayerParts:
    """Of BERT, RoBERTa, XLM-RoBERTa, CamemBERT and ELECTRA."""
    half, attention, closing = layer.attention, layer.attention.self, layer.attention.output
    ffn, output = layer.intermediate, layer.output
    return LayerParts(
        attention=attention,
        query=attention.query,
        key=attention.key,
        value=attention.value,
        heads=attention.num_attention_heads,
        scaling=attention.attention_head_size**-0.5,
        attention_out=closing.dense,
        attention_dropout=closing.dropout,
        attention_norm=closing.LayerNorm,
        ffn_in=ffn.dense,
        ffn_activation=ffn.intermediate_act_fn,
        ffn_out=output.dense,
        ffn_dropout=output.dropout,
        ffn_norm=output.LayerNorm,
        containers=(half, attention, attention.dropout, closing, ffn, output),
    )


def distilbert_parts(layer: nn.Module) -> LayerParts:
    """Of DistilBERT, which has no dropout after the attention's output layer."""
    attention, ffn = layer.attention, layer.ffn
    return LayerParts(
        attention=attention,
        query=attention.q_lin,
        key=attention.k_lin,
        value=attention.v_lin,
        heads=attention.n_heads,
        scaling=(attention.dim // attention.n_heads) ** -0.5,
        attention_out=attention.out_lin,
        attention_dropout=None,
        attention_norm=layer.sa_layer_norm,
        ffn_in=ffn.lin1,
        ffn_activation=ffn.activation,
        ffn_out=ffn.lin2,
        ffn_dropout=ffn.dropout,
        ffn_norm=layer.output_layer_norm,
        containers=(attention, attention.dropout, ffn),
    )


class PackedLayer:
    """Mixed into the class of a stock layer, in front of it."""

    _bert_unpad_parts: Callable[[nn.Module], LayerParts]

    def forward(self, hidden_states: Tensor, *args, packing: Packing | None = None, **kwargs):
        if packing is None:
            return super().forward(hidden_states, *args, **kwargs)
        parts = type(self)._bert_unpad_parts(self)
        x = hidden_states
        tokens = x.shape[1]
        qkv = dense.project_qkv(parts.query, parts.key, parts.value, x[0])
        attention = parts.attention
        out = packing.attend(
            qkv.view(tokens, 3, parts.heads, -1),
            attention.dropout.p if attention.training else 0.0,
            parts.scaling,
        )
        out, bias = dense.project(parts.attention_out, out.view(1, tokens, -1))
        x = dense.close_block(out, bias, x, parts.attention_norm, parts.attention_dropout)
        out, bias = dense.project(parts.ffn_in, x)
        out = dense.activation(parts.ffn_activation, out, bias)
        out, bias = dense.project(parts.ffn_out, out)
        return dense.close_block(out, bias, x, parts.ffn_norm, parts.ffn_dropout)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "bert_unpad")))
