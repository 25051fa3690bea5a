"""Settings of the model: where its sizes and its first weights come from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bert_unpad.nn import BertConfig
from bert_unpad.nn.config import PRESETS
from bert_unpad.pretrain.config.errors import ConfigError


@dataclass
class ModelConfig:
    """The model: a preset, a folder, or sizes; sizes given here go before the preset's."""

    preset: str = "bert-base"
    """bert-base, bert-large, or a folder with config.json and model.safetensors in Hugging Face's
    layout, whose weights training then starts from."""
    vocab_size: int | None = None
    """By default the tokenizer's."""
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    intermediate_size: int | None = None
    hidden_act: Literal["gelu", "gelu_new", "gelu_pytorch_tanh"] | None = None
    hidden_dropout_prob: float | None = None
    attention_probs_dropout_prob: float | None = None
    max_position_embeddings: int | None = None
    type_vocab_size: int | None = None
    initializer_range: float | None = None
    layer_norm_eps: float | None = None

    @property
    def weights(self) -> Path | None:
        """The folder that training starts from, or None for fresh weights."""
        return None if self.preset in PRESETS else Path(self.preset)

    def overrides(self) -> dict[str, object]:
        """The sizes and rates that are given."""
        values = dataclasses.asdict(self)
        del values["preset"]
        return {name: value for name, value in values.items() if value is not None}

    def resolve(self, vocab_size: int) -> BertConfig:
        """The model's configuration, for a tokenizer with `vocab_size` tokens.

        Raises:
            ConfigError: the preset is no name and no folder, a size does not fit, or the
                vocabulary is smaller than the tokenizer's.
        """
        if self.weights is not None:
            path = self.weights / "config.json"
            if not path.is_file():
                raise ConfigError(
                    "model.preset",
                    f"expected one of {sorted(PRESETS)} or a folder with config.json, "
                    f"got {self.preset!r}",
                )
            try:
                values = BertConfig.from_json(path).to_dict()
            except ValueError as error:
                raise ConfigError("model.preset", f"{path}: {error}") from error
        else:
            values = {"vocab_size": vocab_size, **PRESETS[self.preset]}
        try:
            config = BertConfig.from_dict(values | self.overrides())
        except ValueError as error:
            raise ConfigError("model", str(error)) from error
        if config.type_vocab_size < 2:
            raise ConfigError(
                "model.type_vocab_size",
                f"expected at least 2 (an example has two segments), got {config.type_vocab_size}",
            )
        if config.vocab_size < vocab_size:
            raise ConfigError(
                "model.vocab_size",
                f"the tokenizer has {vocab_size} tokens, the model only {config.vocab_size}",
            )
        return config
