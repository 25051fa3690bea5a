"""Encoders on packed tokens: modules, configuration and Hugging Face checkpoints."""

import importlib
from typing import TYPE_CHECKING

from bert_unpad.nn.config import PRESETS, BertConfig, EncoderConfig
from bert_unpad.nn.encoder import Encoder, EncoderLayer
from bert_unpad.nn.families import FAMILIES
from bert_unpad.nn.pretraining import (
    BertForPreTraining,
    EncoderForPreTraining,
    EncoderModel,
    PreTrainingOutput,
    ReplacedTokenOutput,
)

if TYPE_CHECKING:
    from bert_unpad.nn.replaced_tokens import (
        ReplacedTokenPreTraining,
        ReplacedTokenPreTrainingOutput,
        generator_config,
    )

BertEncoder, BertLayer, BertModel = Encoder, EncoderLayer, EncoderModel

__all__ = [
    "FAMILIES",
    "PRESETS",
    "BertConfig",
    "BertEncoder",
    "BertForPreTraining",
    "BertLayer",
    "BertModel",
    "Encoder",
    "EncoderConfig",
    "EncoderForPreTraining",
    "EncoderLayer",
    "EncoderModel",
    "PreTrainingOutput",
    "ReplacedTokenOutput",
    "ReplacedTokenPreTraining",
    "ReplacedTokenPreTrainingOutput",
    "generator_config",
]


def __getattr__(name: str) -> object:
    # What is not above: on first use, as it imports torch.compile, which takes seconds.
    if name in __all__:
        return getattr(importlib.import_module("bert_unpad.nn.replaced_tokens"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
