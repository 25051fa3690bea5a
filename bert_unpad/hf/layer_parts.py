"""Where the modules of a transformer layer are, in each family of models.

Modules that have tensors are named by the family's row in `bert_unpad.nn.families`, by which files
are read and converted; here stands what has none (attention, dropout, activations), and what
transformers renames when it reads a file.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from bert_unpad.hf.packing import Packing
from bert_unpad.hf.plain_modules import unchanged
from bert_unpad.hf.relative import DisentangledDistances, Distances, T5Distances
from bert_unpad.nn import families
from bert_unpad.nn.families import Family
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


# BERT's modules without tensors; others' where they differ.
_BERT: dict[str, str | None] = {
    "attention": "attention.self",
    "rate": "attention.self.dropout",
    "attention_dropout": "attention.output.dropout",
    "ffn_activation": "intermediate.intermediate_act_fn",
    "ffn_inner_dropout": None,
    "ffn_dropout": "output.dropout",
}
_CONTAINERS = (
    *("attention", "attention.self", "attention.self.dropout", "attention.output"),
    *("intermediate", "output"),
)


def _with_tensors(family: Family) -> dict[str, str | None]:
    """The paths of the modules whose tensors a row of the table of families names."""
    query, key, value = _names(family, "attention.self.qkv", 3)
    gated = family.parts.get("feed_forward") == "glu"
    ffn_in, ffn_gate = _names(family, "intermediate.dense", 2)
    first_norm = family.attention_norm or None
    return {
        "first_norm": first_norm,
        **{"query": query, "key": key, "value": value},
        "attention_out": _names(family, "attention.output.dense")[0],
        "attention_norm": _names(family, "attention.output.LayerNorm")[0],
        **{"ffn_in": ffn_in, "ffn_gate": ffn_gate if gated else None},
        "ffn_out": _names(family, "output.dense")[0],
        "ffn_norm": None if first_norm else _names(family, "output.LayerNorm")[0],
    }


def _names(family: Family, module: str, parts: int = 1) -> tuple[str, ...]:
    """A module's name for each of its parts."""
    found = family.layer.get(module, module)
    return (found,) * parts if isinstance(found, str) else found


class LayerAdapter:
    """Finds the modules within the layers of a family."""

    def __init__(
        self,
        family: Family,
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
            family: whose names of tensors the paths of modules are.
            paths: of `LayerParts` within a layer: of modules without tensors, where they are not
                BERT's, and of others that transformers names otherwise than its files.
            containers: paths of modules that a packed layer does not call.
            head_dim: the attribute of the attention module with the width of a head.
            distances: what is added to the scores by distance.
            rotary: how a layer rotates; raises a `ValueError` where `ops.rotary_` cannot.
            window: the attribute of the attention module with how many tokens to each side, its own
                included, a token sees; None: all.
        """
        paths = _BERT | _with_tensors(family) | paths
        self._parts = [_split(paths[name]) for name in LayerParts._fields]
        self._attention = _split(paths["attention"])
        self._containers = [_split(path) for path in containers]
        self._head_dim, self._window = head_dim, window
        self.distances, self.rotary = distances, rotary
        own = (head_dim,) if window is None else (head_dim, window)
        self.attributes = ("training", "p", "eps", "variance_epsilon", *own)
        """What is read of modules but for their tensors."""

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


# What layers as in Llama (EuroBERT's, NomicBERT's and Jina's) have without tensors.
_LLAMA: dict[str, str | None] = {
    "attention": "self_attn",
    "rate": "self_attn.attention_dropout",
    "attention_dropout": None,
    "ffn_activation": "mlp.act_fn",
    "ffn_dropout": None,
}
_NOMIC = _LLAMA | {
    "attention_dropout": "post_attention_dropout",
    "ffn_dropout": "post_mlp_dropout",
}
_NOMIC_FAMILY = replace(
    families.NOMIC_BERT,
    layer={
        **families.EUROBERT.layer,
        "attention.output.LayerNorm": "post_attention_layernorm",
        "output.LayerNorm": "post_mlp_layernorm",
    },
)
"""NomicBERT as transformers names its modules; its files have other names."""

BERT = LayerAdapter(families.BERT, {}, _CONTAINERS)
"""Layers of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE and RoCBert."""
DEBERTA = LayerAdapter(families.DEBERTA_V2, {}, _CONTAINERS, distances=DisentangledDistances())
"""Layers of DeBERTa-v2 and v3."""
MPNET = LayerAdapter(
    families.MPNET,
    {
        "attention": "attention.attn",
        "rate": "attention.attn.dropout",
        "attention_dropout": "attention.dropout",
    },
    ("attention", "attention.attn", "attention.attn.dropout", "intermediate", "output"),
    distances=T5Distances(),
)
DISTILBERT = LayerAdapter(
    families.BERT,
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
    families.ALBERT,
    {
        "attention": "attention",
        "rate": "attention.attention_dropout",
        "attention_dropout": "attention.output_dropout",
        "ffn_activation": "activation",
        "ffn_dropout": None,
    },
    ("attention", "attention.attention_dropout"),
)
ESM = LayerAdapter(
    families.ESM,
    {"ffn_activation": None},
    ("attention", "attention.self", "attention.output", "intermediate", "output"),
    rotary=_esm_rotary,
)
EUROBERT = LayerAdapter(
    families.EUROBERT, _LLAMA, ("self_attn", "mlp"), head_dim="head_dim", rotary=_rotary
)
JINA = LayerAdapter(
    _NOMIC_FAMILY,
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
NOMIC = LayerAdapter(
    _NOMIC_FAMILY, _NOMIC, ("self_attn", "mlp"), head_dim="head_dim", rotary=_rotary
)
MODERNBERT = LayerAdapter(
    families.MODERNBERT,
    {
        "attention": "attn",
        "rate": "attn.attention_dropout",
        "attention_dropout": "attn.out_drop",
        "ffn_activation": "mlp.act",
        "ffn_inner_dropout": "mlp.drop",
        "ffn_dropout": None,
    },
    ("attn", "mlp"),
    head_dim="head_dim",
    rotary=_modernbert_rotary,
    window="sliding_window",
)
PRE_LAYER_NORM = LayerAdapter(
    families.BERT,
    {
        "first_norm": "attention.LayerNorm",
        "attention_norm": "intermediate.LayerNorm",
        "ffn_norm": None,
    },
    _CONTAINERS,
)
"""Layers of RoBERTa-PreLayerNorm."""
XLM_ROBERTA_XL = LayerAdapter(
    families.BERT,
    {
        "first_norm": "attention.self_attn_layer_norm",
        "attention_norm": "LayerNorm",
        "ffn_dropout": None,
        "ffn_norm": None,
    },
    _CONTAINERS,
)
