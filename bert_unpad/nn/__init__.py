"""BERT on packed tokens: modules, configuration and Hugging Face checkpoints."""

from bert_unpad.nn.config import BertConfig
from bert_unpad.nn.encoder import BertEncoder, BertLayer
from bert_unpad.nn.pretraining import BertForPreTraining, BertModel, PreTrainingOutput

__all__ = [
    "BertConfig",
    "BertEncoder",
    "BertForPreTraining",
    "BertLayer",
    "BertModel",
    "PreTrainingOutput",
]
