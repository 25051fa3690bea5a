"""The model's configuration, with Hugging Face's names, so that their config.json works unchanged.

Fields that this model does not read are kept and written back. A value that would need another
model (relative positions, a decoder, another activation) is an error: a checkpoint must never load
into a model that computes something else.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from bert_unpad._files import read_json_object, replacing

PRESETS: dict[str, dict[str, int]] = {
    "bert-base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "bert-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
"""The sizes of named models (Devlin et al., 2019); their other fields have default values."""

# The `approximate` argument of GELU for each hidden_act.
_GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}

# Fields of Hugging Face's BertConfig for which this model supports only one value.
_REQUIRED = {
    "model_type": "bert",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "tie_word_embeddings": True,
}

# Far above any model in use; they stop a damaged file from asking for absurd amounts of memory.
_MAX_SIZE = 2**24
_MAX_LAYERS = 1024

# Tensor cores need the vocabulary dimension in steps of 16 bytes: 8 numbers in bf16 or fp16.
_VOCAB_MULTIPLE = 8


@dataclass
class BertConfig:
    """Sizes and rates of a BERT model (Devlin et al., 2019, arXiv:1810.04805); default: base.

    The fields have the names and defaults of Hugging Face's `BertConfig`.

    Raises:
        ValueError: a size is not positive or absurdly large, hidden_size is not a multiple of
            num_attention_heads, a probability lies outside [0, 1), hidden_act is not a GELU, or
            `extra` asks for something that this model does not support. The message names the
            field.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    """Activation: gelu (exact, with erf), or gelu_new, also named gelu_pytorch_tanh (tanh)."""
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json that the model does not read; `to_dict` writes them back."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "type_vocab_size",
        ):
            value = getattr(self, name)
            most = _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"{name}: expected an integer from 1 to {most}, got {value!r}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_attention_heads = "
                f"{self.num_attention_heads}, got {self.hidden_size}"
            )
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            value = getattr(self, name)
            if not _is_finite(value) or not 0 <= value < 1:
                raise ValueError(f"{name}: expected a number in [0, 1), got {value!r}")
        for name in ("initializer_range", "layer_norm_eps"):
            value = getattr(self, name)
            if not _is_finite(value) or not value > 0:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in _GELU:
            raise ValueError(
                f"hidden_act: expected one of {', '.join(sorted(_GELU))}, got {self.hidden_act!r}"
            )
        for name, value in _REQUIRED.items():
            if self.extra.get(name, value) != value:
                raise ValueError(f"{name}: expected {value!r}, got {self.extra[name]!r}")
        if pruned := self.extra.get("pruned_heads"):
            raise ValueError(f"pruned_heads: expected none, got {pruned!r}")

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def gelu_approximate(self) -> str:
        """PyTorch's name for the GELU variant of hidden_act: "none" or "tanh"."""
        return _GELU[self.hidden_act]

    @property
    def padded_vocab_size(self) -> int:
        """The number of rows of the word embedding: vocab_size rounded up to a multiple of 8."""
        return -(-self.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BertConfig:
        """Makes a configuration from the contents of a config.json; unknown names go to `extra`."""
        names = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        known = {name: value for name, value in values.items() if name in names}
        extra = {name: value for name, value in values.items() if name not in names}
        return cls(**known, extra=extra)

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of a config.json for Hugging Face: all fields, and `extra`."""
        values = dataclasses.asdict(self)
        return {"model_type": "bert"} | values.pop("extra") | values

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> BertConfig:
        """Reads a config.json.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not a JSON object, or not a configuration that this model supports;
                the message names the file.
        """
        values = read_json_object(path)
        try:
            return cls.from_dict(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes a config.json; the file appears whole or not at all."""
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _is_finite(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max
