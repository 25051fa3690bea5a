"""Encoders on packed tokens: modules, configuration and Hugging Face checkpoints."""

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
