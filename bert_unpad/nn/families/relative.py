"""Families whose attention knows distances: MPNet (as T5) and DeBERTa-v2 (disentangled)."""

from typing import Any

from bert_unpad.nn.families.bert_like import REQUIRED, SIZES
from bert_unpad.nn.families.family import Family, same

MPNET = Family(
    model_type="mpnet",
    architectures={"MPNetForMaskedLM": ("mlm",)},
    fields={name: value for name, value in SIZES.items() if name != "type_vocab_size"}
    | same(vocab_size=30527, pad_token_id=1),
    parts={
        "head_act": "gelu",
        "type_vocab_size": 0,
        "relative_positions": "bias",
        "relative_buckets": 32,
        "max_relative_positions": 128,
        "position_offset": 2,  # whatever pad_token_id is
    },
    # transformers computes buckets for 32, whatever the size of the table.
    required=REQUIRED | {"relative_attention_num_buckets": 32},
    trunk="mpnet",
    layer={
        "attention.self.qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        "attention.output.dense": "attention.attn.o",
        "attention.output.LayerNorm": "attention.LayerNorm",
    },
    modules={
        "cls.predictions": "lm_head",
        "cls.predictions.transform.dense": "lm_head.dense",
        "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    },
    tied={
        "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
)


def _read_deberta(values: dict[str, Any]) -> dict[str, Any]:
    for name, default in (("conv_kernel_size", 0), ("embedding_size", None)):
        allowed = (default, values.get("hidden_size", 1536)) if default is None else (default,)
        if values.get(name, default) not in allowed:
            raise ValueError(f"{name}: expected {allowed[-1]}, got {values[name]!r}")
    found = {
        "learned_positions": bool(values.pop("position_biased_input", True)),
        "relative_positions": "disentangled",
    }
    terms = values.pop("pos_att_type", None) or []
    terms = [x.strip() for x in terms.lower().split("|")] if isinstance(terms, str) else terms
    if not isinstance(terms, list) or not all(isinstance(x, str) for x in terms):
        raise ValueError(f"pos_att_type: expected a list of strings, got {terms!r}")
    relative = values.pop("relative_attention", False)
    most, buckets = values.pop("max_relative_positions", -1), values.pop("position_buckets", -1)
    norm = values.pop("norm_rel_ebd", "none")
    shared = values.pop("share_att_key", False)
    if bool(relative) != bool(terms) or {*terms} - {"c2p", "p2c"}:
        raise ValueError(
            f"pos_att_type: expected c2p, p2c or both with relative_attention, else none, got "
            f"{terms!r}"
        )
    if norm not in ("none", "layer_norm"):
        raise ValueError(f"norm_rel_ebd: expected none or layer_norm, got {norm!r}")
    if not relative:
        return found | {"relative_positions": "none"}
    return found | {
        "relative_terms": tuple(terms),
        "max_relative_positions": most if most > 0 else values.get("max_position_embeddings", 512),
        "relative_buckets": max(buckets, 0),
        "relative_norm": norm == "layer_norm",
        "relative_projections": "shared" if shared else "own",
    }


def _write_deberta(config: Any) -> dict[str, Any]:
    found = {
        "position_biased_input": config.learned_positions,
        "relative_attention": config.relative_positions == "disentangled",
        "pos_att_type": list(config.relative_terms) or None,
    }
    if not config.relative_terms:
        return found
    return found | {
        # -1, as published models have it, stands for max_position_embeddings.
        "max_relative_positions": -1
        if config.max_relative_positions == config.max_position_embeddings
        else config.max_relative_positions,
        "position_buckets": config.relative_buckets or -1,
        "norm_rel_ebd": "layer_norm" if config.relative_norm else "none",
        "share_att_key": config.relative_projections == "shared",
    }


DEBERTA_V2 = Family(
    model_type="deberta-v2",
    architectures={"DebertaV2ForMaskedLM": ("mlm",)},
    fields=SIZES
    | same(
        vocab_size=128100,
        hidden_size=1536,
        num_hidden_layers=24,
        num_attention_heads=24,
        intermediate_size=6144,
        type_vocab_size=0,
        layer_norm_eps=1e-7,
    ),
    required={"tie_word_embeddings": True, "legacy": True},
    read_more=_read_deberta,
    write_more=_write_deberta,
    trunk="deberta",
    layer={
        "attention.self.qkv": (
            "attention.self.query_proj",
            "attention.self.key_proj",
            "attention.self.value_proj",
        ),
        "attention.self.relative.pos_key_proj": "attention.self.pos_key_proj",
        "attention.self.relative.pos_query_proj": "attention.self.pos_query_proj",
    },
    modules={"bert.encoder.rel_embeddings.LayerNorm": "deberta.encoder.LayerNorm"},
    tied={
        "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)
