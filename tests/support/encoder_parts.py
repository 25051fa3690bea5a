"""Small encoders of random parts."""

import random
from typing import Any

from bert_unpad.nn import EncoderConfig

_PARTS: dict[str, list[Any]] = {
    "hidden_size": [32, 48],
    "num_attention_heads": [2, 4],
    "num_key_value_heads": [None, 2, 1],
    "attention_head_size": [None, 8, 12],
    "num_hidden_layers": [2, 4],
    "embedding_size": [None, 16, 32],
    "heads": [("mlm",), ("mlm", "nsp"), ("mlm", "nsp", "rtd")],
    "norm": ["layer_norm", "rms_norm"],
    "norm_bias": [False, True],
    "norm_place": ["post", "pre"],
    "first_norm": [False, True],
    "embedding_norm": [False, True],
    "learned_positions": [False, True],
    "position_offset": [0, 3],
    "relative_positions": ["none", "rotary", "bias", "disentangled"],
    "relative_buckets": [0, 4, 8],
    "max_relative_positions": [6, 20],
    "relative_terms": [(), ("c2p",), ("p2c",), ("c2p", "p2c")],
    "relative_projections": ["shared", "own"],
    "relative_norm": [False, True],
    "window_pattern": [(-1,), (-1, 3), (2, -1, 4), (0, 5)],
    "local_rotary_theta": [None, 50.0],
    "rotary_factor": [1.0, 2.0],
    "attention_bias": [False, True],
    "feed_forward": ["mlp", "glu"],
    "hidden_act": ["gelu", "gelu_new", "silu", "relu"],
    "mlp_bias": [False, True],
    "head_act": [None, "gelu", "silu", "relu"],
    "mlm_transform": [False, True],
    "head_bias": [False, True],
    "decoder_bias": [False, True],
    "tie_word_embeddings": [False, True],
    "token_dropout": [False, True],
    "mask_token_id": [4],
    "num_hidden_groups": [None, 1, 2],
    "inner_group_num": [1, 2],
    "type_vocab_size": [0, 1, 2],
    "hidden_dropout_prob": [0.0, 0.2],
    "embedding_dropout_prob": [None, 0.0],
    "attention_output_dropout_prob": [None, 0.1],
    "classifier_dropout_prob": [0.0, 0.1],
}


def random_parts(draw: random.Random, **given: Any) -> EncoderConfig:
    """A configuration of random parts that go together, with the given ones."""
    while True:
        parts = {name: draw.choice(values) for name, values in _PARTS.items()} | given
        try:
            return EncoderConfig(
                **parts,
                model_type="bert_unpad",
                vocab_size=61,
                intermediate_size=48,
                max_position_embeddings=32,
                initializer_range=0.2,
            )
        except ValueError:
            continue
