"""What `EncoderConfig` refuses: a ValueError "name: expected X, got Y"."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

if TYPE_CHECKING:
    from bert_unpad.nn.config import EncoderConfig

GELU: dict[str, Literal["none", "tanh"]] = {
    "gelu": "none",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
"""The `approximate` argument of GELU for each name of it."""
_GATES = ("silu", "relu")  # that a GLU and the mlm head take besides

# Far above any model in use; they stop a damaged file from asking for absurd amounts of memory.
_MAX_SIZE = 2**24
_MAX_LAYERS = 1024

_INTEGERS = (
    *((name, 1, _MAX_SIZE) for name in ("vocab_size", "hidden_size", "num_attention_heads")),
    *((name, 1, _MAX_SIZE) for name in ("intermediate_size", "max_position_embeddings")),
    *((name, 1, _MAX_SIZE) for name in ("embedding_size", "num_key_value_heads")),
    *((name, 1, _MAX_SIZE) for name in ("attention_head_size", "max_relative_positions")),
    *((name, 0, _MAX_SIZE) for name in ("type_vocab_size", "position_offset", "mask_token_id")),
    ("relative_buckets", 0, _MAX_SIZE),
    *((name, 1, _MAX_LAYERS) for name in ("num_hidden_layers", "num_hidden_groups")),
    ("inner_group_num", 1, _MAX_LAYERS),
)
_ABOVE_ZERO = (
    *("initializer_range", "layer_norm_eps"),
    *("rotary_theta", "local_rotary_theta", "rotary_factor", "initializer_cutoff_factor"),
)
_MULTIPLES = (
    ("hidden_size", "num_attention_heads"),
    ("num_hidden_layers", "num_hidden_groups"),
    ("num_attention_heads", "num_key_value_heads"),
)


def check_config(config: EncoderConfig) -> None:
    """Raises a ValueError that names the first field which is wrong or does not fit another."""
    optional = {f.name for f in dataclasses.fields(config) if f.default is None}

    def given(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        values = ((name, getattr(config, name)) for name in names)
        return ((name, x) for name, x in values if not (x is None and name in optional))

    for name, least, most in _INTEGERS:
        for _, value in given([name]):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                _refuse(name, f"an integer from {least} to {most}", value)
    for name, value in given(config.RATES):
        if not _is_finite(value) or not 0 <= value < 1:
            _refuse(name, "a number in [0, 1)", value)
    for name, value in given(_ABOVE_ZERO):
        if not _is_finite(value) or not value > 0:
            _refuse(name, "a number above 0", value)
    for name, value in given([f.name for f in dataclasses.fields(config)]):
        known = _choices(config, name)
        if known and value not in known:
            _refuse(name, f"one of {', '.join(map(str, known))}", value)
    _check_lists(config)
    for name, whole in _MULTIPLES:
        value, divisor = getattr(config, name), getattr(config, whole)
        if name == "hidden_size" and config.attention_head_size is not None:
            continue
        if divisor is not None and value % divisor:
            _refuse(name, f"a multiple of {whole} = {divisor}", value)
    _check_parts(config)
    _check_relative_positions(config)


@cache
def _hints(kind: type) -> dict[str, object]:
    return get_type_hints(kind)


def _choices(config: EncoderConfig, name: str) -> Sequence[object]:
    """The values of a field that takes few; empty for others."""
    if name == "hidden_act":
        return [*GELU, *(_GATES if config.feed_forward == "glu" else ())]
    if name == "head_act":
        return [*GELU, *_GATES]
    hint = _hints(type(config))[name]  # type: ignore[arg-type]  # a class has a hash
    if hint is bool:
        return (True, False)
    values = get_args(hint)
    return values if values and all(isinstance(value, str) for value in values) else ()


def _check_lists(config: EncoderConfig) -> None:
    from bert_unpad.nn.config import Head

    heads, known = config.heads, get_args(Head)
    if not heads or any(x not in known for x in heads) or len({*heads}) < len(heads):
        _refuse("heads", f"one or more of {', '.join(known)}", heads)
    windows = config.window_pattern
    if not windows or any(type(window) is not int or window < -1 for window in windows):
        _refuse("window_pattern", "one or more integers of -1 or more", windows)
    terms = config.relative_terms
    if any(x not in ("c2p", "p2c") for x in terms) or len({*terms}) < len(terms):
        _refuse("relative_terms", "c2p, p2c, both or none", terms)


def _check_parts(config: EncoderConfig) -> None:
    if config.first_norm and config.norm_place == "post":
        _refuse("first_norm", "False with norm_place post", True)
    if config.norm_bias and config.norm == "rms_norm":
        _refuse("norm_bias", "False with norm rms_norm", True)
    if config.embedding_size is not None and not config.mlm_transform and "mlm" in config.heads:
        _refuse("mlm_transform", "True with embedding_size", False)
    offset = config.position_offset
    if offset and not config.learned_positions:
        _refuse("position_offset", "0 without learned_positions", offset)
    if offset >= config.max_position_embeddings:
        expected = f"more than position_offset = {offset}"
        _refuse("max_position_embeddings", expected, config.max_position_embeddings)
    if config.token_dropout and config.mask_token_id is None:
        _refuse("mask_token_id", "a token with token_dropout", None)
    dropout = config.rate("embedding_dropout_prob")
    fused = config.embedding_norm and config.norm == "layer_norm" and not config.token_dropout
    if dropout and not fused:
        expected = "0 without a LayerNorm of the embeddings or with token_dropout"
        _refuse("embedding_dropout_prob", expected, dropout)


def _check_relative_positions(config: EncoderConfig) -> None:
    kind, buckets = config.relative_positions, config.relative_buckets
    most = config.max_relative_positions
    if kind == "rotary" and config.head_dim % 2:
        _refuse("attention_head_size", "an even number with rotary positions", config.head_dim)
    if kind == "bias" and (buckets % 4 or not 4 <= buckets < 4 * most):
        expected = f"a multiple of 4 from 4 to less than 4 * max_relative_positions = {4 * most}"
        _refuse("relative_buckets", expected, buckets)
    if (kind == "disentangled") != bool(config.relative_terms):
        expected = "c2p, p2c or both with disentangled positions, else none"
        _refuse("relative_terms", expected, config.relative_terms)
    if kind != "disentangled":
        return
    if buckets and (buckets % 2 or not 4 <= buckets <= most):
        expected = f"0, or an even number from 4 to max_relative_positions = {most}"
        _refuse("relative_buckets", expected, buckets)
    if config.kv_heads != config.num_attention_heads:
        expected = "num_attention_heads with disentangled positions"
        _refuse("num_key_value_heads", expected, config.kv_heads)
    if not config.attention_bias:
        _refuse("attention_bias", "True with disentangled positions", False)


def _refuse(name: str, expected: str, got: object) -> None:
    raise ValueError(f"{name}: expected {expected}, got {got!r}")


def _is_finite(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max
