"""The models of the embedding benchmark: real sizes, random weights, saved as a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from benchmarks.lib import embed_texts

BERT_BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
MINILM_L6 = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
_IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2,
        "sep_token_id": 3}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A published model's sizes, and what is computed with it."""

    family: str
    """Prefix of transformers' classes."""
    task: Literal["mean", "cls", "rerank", "logits"]
    """Embeddings by mean or first token, scores of pairs, or a language model's logits."""
    fields: dict[str, Any]
    """Of its configuration, where they differ from the family's defaults."""
    longest: int
    """Tokens of the longest text."""
    texts: int
    """Number of texts in a call."""
    lengths: tuple[str, ...] = ("mixed",)
    """Which of `embed_texts.LENGTHS` are measured by default."""
    token_types: bool = False

    @property
    def model_class(self) -> type[transformers.PreTrainedModel]:
        ending = {"rerank": "ForSequenceClassification", "logits": "ForMaskedLM"}
        return getattr(transformers, f"{self.family}{ending.get(self.task, 'Model')}")

    def config(self, layers: int | None = None) -> transformers.PretrainedConfig:
        """The configuration, with another number of layers where one is given."""
        fields = (_IDS if self.task != "logits" else {}) | self.fields
        if self.task == "rerank":
            fields |= {"num_labels": 1}
        if layers is not None:
            fields |= {"num_hidden_layers": layers}
        return getattr(transformers, f"{self.family}Config")(**fields)


def _esm2(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 20,
        "intermediate_size": 4 * hidden,
        "vocab_size": 33,
        "pad_token_id": 1,
        "mask_token_id": 32,
        "max_position_embeddings": 1026,
        "position_embedding_type": "rotary",
        "token_dropout": True,
        "emb_layer_norm_before": False,
        "layer_norm_eps": 1e-5,
    }


SHAPES = {
    "all-MiniLM-L6-v2": Shape(
        "Bert",
        "mean",
        MINILM_L6,
        256,
        96,
        ("queries", "short", "mixed", "bulk", "long"),
        token_types=True,
    ),
    "bge-base-en-v1.5": Shape("Bert", "cls", BERT_BASE, 512, 64, token_types=True),
    "all-mpnet-base-v2": Shape(
        "MPNet",
        "mean",
        BERT_BASE | {"vocab_size": 30527, "max_position_embeddings": 514, "layer_norm_eps": 1e-5},
        384,
        32,
        ("bulk",),
    ),
    "ms-marco-MiniLM-L6-v2": Shape("Bert", "rerank", MINILM_L6, 512, 96, token_types=True),
    "ModernBERT-base": Shape("ModernBert", "mean", {}, 8192, 32, ("bulk",)),
    "deberta-v3-base": Shape(
        "DebertaV2",
        "rerank",
        BERT_BASE
        | {
            "vocab_size": 128100,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "max_relative_positions": -1,
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
        512,
        32,
        ("bulk",),
    ),
    "esm2_t12_35M": Shape("Esm", "logits", _esm2(12, 480), 1024, 32, ("antibodies",)),
    "esm2_t30_150M": Shape("Esm", "logits", _esm2(30, 640), 1024, 32, ("antibodies",)),
}
AMINO_ACIDS = (4, 24)  # ids of ESM-2's vocabulary, of which a protein is made
ENDS = (0, 2)  # ids of <cls> and <eos>


def save_model(shape: Shape, folder: Path, layers: int | None = None) -> None:
    """Writes the model with random weights, and a tokenizer for the texts."""
    torch.manual_seed(0)
    config = shape.config(layers)
    shape.model_class(config).save_pretrained(folder)
    if shape.task != "logits":
        tokenizer = embed_texts.make_tokenizer(config.vocab_size, shape.longest, shape.token_types)
        tokenizer.save_pretrained(folder)
