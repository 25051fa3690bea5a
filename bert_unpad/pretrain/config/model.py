"""Options of the model: where its sizes and its first weights come from."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_unpad._tiers import advanced
from bert_unpad.data import DataConfig
from bert_unpad.data.objective import Objective
from bert_unpad.nn import PRESETS, EncoderConfig
from bert_unpad.nn.config import Head
from bert_unpad.pretrain.config.errors import ConfigError

_HEADS: dict[Objective, tuple[Head, ...]] = {
    "mlm_nsp": ("mlm", "nsp"),
    "mlm": ("mlm",),
    "mlm_sop": ("mlm", "nsp"),
    "rtd": ("rtd",),
}


@dataclass
class ModelConfig:
    """The model: a preset, and sizes that replace the preset's."""

    preset: str = "bert-base"
    """bert-base, modernbert-base or another name in docs/encoders.md, the path of a config.json in
    Hugging Face's format (for other sizes, activations or vocabularies), or a folder with
    config.json and model.safetensors, with whose weights training begins."""
    hidden_size: int | None = None
    """Width of the hidden states. By default the preset's."""
    num_hidden_layers: int | None = None
    """Encoder layers. By default the preset's."""
    num_attention_heads: int | None = None
    """Attention heads per layer. By default the preset's."""
    intermediate_size: int | None = None
    """Width of the feed-forward layers. By default the preset's."""
    generator_share: float = advanced(0.25)
    """With data.objective rtd: attention heads and width of the generator, as a share of the
    model's. It has as many layers."""
    hidden_dropout_prob: float | None = advanced(None)
    """Dropout probability of hidden states. By default the preset's."""
    attention_probs_dropout_prob: float | None = advanced(None)
    """Dropout probability of attention weights. By default the preset's."""
    max_position_embeddings: int | None = advanced(None)
    """Positions, which limit data.max_seq_length. By default the preset's."""

    @property
    def weights(self) -> Path | None:
        """The folder with the first weights; None for fresh weights."""
        if self.preset in PRESETS or Path(self.preset).is_file():
            return None
        return Path(self.preset)

    def overrides(self) -> dict[str, Any]:
        """The sizes and rates that are given."""
        values = dataclasses.asdict(self)
        del values["preset"], values["generator_share"]
        return {name: value for name, value in values.items() if value is not None}

    def resolve(self, vocab_size: int, data: DataConfig | None = None) -> EncoderConfig:
        """The model's configuration, for a tokenizer with `vocab_size` tokens.

        Args:
            vocab_size: of the tokenizer.
            data: the examples and the objective, which says what heads the model has.

        Raises:
            ConfigError: the preset is no name, file or folder, a size does not fit, or the preset
                has a smaller vocabulary than the tokenizer or fewer segments.
        """
        data = DataConfig() if data is None else data
        try:
            config = dataclasses.replace(
                self._preset(vocab_size), heads=_HEADS[data.objective], **self.overrides()
            )
        except ConfigError:
            raise
        except ValueError as error:
            name, _, message = str(error).partition(": ")
            if name not in {field.name for field in dataclasses.fields(self)}:
                name, message = "preset", str(error)
            raise ConfigError(f"model.{name}", message) from error
        if config.type_vocab_size < data.segments > 1:
            raise ConfigError(
                "model.preset",
                f"expected a type_vocab_size of at least {data.segments}, the segments of an "
                f"example, got {config.type_vocab_size}",
            )
        if config.vocab_size < vocab_size:
            raise ConfigError(
                "model.preset",
                f"expected a vocab_size of at least the tokenizer's {vocab_size}, got "
                f"{config.vocab_size}",
            )
        return config

    def _preset(self, vocab_size: int) -> EncoderConfig:
        if self.preset in PRESETS:
            values = PRESETS[self.preset] | {"vocab_size": vocab_size}
            if "mask_token_id" in values:  # of the authors' vocabulary
                values["mask_token_id"] = min(values["mask_token_id"], vocab_size - 1)
            return EncoderConfig(**values)
        path = Path(self.preset)
        if self.weights is not None:
            path = path / "config.json"
        if not path.is_file():
            raise ConfigError(
                "model.preset",
                f"expected one of {', '.join(sorted(PRESETS))}, a config.json or a folder with "
                f"one, got {self.preset!r}",
            )
        try:
            return EncoderConfig.from_json(path)
        except ValueError as error:
            raise ConfigError(
                "model.preset", f"expected a config.json, got {path}: {error}"
            ) from error
