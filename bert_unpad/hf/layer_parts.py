"""Where the modules of a transformer layer are, in each family of models.

A new family of the same architecture needs only paths that differ from BERT's. Module paths are not
the names of tensors in files, which `bert_unpad.nn.families` has: dropout and activations have no
tensors, and transformers renames when it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from bert_unpad.hf.packing import Packing
from bert_unpad.hf.plain_modules import unchanged
from bert_unpad.hf.relative import DisentangledDistances, Distances, T5Distances
from bert_unpad.nn.families.rope import read_rope


class LayerParts(NamedTuple):
    """The modules of a layer, with the same names for all families.

    A module that is several of them computes them in one product. A part that is None is left out.
    """

    attention: nn.Module
    """The module whose training flag applies to attention weights."""
    rate: nn.Dropout | float
    """Dropout of attention weights."""
    first_norm: nn.Module | None
    """The norm before attention, in families with norms before the halves of a layer. The others'
    norms come after the residuals."""
    query: nn.Module
    key: nn.Module
    value: nn.Module
    attention_out: nn.Module
    attention_dropout: nn.Module | None
    attention_norm: nn.Module
    """The norm of the sum of attention and residual, which the feed-forward half takes."""
    ffn_in: nn.Module
    ffn_gate: nn.Module | None
    """The linear layer whose output multiplies that of the activation."""
    ffn_activation: nn.Module | None
    """None: a function, GELU (exact, with erf)."""
    ffn_inner_dropout: nn.Module | None
    ffn_out: nn.Module
    ffn_dropout: nn.Module | None
    ffn_norm: nn.Module | None


class Rotary(NamedTuple):
    """How a layer rotates queries and keys."""

    theta: float
    """Base of the angles."""
    scale: float
    """Factor of the positions."""


# BERT's paths of LayerParts within a layer; others' where they differ.
_BERT: dict[str, str | None] = {
    "attention": "attention.self",
    "rate": "attention.self.dropout",
    "first_norm": None,
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_dropout": "attention.output.dropout",
    "attention_norm": "attention.output.LayerNorm",
    "ffn_in": "intermediate.dense",
    "ffn_gate": None,
    "ffn_activation": "intermediate.intermediate_act_fn",
    "ffn_inner_dropout": None,
    "ffn_out": "output.dense",
    "ffn_dropout": "output.dropout",
    "ffn_norm": "output.LayerNorm",
}
_CONTAINERS = (
    *("attention", "attention.self", "attention.self.dropout", "attention.output"),
    *("intermediate", "output"),
)


class LayerAdapter:
    """Finds the modules within the layers of a family."""

    def __init__(
        self,
        paths: dict[str, str | None],
        containers: tuple[str, ...],
        *,
        head_dim: str = "attention_head_size",
        distances: Distances | None = None,
        rotary: Callable[[nn.Module], Rotary | None] | None = None,
        window: str | None = None,
    ) -> None:
        """Makes the adapter of a family.

        Args:
            paths: of `LayerParts` within a layer, where they are not BERT's.
            containers: paths of modules that a packed layer does not call.
            head_dim: the attribute of the attention module with the width of a head.
            distances: what is added to the scores by distance.
            rotary: how a layer rotates; raises a `ValueError` where `ops.rotary_` cannot.
            window: the attribute of the attention module with how many tokens to each side, its own
                included, a token sees; None: all.
        """
        paths = _BERT | paths
        self._parts = [_split(paths[name]) for name in LayerParts._fields]
        self._attention = _split(paths["attention"])
        self._containers = [_split(path) for path in containers]
        self._head_dim, self._window = head_dim, window
        self.distances, self.rotary = distances, rotary

    def parts(self, layer: nn.Module) -> LayerParts:
        """Returns the modules that a packed layer computes with."""
        return LayerParts._make([_get(layer, path) if path else None for path in self._parts])

    def head_dim(self, layer: nn.Module) -> int:
        """Returns the width of an attention head."""
        return getattr(_get(layer, self._attention), self._head_dim)

    def window(self, attention: nn.Module) -> tuple[int, int]:
        """Returns how many tokens before and after its own a token sees; -1: all."""
        width = None if self._window is None else getattr(attention, self._window)
        return (-1, -1) if width is None else (width - 1, width - 1)

    def untouched(self, layer: nn.Module) -> bool:
        """Whether the modules that a packed layer does not call have no hooks, and are stock."""
        return all(unchanged(_get(layer, path)) for path in self._containers)

    def has_parts(self, layer: nn.Module) -> bool:
        """Whether a layer has all modules, whose names transformers may change."""
        try:
            self.parts(layer)
        except AttributeError:
            return False
        return True

    def fits(self, layer: nn.Module, packing: Packing) -> bool:
        """Whether a packed layer misses nothing that a layer does: hooks, ways to rotate."""
        try:
            rotates = self.rotary is not None and self.rotary(layer) is not None
        except ValueError:
            return False
        return self.untouched(layer) and not (rotates and packing.positions is None)


def _split(path: str | None) -> tuple[str, ...]:
    return () if path is None else tuple(path.split("."))


def _get(layer: nn.Module, path: tuple[str, ...]) -> Any:
    found: Any = layer
    for name in path:  # five times faster than nn.Module's own attribute lookup
        inner = found._modules.get(name)
        found = getattr(found, name) if inner is None else inner
    return found


def _rope(parameters: dict[str, Any]) -> Rotary:
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor: expected 1")
    found = read_rope({"rope_parameters": parameters}, parameters["rope_theta"])
    return Rotary(found["rotary_theta"], 1.0 / found["rotary_factor"])


def _modernbert_rotary(layer: Any) -> Rotary:
    return _rope(layer.config.rope_parameters[layer.attention_type])


def _rotary(layer: Any) -> Rotary:
    return _rope(layer.self_attn.config.rope_parameters)


def _esm_rotary(layer: Any) -> Rotary | None:
    attention = layer.attention.self
    if attention.position_embedding_type != "rotary":
        return None
    return Rotary(attention.config.rope_theta, 1.0)


# Layers as in Llama: EuroBERT's, NomicBERT's and Jina's.
_LLAMA: dict[str, str | None] = {
    "attention": "self_attn",
    "rate": "self_attn.attention_dropout",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_out": "self_attn.o_proj",
    "attention_dropout": None,
    "ffn_in": "mlp.gate_proj",
    "ffn_gate": "mlp.up_proj",
    "ffn_activation": "mlp.act_fn",
    "ffn_out": "mlp.down_proj",
    "ffn_dropout": None,
    "ffn_norm": None,
}
_NOMIC = _LLAMA | {
    "attention_dropout": "post_attention_dropout",
    "attention_norm": "post_attention_layernorm",
    "ffn_dropout": "post_mlp_dropout",
    "ffn_norm": "post_mlp_layernorm",
}

BERT = LayerAdapter({}, _CONTAINERS)
"""Layers of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE and RoCBert."""
DEBERTA = LayerAdapter(
    {
        "query": "attention.self.query_proj",
        "key": "attention.self.key_proj",
        "value": "attention.self.value_proj",
    },
    _CONTAINERS,
    distances=DisentangledDistances(),
)
"""Layers of DeBERTa-v2 and v3."""
MPNET = LayerAdapter(
    {
        "attention": "attention.attn",
        "rate": "attention.attn.dropout",
        "query": "attention.attn.q",
        "key": "attention.attn.k",
        "value": "attention.attn.v",
        "attention_out": "attention.attn.o",
        "attention_dropout": "attention.dropout",
        "attention_norm": "attention.LayerNorm",
    },
    ("attention", "attention.attn", "attention.attn.dropout", "intermediate", "output"),
    distances=T5Distances(),
)
DISTILBERT = LayerAdapter(
    {
        "attention": "attention",
        "rate": "attention.dropout",
        "query": "attention.q_lin",
        "key": "attention.k_lin",
        "value": "attention.v_lin",
        "attention_out": "attention.out_lin",
        "attention_dropout": None,
        "attention_norm": "sa_layer_norm",
        "ffn_in": "ffn.lin1",
        "ffn_activation": "ffn.activation",
        "ffn_out": "ffn.lin2",
        "ffn_dropout": "ffn.dropout",
        "ffn_norm": "output_layer_norm",
    },
    ("attention", "attention.dropout", "ffn"),
)
ALBERT = LayerAdapter(
    {
        "attention": "attention",
        "rate": "attention.attention_dropout",
        "query": "attention.query",
        "key": "attention.key",
        "value": "attention.value",
        "attention_out": "attention.dense",
        "attention_dropout": "attention.output_dropout",
        "attention_norm": "attention.LayerNorm",
        "ffn_in": "ffn",
        "ffn_activation": "activation",
        "ffn_out": "ffn_output",
        "ffn_dropout": None,
        "ffn_norm": "full_layer_layer_norm",
    },
    ("attention", "attention.attention_dropout"),
)
ESM = LayerAdapter(
    {
        "first_norm": "attention.LayerNorm",
        "attention_norm": "LayerNorm",
        "ffn_activation": None,
        "ffn_norm": None,
    },
    ("attention", "attention.self", "attention.output", "intermediate", "output"),
    rotary=_esm_rotary,
)
EUROBERT = LayerAdapter(
    _LLAMA | {"first_norm": "input_layernorm", "attention_norm": "post_attention_layernorm"},
    ("self_attn", "mlp"),
    head_dim="head_dim",
    rotary=_rotary,
)
JINA = LayerAdapter(
    _NOMIC
    | {
        "ffn_in": "mlp.fc1",
        "ffn_gate": None,
        "ffn_activation": "mlp.activation_fn",
        "ffn_out": "mlp.fc2",
    },
    ("self_attn", "mlp"),
    head_dim="head_dim",
    rotary=_rotary,
)
NOMIC = LayerAdapter(_NOMIC, ("self_attn", "mlp"), head_dim="head_dim", rotary=_rotary)
MODERNBERT = LayerAdapter(
    {
        "attention": "attn",
        "rate": "attn.attention_dropout",
        "first_norm": "attn_norm",
        **dict.fromkeys(("query", "key", "value"), "attn.Wqkv"),
        "attention_out": "attn.Wo",
        "attention_dropout": "attn.out_drop",
        "attention_norm": "mlp_norm",
        **dict.fromkeys(("ffn_in", "ffn_gate"), "mlp.Wi"),
        "ffn_activation": "mlp.act",
        "ffn_inner_dropout": "mlp.drop",
        "ffn_out": "mlp.Wo",
        "ffn_dropout": None,
        "ffn_norm": None,
    },
    ("attn", "mlp"),
    head_dim="head_dim",
    rotary=_modernbert_rotary,
    window="sliding_window",
)
PRE_LAYER_NORM = LayerAdapter(
    {
        "first_norm": "attention.LayerNorm",
        "attention_norm": "intermediate.LayerNorm",
        "ffn_norm": None,
    },
    _CONTAINERS,
)
"""Layers of RoBERTa-PreLayerNorm."""
XLM_ROBERTA_XL = LayerAdapter(
    {
        "first_norm": "attention.self_attn_layer_norm",
        "attention_norm": "LayerNorm",
        "ffn_dropout": None,
        "ffn_norm": None,
    },
    _CONTAINERS,
)
