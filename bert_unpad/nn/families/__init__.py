"""The table of families: how Hugging Face stores each kind of model that the encoder can be.

A further family is a further row: which of its config.json's fields is which of `EncoderConfig`,
and how its tensors are named. The parts themselves are in `bert_unpad.nn`.
"""

from __future__ import annotations

from typing import Any

from bert_unpad.nn.families.bert_like import ALBERT, BERT, ELECTRA, ROBERTA
from bert_unpad.nn.families.family import OWN, Family

__all__ = ["FAMILIES", "OWN", "PRESETS", "Family", "find_family"]

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (BERT, ROBERTA, ALBERT, ELECTRA)
}
"""By `model_type`."""


def find_family(model_type: object) -> Family:
    """The row of a `model_type`.

    Raises:
        ValueError: there is none.
    """
    known = FAMILIES | {OWN.model_type: OWN}
    if not isinstance(model_type, str) or model_type not in known:
        raise ValueError(f"model_type: expected one of {', '.join(known)}, got {model_type!r}")
    return known[model_type]


def _preset(model_type: str, **values: Any) -> dict[str, Any]:
    """Arguments of `EncoderConfig` for a model with these fields in its config.json."""
    own, left = FAMILIES[model_type].read(values)
    if left:
        raise ValueError(f"{model_type}: expected known fields, got {', '.join(left)}")
    return own | {"model_type": model_type}


def _sizes(layers: int, hidden: int, heads: int, intermediate: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        **more,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "bert-base": _preset("bert", **_sizes(12, 768, 12, 3072)),
    "bert-large": _preset("bert", **_sizes(24, 1024, 16, 4096)),
    "roberta-base": _preset(
        "roberta",
        **_sizes(12, 768, 12, 3072, layer_norm_eps=1e-5),
        max_position_embeddings=514,
        type_vocab_size=1,
    ),
    "albert-base": _preset("albert", **_sizes(12, 768, 12, 3072)),
    "electra-small": _preset("electra", **_sizes(12, 256, 4, 1024)),
    "electra-base": _preset("electra", **_sizes(12, 768, 12, 3072, embedding_size=768)),
}
"""Arguments of `EncoderConfig` for named models: those that their authors have published."""
