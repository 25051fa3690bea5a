"""One transformer layer on packed tokens, built from the modules of Hugging Face's layer.

The class of a stock layer is swapped for a subclass that inherits from `PackedLayer` first. Called
with a packing, it computes [1, T, hidden] with our operators; without one it is the stock layer. It
is called through `__call__`, so gradient checkpointing, FSDP and users' hooks on the layer work.
With a packing whose `last` names rows, a layer computes queries, and everything after attention,
for these rows only. `PackedStack` passes such a packing to the last layer and to no other: what a
layer computes follows from its arguments, so layers may be wrapped, compiled, or shared.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from bert_unpad import ops
from bert_unpad.batch.rows import gather_rows
from bert_unpad.hf import plain_modules
from bert_unpad.hf.packing import Packing
from bert_unpad.hf.relative import DisentangledDistances, Distances, T5Distances


class LayerParts(NamedTuple):
    """The modules of a post-LayerNorm layer, with the same names for all families."""

    attention: nn.Module
    """The module whose dropout and training flag apply to attention weights."""
    query: nn.Module
    key: nn.Module
    value: nn.Module
    heads: int
    attention_out: nn.Module
    attention_dropout: nn.Module | None
    attention_norm: nn.Module
    ffn_in: nn.Module
    ffn_activation: nn.Module
    ffn_out: nn.Module
    ffn_dropout: nn.Module
    ffn_norm: nn.Module


# Paths of LayerParts within a layer of BERT and similar models; others' where they differ.
_BERT = {
    "attention": "attention.self",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "heads": "attention.self.num_attention_heads",
    "attention_out": "attention.output.dense",
    "attention_dropout": "attention.output.dropout",
    "attention_norm": "attention.output.LayerNorm",
    "ffn_in": "intermediate.dense",
    "ffn_activation": "intermediate.intermediate_act_fn",
    "ffn_out": "output.dense",
    "ffn_dropout": "output.dropout",
    "ffn_norm": "output.LayerNorm",
}
_DEBERTA = {
    "query": "attention.self.query_proj",
    "key": "attention.self.key_proj",
    "value": "attention.self.value_proj",
}
_MPNET = {
    "attention": "attention.attn",
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "heads": "attention.attn.num_attention_heads",
    "attention_out": "attention.attn.o",
    "attention_dropout": "attention.dropout",
    "attention_norm": "attention.LayerNorm",
}
_DISTILBERT = {
    "attention": "attention",
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "heads": "attention.n_heads",
    "attention_out": "attention.out_lin",
    "attention_dropout": None,
    "attention_norm": "sa_layer_norm",
    "ffn_in": "ffn.lin1",
    "ffn_activation": "ffn.activation",
    "ffn_out": "ffn.lin2",
    "ffn_dropout": "ffn.dropout",
    "ffn_norm": "output_layer_norm",
}


class LayerAdapter:
    """Finds the modules within the layers of a family."""

    def __init__(
        self,
        paths: dict[str, str | None],
        containers: tuple[str, ...],
        distances: Distances | None = None,
    ) -> None:
        paths = _BERT | paths
        self._parts = [_split(paths[name]) for name in LayerParts._fields]
        self._head_dim = _split(f"{paths['attention']}.attention_head_size")
        self._containers = [_split(path) for path in containers]
        self.distances = distances

    def parts(self, layer: nn.Module) -> LayerParts:
        """Returns the modules that `PackedLayer` computes with."""
        return LayerParts(*[None if path is None else _get(layer, path) for path in self._parts])

    def head_dim(self, layer: nn.Module) -> int:
        """Returns the width of an attention head."""
        return _get(layer, self._head_dim)

    def containers(self, layer: nn.Module) -> list[nn.Module]:
        """Returns the modules that `PackedLayer` does not call, so that their hooks do not run."""
        return [_get(layer, path) for path in self._containers]


def _split(path: str | None) -> tuple[str, ...] | None:
    return None if path is None else tuple(path.split("."))


def _get(layer: nn.Module, path: tuple[str, ...]) -> Any:
    found: Any = layer
    for name in path:  # five times faster than nn.Module's own attribute lookup
        inner = found._modules.get(name)
        found = getattr(found, name) if inner is None else inner
    return found


_CONTAINERS = (
    "attention",
    "attention.self",
    "attention.self.dropout",
    "attention.output",
    "intermediate",
    "output",
)
BERT = LayerAdapter({}, _CONTAINERS)
"""Layers of BERT, RoBERTa, XLM-RoBERTa, CamemBERT and ELECTRA."""
DEBERTA = LayerAdapter(_DEBERTA, _CONTAINERS, DisentangledDistances())
"""Layers of DeBERTa-v2 and v3."""
MPNET = LayerAdapter(
    _MPNET,
    ("attention", "attention.attn", "attention.attn.dropout", "intermediate", "output"),
    T5Distances(),
)
DISTILBERT = LayerAdapter(_DISTILBERT, ("attention", "attention.dropout", "ffn"))


class PackedLayer:
    """Mixin for the class of a stock layer; it comes first in the bases."""

    _bert_unpad_layer: LayerAdapter

    def forward(
        self,
        hidden_states: Tensor,
        *args,
        packing: Packing | None = None,
        shared: Any = None,
        **kwargs,
    ):
        """The stock forward; or with `packing`, and what `Distances.shared` gives, ours."""
        if not isinstance(packing, Packing):
            return super().forward(hidden_states, *args, **kwargs)
        parts = self._bert_unpad_layer.parts(self)
        x = hidden_states
        p = parts.attention.dropout.p if parts.attention.training else 0.0
        heads = (parts.heads, self._bert_unpad_layer.head_dim(self))
        distances, last = self._bert_unpad_layer.distances, packing.last
        scale = None if distances is None else distances.scale(parts.attention)
        if last is None:
            qkv = plain_modules.project_side_by_side((parts.query, parts.key, parts.value), x[0])
            qkv = qkv.unflatten(2, heads)
            added = self._bert_unpad_bias(parts.attention, shared, qkv[:, 0], qkv[:, 1])
            out = packing.attend(qkv, p, scale, added)
        else:
            kv = plain_modules.project_side_by_side((parts.key, parts.value), x[0])
            x = gather_rows(x[0], last.positions)[None]
            q = plain_modules.dense(parts.query, x[0]).unflatten(1, heads)
            kv = kv.unflatten(2, heads)
            added = self._bert_unpad_bias(parts.attention, shared, q, kv[:, 0])
            out = packing.attend_last(q, kv, p, scale, added)
        out, bias = plain_modules.project(parts.attention_out, out.flatten(1)[None])
        x = plain_modules.close_block(out, bias, x, parts.attention_norm, parts.attention_dropout)
        out, bias = plain_modules.project(parts.ffn_in, x)
        out = plain_modules.activation(parts.ffn_activation, out, bias)
        out, bias = plain_modules.project(parts.ffn_out, out)
        return plain_modules.close_block(out, bias, x, parts.ffn_norm, parts.ffn_dropout)

    def _bert_unpad_bias(
        self, attention: nn.Module, shared: Any, q: Tensor, k: Tensor
    ) -> ops.PositionBias | None:
        if shared is None:
            return None
        return self._bert_unpad_layer.distances.bias(attention, shared, q, k)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "bert_unpad")))


class PackedStack:
    """Mixin for the class of the module that holds the layers; it comes first in the bases."""

    _bert_unpad_layer: LayerAdapter

    def forward(self, hidden_states: Tensor, *args, packing: Packing | None = None, **kwargs):
        if not isinstance(packing, Packing):
            return super().forward(hidden_states, *args, **kwargs)
        x, before = hidden_states, None
        shared = self._bert_unpad_shared(x)
        whole = packing if packing.last is None else dataclasses.replace(packing, last=None)
        for index, layer in enumerate(self.layer, 1):
            if index == len(self.layer):
                before, whole = x, packing
            x = layer(x, packing=whole, shared=shared)
        # The last layer's input serves to compute its other rows later.
        return BaseModelOutput(x, None if packing.last is None else (before,))

    def _bert_unpad_complete(self, packing: Packing, before: Tensor, x: Tensor) -> Tensor:
        """Computes the last layer's output for all tokens, [1, T, hidden].

        Args:
            packing: whose `last` names rows.
            before: the last layer's input, [1, T, hidden].
            x: its output for these rows, [1, Q, hidden], which are kept. With dropout, the other
                rows have other masks.
        """
        whole = dataclasses.replace(packing, last=None)
        rest = self.layer[-1](before, packing=whole, shared=self._bert_unpad_shared(before))
        return rest.index_copy(1, packing.last.positions, x)

    def _bert_unpad_shared(self, x: Tensor) -> Any:
        """What `Distances.shared` gives for hidden states x, or None."""
        distances = self._bert_unpad_layer.distances
        return None if distances is None else distances.shared(self, x)


# What torch.compile, checkpoint_wrapper and FSDP1 put around a module; its arguments pass through.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the module within wrappers of PyTorch, which pass all arguments on."""
    for name in _WRAPPERS:
        if (inner := module._modules.get(name)) is not None:
            return unwrap(inner)
    return module
