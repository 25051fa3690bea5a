"""Families with rotary positions: ModernBERT, EuroBERT, Nomic's BERT and ESM-2."""

from typing import Any

from bert_unpad.nn.families.bert_like import QKV, SIZES
from bert_unpad.nn.families.family import Family, same
from bert_unpad.nn.families.rope import read_rope, read_ropes, write_rope

_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_WINDOWED, _GLOBAL = "sliding_attention", "full_attention"
_THETAS = {_GLOBAL: 160_000.0, _WINDOWED: 10_000.0}
_OLDER_THETAS = {_GLOBAL: "global_rope_theta", _WINDOWED: "local_rope_theta"}


def _read_modernbert(values: dict[str, Any]) -> dict[str, Any]:
    layers = values.get("num_hidden_layers", 22)
    every, reach = values.pop("global_attn_every_n_layers", 3), values.pop("local_attention", 128)
    if (half := values.pop("sliding_window", None)) is not None:
        reach = 2 * half
    for name, number in (("local_attention", reach), ("global_attn_every_n_layers", every)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name}: expected an integer of 1 or more, got {number!r}")
    types = values.pop("layer_types", None)
    if types is None:
        types = [_GLOBAL, *[_WINDOWED] * (every - 1)]
    elif len(types) != layers or set(types) - {_GLOBAL, _WINDOWED}:
        raise ValueError(
            f"layer_types: expected {_GLOBAL} or {_WINDOWED} for each of {layers} layers, got "
            f"{types!r}"
        )
    thetas = read_ropes(values, _THETAS, _OLDER_THETAS)
    return {
        "window_pattern": _period([reach // 2 if kind == _WINDOWED else -1 for kind in types]),
        "rotary_theta": thetas[_GLOBAL],
        "local_rotary_theta": thetas[_WINDOWED],
    }


def _period(windows: list[int]) -> tuple[int, ...]:
    """The shortest beginning of a list whose repetition the list is."""
    for length in range(1, len(windows)):
        if all(window == windows[i % length] for i, window in enumerate(windows)):
            return tuple(windows[:length])
    return tuple(windows)


def _write_modernbert(config: Any) -> dict[str, Any]:
    windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
    return {
        "layer_types": [_GLOBAL if window < 0 else _WINDOWED for window in windows],
        "local_attention": 2 * max(windows) if max(windows) >= 0 else 128,
        "rope_parameters": {
            _GLOBAL: write_rope(config.rotary_theta),
            _WINDOWED: write_rope(config.local_theta),
        },
    }


MODERNBERT = Family(
    model_type="modernbert",
    architectures={"ModernBertForMaskedLM": ("mlm",)},
    fields=same(
        vocab_size=50368,
        hidden_size=768,
        num_hidden_layers=22,
        num_attention_heads=12,
        intermediate_size=1152,
        max_position_embeddings=8192,
        initializer_range=0.02,
        pad_token_id=50283,
        norm_bias=False,
        attention_bias=False,
        mlp_bias=False,
        decoder_bias=True,
    )
    | {
        "hidden_act": ("hidden_activation", "gelu"),
        "layer_norm_eps": ("norm_eps", 1e-5),
        "attention_probs_dropout_prob": ("attention_dropout", 0.0),
        "embedding_dropout_prob": ("embedding_dropout", 0.0),
        "initializer_cutoff_factor": ("initializer_cutoff_factor", 2.0),
        "head_act": ("classifier_activation", "gelu"),
        "head_bias": ("classifier_bias", False),
    },
    parts={
        "hidden_dropout_prob": 0.0,
        "type_vocab_size": 0,
        "learned_positions": False,
        "relative_positions": "rotary",
        "norm_place": "pre",
        "feed_forward": "glu",
        "scaled_initializer": True,
    },
    rates={"attention_output_dropout_prob": "attention_probs_dropout_prob"},
    required={"mlp_dropout": 0.0, "tie_word_embeddings": True},
    read_more=_read_modernbert,
    write_more=_write_modernbert,
    trunk="model",
    layer_prefix="model.layers.{i}",
    attention_norm="attn_norm",
    layer={
        "attention.self.qkv": "attn.Wqkv",
        "attention.output.dense": "attn.Wo",
        "attention.output.LayerNorm": "mlp_norm",
        "intermediate.dense": "mlp.Wi",
        "output.dense": "mlp.Wo",
    },
    final_norm="model.final_norm",
    modules={
        "bert.embeddings.word_embeddings": "model.embeddings.tok_embeddings",
        "bert.embeddings.LayerNorm": "model.embeddings.norm",
        "cls.predictions": "decoder",
        "cls.predictions.transform.dense": "head.dense",
        "cls.predictions.transform.LayerNorm": "head.norm",
    },
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
)


def _read_eurobert(values: dict[str, Any]) -> dict[str, Any]:
    bias = values.get("mlp_bias", False)
    return read_rope(values, 10_000.0) | {"decoder_bias": bias}


EUROBERT = Family(
    model_type="eurobert",
    architectures={"EuroBertForMaskedLM": ("mlm",)},
    fields=same(
        vocab_size=128256,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=None,
        intermediate_size=3072,
        hidden_act="silu",
        max_position_embeddings=8192,
        initializer_range=0.02,
        pad_token_id=128001,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
    )
    | {
        "attention_head_size": ("head_dim", None),
        "layer_norm_eps": ("rms_norm_eps", 1e-5),
        "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    },
    parts={
        "hidden_dropout_prob": 0.0,
        "type_vocab_size": 0,
        "learned_positions": False,
        "relative_positions": "rotary",
        "embedding_norm": False,
        "norm": "rms_norm",
        "norm_bias": False,
        "norm_place": "pre",
        "first_norm": True,
        "feed_forward": "glu",
        "mlm_transform": False,
    },
    read_more=_read_eurobert,
    write_more=lambda config: {
        "rope_parameters": write_rope(config.rotary_theta, config.rotary_factor)
    },
    trunk="model",
    layer_prefix="model.layers.{i}",
    attention_norm="input_layernorm",
    layer={
        "attention.self.qkv": _PROJECTIONS,
        "attention.output.dense": "self_attn.o_proj",
        "attention.output.LayerNorm": "post_attention_layernorm",
        "intermediate.dense": ("mlp.gate_proj", "mlp.up_proj"),
        "output.dense": "mlp.down_proj",
    },
    final_norm="model.norm",
    modules={
        "bert.embeddings.word_embeddings": "model.embed_tokens",
        "cls.predictions": "lm_head",
        "cls.predictions.decoder": "lm_head",
    },
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)

NOMIC_BERT = Family(
    model_type="nomic_bert",
    architectures={"NomicBertForMaskedLM": ("mlm",)},
    fields=SIZES
    | same(
        vocab_size=30528,
        hidden_act="silu",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=2048,
    )
    | {"attention_head_size": ("head_dim", None)},
    parts={
        "learned_positions": False,
        "relative_positions": "rotary",
        "feed_forward": "glu",
        "attention_bias": False,
        "mlp_bias": False,
    },
    required={"tie_word_embeddings": True},
    read_more=lambda values: read_rope(values, 1000.0),
    write_more=lambda config: {
        "rope_parameters": write_rope(config.rotary_theta, config.rotary_factor)
    },
    trunk="nomic_bert",
    layer_prefix="nomic_bert.encoder.layers.{i}",
    layer={
        "attention.self.qkv": "attn.Wqkv",
        "attention.output.dense": "attn.out_proj",
        "attention.output.LayerNorm": "norm1",
        "intermediate.dense": ("mlp.fc12", "mlp.fc11"),
        "output.dense": "mlp.fc2",
        "output.LayerNorm": "norm2",
    },
    modules={
        "bert.embeddings.LayerNorm": "nomic_bert.emb_ln",
        "cls.predictions.transform.LayerNorm": "cls.predictions.transform.layer_norm",
    },
    tied={
        "cls.predictions.decoder.weight": "nomic_bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)


def _read_esm(values: dict[str, Any]) -> dict[str, Any]:
    kind = values.pop("position_embedding_type", "absolute")
    if kind not in ("absolute", "rotary"):
        raise ValueError(f"position_embedding_type: expected absolute or rotary, got {kind!r}")
    pad = values.get("pad_token_id") if kind == "absolute" else -1
    if not isinstance(pad, int):
        raise ValueError(f"pad_token_id: expected an integer, got {pad!r}")
    return {
        "learned_positions": kind == "absolute",
        "position_offset": pad + 1,
        "relative_positions": "rotary" if kind == "rotary" else "none",
        "embedding_norm": bool(values.pop("emb_layer_norm_before", None)),
        "token_dropout": bool(values.pop("token_dropout", None)),
    }


def _write_esm(config: Any) -> dict[str, Any]:
    return {
        "position_embedding_type": "absolute" if config.learned_positions else "rotary",
        "emb_layer_norm_before": config.embedding_norm,
        "token_dropout": config.token_dropout,
    }


ESM = Family(
    model_type="esm",
    architectures={"EsmForMaskedLM": ("mlm",)},
    fields=same(
        vocab_size=None,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        max_position_embeddings=1026,
        initializer_range=0.02,
        layer_norm_eps=1e-12,
        pad_token_id=None,
        mask_token_id=None,
    )
    | {"rotary_theta": ("rope_theta", 10_000.0)},
    parts={
        "embedding_dropout_prob": 0.0,
        "type_vocab_size": 0,
        "norm_place": "pre",
        "first_norm": True,
    },
    required={"tie_word_embeddings": True, "is_folding_model": False},
    read_more=_read_esm,
    write_more=_write_esm,
    trunk="esm",
    attention_norm="attention.LayerNorm",
    layer={
        **QKV,
        "attention.output.LayerNorm": "LayerNorm",
    },
    final_norm="esm.encoder.emb_layer_norm_after",
    modules={
        "bert.embeddings.LayerNorm": "esm.embeddings.layer_norm",
        "cls.predictions": "lm_head",
        "cls.predictions.transform.dense": "lm_head.dense",
        "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    },
    tied={"lm_head.decoder.weight": "esm.embeddings.word_embeddings.weight"},
    # Of the head that predicts contacts from attention weights, what follows from rope_theta, and
    # what published files of models with rotary positions still hold.
    unused=(
        r"esm\.contact_head\..*",
        r"esm\..*rotary_embeddings\.inv_freq",
        r"esm\.embeddings\.position_embeddings\.weight",
    ),
)
