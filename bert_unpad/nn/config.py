"""The configuration of an encoder: its sizes, and the parts that it is made of.

Sizes have Hugging Face's names, and config.json is read and written in Hugging Face's form: the
row of a model's family (`bert_unpad.nn.families`) says which of its fields is which of ours. Fields
that no model here reads are kept and written back. A value that would need another model is an
error: a checkpoint must never load into a model that computes something else.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from bert_unpad._files import read_json_object, replacing
from bert_unpad.nn.families import OWN, PRESETS, Family, find_family

__all__ = ["PRESETS", "BertConfig", "EncoderConfig", "Head"]

Head = Literal["mlm", "nsp", "rtd"]
"""What a model predicts: masked tokens, a relation of two sentences, which tokens are replaced."""

# The `approximate` argument of GELU for each name of it.
_GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}

# Far above any model in use; they stop a damaged file from asking for absurd amounts of memory.
_MAX_SIZE = 2**24
_MAX_LAYERS = 1024

# Tensor cores need the vocabulary dimension in steps of 16 bytes: 8 numbers in bf16 or fp16.
_VOCAB_MULTIPLE = 8


@dataclass
class EncoderConfig:
    """Sizes, rates and parts of an encoder; by default those of BERT-base (arXiv:1810.04805).

    `EncoderConfig(**PRESETS["albert-base"])` is another model. A `model_type` fixes the parts of
    its family; `model_type="bert_unpad"` takes any, but transformers cannot read what it saves.

    Raises:
        ValueError: a size is not positive or absurdly large, sizes do not fit one another, a
            probability lies outside [0, 1), a name is unknown, or a part or a value in `extra` is
            not one of the family's. The message names the field.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    """Activation: gelu (exact, with erf), or gelu_new, also named gelu_pytorch_tanh (tanh)."""
    hidden_dropout_prob: float = 0.1
    """Dropout of the embeddings and of what attention and feed-forward add, where none of the rates
    below is given."""
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json that the model does not read; `to_dict` writes them back."""
    model_type: str = "bert"
    """The family, by Hugging Face's name, or bert_unpad."""
    heads: tuple[Head, ...] = ("mlm", "nsp")
    """What is on top: mlm (masked tokens), nsp (next sentence, or sentence order: the labels
    decide), rtd (replaced tokens, ELECTRA's discriminator)."""
    embedding_size: int | None = None
    """Width of the embeddings, where a linear layer leads from it to hidden_size (factorised
    embeddings, arXiv:1909.11942). None: embeddings of hidden_size without one."""
    embedding_dropout_prob: float | None = None
    """Dropout of the embeddings. None: hidden_dropout_prob."""
    attention_output_dropout_prob: float | None = None
    """Dropout of what attention adds. None: hidden_dropout_prob."""
    feed_forward_dropout_prob: float | None = None
    """Dropout of what the feed-forward half adds. None: hidden_dropout_prob."""
    classifier_dropout_prob: float = 0.0
    """Dropout of the pooled first token, before the nsp head."""
    position_offset: int = 0
    """Row of the position embedding that a sequence's first token gets."""
    num_hidden_groups: int | None = None
    """Groups of layers that share their weights (arXiv:1909.11942): num_hidden_layers passes are
    divided among so many groups. None: no layer shares."""
    inner_group_num: int = 1
    """Layers of a group, which each pass runs one after another."""
    head_act: str | None = None
    """Activation of the mlm head, one of hidden_act's. None: hidden_act."""

    def __post_init__(self) -> None:
        self.heads = tuple(self.heads)
        self._check_numbers()
        self._check_choices()
        self.family.check_extra(self.extra)
        if self.family is not OWN:
            self.family.check_parts(self)

    def _check_numbers(self) -> None:
        for name, least, most in (
            ("vocab_size", 1, _MAX_SIZE),
            ("hidden_size", 1, _MAX_SIZE),
            ("num_hidden_layers", 1, _MAX_LAYERS),
            ("num_attention_heads", 1, _MAX_SIZE),
            ("intermediate_size", 1, _MAX_SIZE),
            ("max_position_embeddings", 1, _MAX_SIZE),
            ("type_vocab_size", 1, _MAX_SIZE),
            ("embedding_size", 1, _MAX_SIZE),
            ("position_offset", 0, _MAX_SIZE),
            ("num_hidden_groups", 1, _MAX_LAYERS),
            ("inner_group_num", 1, _MAX_LAYERS),
        ):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(
                    f"{name}: expected an integer from {least} to {most}, got {value!r}"
                )
        for name in _RATES:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not _is_finite(value) or not 0 <= value < 1:
                raise ValueError(f"{name}: expected a number in [0, 1), got {value!r}")
        for name in ("initializer_range", "layer_norm_eps"):
            value = getattr(self, name)
            if not _is_finite(value) or not value > 0:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
        for name, part, whole in (
            ("hidden_size", self.hidden_size, "num_attention_heads"),
            ("num_hidden_layers", self.num_hidden_layers, "num_hidden_groups"),
        ):
            divisor = getattr(self, whole)
            if divisor is not None and part % divisor:
                raise ValueError(f"{name}: expected a multiple of {whole} = {divisor}, got {part}")
        if self.position_offset >= self.max_position_embeddings:
            raise ValueError(
                f"max_position_embeddings: expected more than position_offset = "
                f"{self.position_offset}, got {self.max_position_embeddings}"
            )

    def _check_choices(self) -> None:
        for name in ("hidden_act", "head_act"):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, str) or value not in _GELU:
                raise ValueError(
                    f"{name}: expected one of {', '.join(sorted(_GELU))}, got {value!r}"
                )
        known = get_args(Head)
        if not self.heads or len(set(self.heads)) < len(self.heads) or set(self.heads) - {*known}:
            raise ValueError(
                f"heads: expected one or more of {', '.join(known)}, got {self.heads!r}"
            )

    @property
    def family(self) -> Family:
        """The row of the family's table."""
        return find_family(self.model_type)

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def embedding_width(self) -> int:
        """The width of the embeddings: embedding_size, or hidden_size."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def gelu_approximate(self) -> str:
        """PyTorch's name for the GELU variant of hidden_act: "none" or "tanh"."""
        return _GELU[self.hidden_act]

    @property
    def head_gelu_approximate(self) -> str:
        """PyTorch's name for the GELU variant of the mlm head."""
        return _GELU[self.head_act or self.hidden_act]

    @property
    def padded_vocab_size(self) -> int:
        """The number of rows of the word embedding: vocab_size rounded up to a multiple of 8."""
        return -(-self.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence."""
        return self.max_position_embeddings - self.position_offset

    @property
    def layer_order(self) -> tuple[int, ...]:
        """For each layer that a token passes through, the number of the weights that it has."""
        if self.num_hidden_groups is None:
            return tuple(range(self.num_hidden_layers))
        passes, inner = self.num_hidden_layers // self.num_hidden_groups, self.inner_group_num
        return tuple(
            group * inner + layer
            for group in range(self.num_hidden_groups)
            for _ in range(passes)
            for layer in range(inner)
        )

    def rate(self, name: str) -> float:
        """The dropout rate `name`, which is hidden_dropout_prob where it is not given."""
        value = getattr(self, name)
        return self.hidden_dropout_prob if value is None else value

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything within the embeddings and layers."""
        return any(self.rate(name) for name in _RATES if name != "classifier_dropout_prob")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EncoderConfig:
        """Makes a configuration from the contents of a config.json; unknown names go to `extra`.

        Raises:
            ValueError: it is not a configuration that this model supports; the message names the
                field of config.json.
        """
        model_type = values.get("model_type", "bert")
        family = find_family(model_type)
        if family is OWN:
            names = {f.name for f in dataclasses.fields(cls)}
            own = {name: value for name, value in values.items() if name in names}
            unread = {name: value for name, value in values.items() if name not in names}
            return cls(**own | {"extra": unread})
        own, unread = family.read(values)
        try:
            return cls(**own, model_type=model_type, extra=unread)
        except ValueError as error:
            name, colon, message = str(error).partition(": ")
            raise ValueError(f"{family.fields.get(name, (name,))[0]}{colon}{message}") from error

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of a config.json for Hugging Face: all fields, and `extra`."""
        if self.family is OWN:
            values = dataclasses.asdict(self)
            return values.pop("extra") | values
        return {"model_type": self.model_type} | self.extra | self.family.write(self)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> EncoderConfig:
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


BertConfig = EncoderConfig
"""Without arguments the configuration of BERT-base."""

_OPTIONAL = {f.name for f in dataclasses.fields(EncoderConfig) if f.default is None}
_RATES = [f.name for f in dataclasses.fields(EncoderConfig) if f.name.endswith("dropout_prob")]


def _is_finite(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max
