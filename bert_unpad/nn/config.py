"""The configuration of an encoder: its sizes, and the parts that it is made of.

Sizes have Hugging Face's names, and config.json is read and written in Hugging Face's form: the
row of a model's family (`bert_unpad.nn.families`) says which of its fields is which of ours. Fields
that no model here reads are kept and written back. A value that would need another model is an
error: a checkpoint must never load into a model that computes something else.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from bert_unpad._files import read_json_object, replacing
from bert_unpad.nn.config_checks import GELU, check_config
from bert_unpad.nn.families import OWN, PRESETS, Family, find_family

__all__ = ["PRESETS", "BertConfig", "EncoderConfig", "Head"]

Head = Literal["mlm", "nsp", "rtd"]
"""What a model predicts: masked tokens, a relation of two sentences, which tokens are replaced."""

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
    initializer_cutoff_factor: float | None = None
    """Initial weights are at most so many standard deviations. None: any."""
    scaled_initializer: bool = False
    """Whether what each half of a layer adds begins smaller, and the mlm head's linear layer too: a
    standard deviation of initializer_range / sqrt(2 * num_hidden_layers)."""
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
    """Dropout of what attention adds. None: hidden_dropout_prob, or in a model of type modernbert
    attention_probs_dropout_prob."""
    feed_forward_dropout_prob: float | None = None
    """Dropout of what the feed-forward half adds. None: hidden_dropout_prob."""
    classifier_dropout_prob: float = 0.0
    """Dropout of the pooled first token, before the nsp head."""
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """LayerNorm (arXiv:1607.06450) or RMSNorm (arXiv:1910.07467)."""
    norm_bias: bool = True
    """Whether a LayerNorm has a bias; RMSNorm has none."""
    norm_place: Literal["post", "pre"] = "post"
    """post: after each half of a layer and its residual. pre: before each half, and once after the
    last layer (arXiv:2002.04745)."""
    first_norm: bool = False
    """With norm_place pre: whether there is a norm before the first layer's attention."""
    embedding_norm: bool = True
    """Whether the sum of the embeddings is normalised."""
    learned_positions: bool = True
    """Whether positions have an embedding."""
    position_offset: int = 0
    """Row of the position embedding that a sequence's first token gets."""
    relative_positions: Literal["none", "rotary", "bias", "disentangled"] = "none"
    """What attention knows of positions: nothing; rotary: queries and keys are rotated by them
    (arXiv:2104.09864); bias: a number for each bucket of distances and head is added to the scores
    (arXiv:1910.10683); disentangled: products with embeddings of distances (arXiv:2006.03654)."""
    relative_buckets: int = 0
    """Buckets of distances with bias. With disentangled there are twice as many; 0: one for each
    distance."""
    max_relative_positions: int = 128
    """With bias and disentangled, the distance from which on all are alike."""
    relative_terms: tuple[Literal["c2p", "p2c"], ...] = ()
    """With disentangled: content to position (c2p), position to content (p2c)."""
    relative_projections: Literal["shared", "own"] = "shared"
    """With disentangled: whether embeddings of distances are projected as queries and keys are."""
    relative_norm: bool = False
    """With disentangled: whether the embeddings of distances are normalised."""
    rotary_theta: float = 10000.0
    """Base of the angles of rotary positions."""
    local_rotary_theta: float | None = None
    """Base of the angles in layers with a window. None: rotary_theta."""
    rotary_factor: float = 1.0
    """Positions are divided by it (position interpolation, arXiv:2306.15595)."""
    window_pattern: tuple[int, ...] = (-1,)
    """How many tokens before and after its own a token sees, in layer after layer, again from the
    beginning when it ends; -1: all."""
    num_key_value_heads: int | None = None
    """Heads of keys and values, which groups of query heads share (arXiv:2305.13245). None: as many
    as query heads."""
    attention_head_size: int | None = None
    """Width of one attention head. None: hidden_size / num_attention_heads."""
    attention_bias: bool = True
    """Whether the linear layers of attention have biases."""
    feed_forward: Literal["mlp", "glu"] = "mlp"
    """mlp: linear, activation, linear. glu: the activation times a gate between (arXiv:2002.05202);
    hidden_act may then be silu or relu too."""
    mlp_bias: bool = True
    """Whether the linear layers of the feed-forward half have biases."""
    num_hidden_groups: int | None = None
    """Groups of layers that share their weights (arXiv:1909.11942): num_hidden_layers passes are
    divided among so many groups. None: no layer shares."""
    inner_group_num: int = 1
    """Layers of a group, which each pass runs one after another."""
    head_act: str | None = None
    """Activation of the mlm head: one of hidden_act's, silu or relu. None: hidden_act."""
    mlm_transform: bool = True
    """Whether the mlm head has a linear layer, activation and norm below the decoder."""
    head_bias: bool = True
    """Whether that linear layer has a bias."""
    decoder_bias: bool = True
    """Whether the decoder has a bias."""
    tie_word_embeddings: bool = True
    """Whether the decoder is the word embedding."""
    token_dropout: bool = False
    """ESM's scaling (Rives et al., 2021, PNAS 118): mask tokens embed to 0, and other tokens are
    multiplied by the share of tokens that training leaves unmasked over the sequence's own."""
    mask_token_id: int | None = None
    """The mask token, for token_dropout."""

    RATES: ClassVar[tuple[str, ...]] = (
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "embedding_dropout_prob"),
        *("attention_output_dropout_prob", "feed_forward_dropout_prob", "classifier_dropout_prob"),
    )

    def __post_init__(self) -> None:
        for name in ("heads", "window_pattern", "relative_terms"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple):
                raise ValueError(f"{name}: expected a list, got {value!r}")
            setattr(self, name, tuple(value))
        check_config(self)
        self.family.check_extra(self.extra)
        if self.family is not OWN:
            self.family.check_parts(self)

    @property
    def family(self) -> Family:
        """The row of the family's table."""
        return find_family(self.model_type)

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        size = self.attention_head_size
        return self.hidden_size // self.num_attention_heads if size is None else size

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        heads = self.num_key_value_heads
        return self.num_attention_heads if heads is None else heads

    @property
    def local_theta(self) -> float:
        """The base of rotary angles in layers with a window."""
        return self.rotary_theta if self.local_rotary_theta is None else self.local_rotary_theta

    def window(self, layer: int) -> int:
        """How far a token sees to both sides in a layer, from 0 on; -1: everything."""
        return self.window_pattern[layer % len(self.window_pattern)]

    @property
    def embedding_width(self) -> int:
        """The width of the embeddings: embedding_size, or hidden_size."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def gelu_approximate(self) -> Literal["none", "tanh"]:
        """PyTorch's name for the GELU variant of hidden_act: "none" or "tanh"."""
        return GELU[self.hidden_act]

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

    @property
    def keys_per_layer(self) -> int:
        """Dropout keys of a layer: attention weights, what both halves add, and with disentangled
        positions the embeddings of distances."""
        return 4 if self.relative_positions == "disentangled" else 3

    @property
    def score_scale(self) -> float:
        """The factor of attention's scores: one over the root of head_dim times the terms."""
        return 1.0 / math.sqrt(self.head_dim * (1 + len(self.relative_terms)))

    def rate(self, name: str) -> float:
        """The dropout rate `name`; where it is not given, hidden_dropout_prob or the family's."""
        value = getattr(self, name)
        other = self.family.rates.get(name, "hidden_dropout_prob")
        return getattr(self, other) if value is None else value

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything."""
        return any(self.rate(name) for name in self.RATES)

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
