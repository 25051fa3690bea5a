"""Families whose layers are BERT's: post-norm, learned positions, biases everywhere."""

from typing import Any

from bert_unpad.nn.families.family import Family, same

QKV = {
    "attention.self.qkv": (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
    )
}
_WORDS = "{}.embeddings.word_embeddings.weight"

SIZES = same(
    vocab_size=30522,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=3072,
    hidden_act="gelu",
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
    max_position_embeddings=512,
    type_vocab_size=2,
    initializer_range=0.02,
    layer_norm_eps=1e-12,
    pad_token_id=0,
)
REQUIRED = {"position_embedding_type": "absolute", "tie_word_embeddings": True}

BERT = Family(
    model_type="bert",
    architectures={"BertForPreTraining": ("mlm", "nsp"), "BertForMaskedLM": ("mlm",)},
    fields=SIZES,
    required=REQUIRED,
    layer=QKV,
    tied={
        "cls.predictions.decoder.weight": _WORDS.format("bert"),
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)


def _read_roberta(values: dict[str, Any]) -> dict[str, Any]:
    pad = values.get("pad_token_id", 1)
    if not isinstance(pad, int):
        raise ValueError(f"pad_token_id: expected an integer, got {pad!r}")
    return {"position_offset": pad + 1}


ROBERTA = Family(
    model_type="roberta",
    architectures={"RobertaForMaskedLM": ("mlm",)},
    fields=SIZES | same(vocab_size=50265, pad_token_id=1),
    parts={"head_act": "gelu"},
    required=REQUIRED,
    read_more=_read_roberta,
    trunk="roberta",
    layer=QKV,
    modules={
        "cls.predictions": "lm_head",
        "cls.predictions.transform.dense": "lm_head.dense",
        "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    },
    tied={
        "lm_head.decoder.weight": _WORDS.format("roberta"),
        "lm_head.decoder.bias": "lm_head.bias",
    },
)


def _read_electra(values: dict[str, Any]) -> dict[str, Any]:
    width = values.pop("embedding_size", 128)
    return {"embedding_size": None if width == values.get("hidden_size", 256) else width}


ELECTRA = Family(
    model_type="electra",
    architectures={"ElectraForPreTraining": ("rtd",), "ElectraForMaskedLM": ("mlm",)},
    fields=SIZES | same(hidden_size=256, num_attention_heads=4, intermediate_size=1024),
    parts={"head_act": "gelu"},
    required=REQUIRED,
    read_more=_read_electra,
    write_more=lambda config: {"embedding_size": config.embedding_width},
    trunk="electra",
    layer=QKV,
    modules={
        "bert.embeddings.projection": "electra.embeddings_project",
        "cls.predictions": "generator_lm_head",
        "cls.predictions.transform.dense": "generator_predictions.dense",
        "cls.predictions.transform.LayerNorm": "generator_predictions.LayerNorm",
        "cls.detector.dense": "discriminator_predictions.dense",
        "cls.detector.dense_prediction": "discriminator_predictions.dense_prediction",
    },
    tied={"generator_lm_head.weight": _WORDS.format("electra")},
)

ALBERT = Family(
    model_type="albert",
    architectures={"AlbertForPreTraining": ("mlm", "nsp"), "AlbertForMaskedLM": ("mlm",)},
    fields=SIZES
    | same(
        vocab_size=30000,
        embedding_size=128,
        hidden_size=4096,
        num_attention_heads=64,
        intermediate_size=16384,
        num_hidden_groups=1,
        inner_group_num=1,
        hidden_act="gelu_new",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.1,
    ),
    parts={"feed_forward_dropout_prob": 0.0},
    required=REQUIRED,
    trunk="albert",
    layer_prefix="{trunk}.encoder.albert_layer_groups.{group}.albert_layers.{layer}",
    layer={
        "attention.self.qkv": ("attention.query", "attention.key", "attention.value"),
        "attention.output.dense": "attention.dense",
        "attention.output.LayerNorm": "attention.LayerNorm",
        "intermediate.dense": "ffn",
        "output.dense": "ffn_output",
        "output.LayerNorm": "full_layer_layer_norm",
    },
    modules={
        "bert.embeddings.projection": "albert.encoder.embedding_hidden_mapping_in",
        "bert.pooler.dense": "albert.pooler",
        "cls.predictions": "predictions",
        "cls.predictions.transform.dense": "predictions.dense",
        "cls.predictions.transform.LayerNorm": "predictions.LayerNorm",
        "cls.seq_relationship": "sop_classifier.classifier",
    },
    tied={
        "predictions.decoder.weight": _WORDS.format("albert"),
        "predictions.decoder.bias": "predictions.bias",
    },
)
