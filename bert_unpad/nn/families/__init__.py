"""The table of families: how Hugging Face stores each kind of model that the encoder can be.

A further family is a further row: which of its config.json's fields is which of `EncoderConfig`,
and how its tensors are named. The parts themselves are in `bert_unpad.nn`.
"""

from typing import Any

from bert_unpad.nn.families.bert_like import ALBERT, BERT, ELECTRA, ROBERTA
from bert_unpad.nn.families.family import OWN, Family
from bert_unpad.nn.families.relative import DEBERTA_V2, MPNET
from bert_unpad.nn.families.rotary import ESM, EUROBERT, MODERNBERT, NOMIC_BERT

__all__ = ["FAMILIES", "OWN", "PRESETS", "Family", "find_family"]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(BERT, ROBERTA, ALBERT, ELECTRA, MODERNBERT, EUROBERT, NOMIC_BERT, ESM),
        *(MPNET, DEBERTA_V2),
    )
}
"""The families by `model_type`."""


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


_ESM2 = {
    "vocab_size": 33,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 1,
    "mask_token_id": 32,
    "token_dropout": True,
    "position_embedding_type": "rotary",
    "emb_layer_norm_before": False,
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
    "modernbert-base": _preset("modernbert", **_sizes(22, 768, 12, 1152)),
    "modernbert-large": _preset("modernbert", **_sizes(28, 1024, 16, 2624)),
    "eurobert-210m": _preset(
        "eurobert",
        **_sizes(12, 768, 12, 3072, num_key_value_heads=12, rope_theta=250_000.0),
    ),
    "nomic-bert-base": _preset("nomic_bert", **_sizes(12, 768, 12, 3072)),
    "esm2-8m": _preset(
        "esm",
        **_sizes(6, 320, 20, 1280, layer_norm_eps=1e-5, hidden_dropout_prob=0.0),
        **_ESM2,
    ),
    "esm2-35m": _preset(
        "esm",
        **_sizes(12, 480, 20, 1920, layer_norm_eps=1e-5, hidden_dropout_prob=0.0),
        **_ESM2,
    ),
    "mpnet-base": _preset(
        "mpnet", **_sizes(12, 768, 12, 3072, layer_norm_eps=1e-5), max_position_embeddings=514
    ),
    "deberta-v3-base": _preset(
        "deberta-v2",
        **_sizes(12, 768, 12, 3072),
        relative_attention=True,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
        position_buckets=256,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
}
"""Arguments of `EncoderConfig` for named models: those that their authors have published."""
