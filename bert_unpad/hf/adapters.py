"""The one table of what is served: which class of transformers is swapped, and how it differs.

A new family of the same architecture is an entry here, not a copy of any code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bert_unpad.hf import heads, layers
from bert_unpad.hf.heads import HeadAdapter
from bert_unpad.hf.models import ModelAdapter

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True, eq=False)
class Family:
    """One family: classes by their names in transformers.models.<package>.modeling_<package>."""

    package: str
    model: str
    layer: str
    parts: Callable[[Any], layers.LayerParts]
    adapter: ModelAdapter
    mlm: dict[str, HeadAdapter]
    token_labels: tuple[str, ...]
    """Heads whose loss counts labels at every position."""
    first_readers: tuple[str, ...]
    """Heads that read the first column of the base model's output themselves, without a pooler."""


_ROBERTA = ModelAdapter("encoder", positions="ids")
_BERT = ModelAdapter("encoder")


def _roberta_like(package: str, prefix: str) -> Family:
    return Family(
        package=package,
        model=f"{prefix}Model",
        layer=f"{prefix}Layer",
        parts=layers.bert_parts,
        adapter=_ROBERTA,
        mlm={f"{prefix}ForMaskedLM": HeadAdapter("roberta", heads.roberta_logits)},
        token_labels=(f"{prefix}ForTokenClassification",),
        first_readers=(f"{prefix}ForSequenceClassification",),
    )


FAMILIES = (
    Family(
        package="bert",
        model="BertModel",
        layer="BertLayer",
        parts=layers.bert_parts,
        adapter=_BERT,
        mlm={
            "BertForMaskedLM": HeadAdapter("bert", heads.bert_logits),
            "BertForPreTraining": HeadAdapter("bert", heads.bert_logits, pretraining=True),
        },
        token_labels=("BertForTokenClassification",),
        first_readers=(),
    ),
    _roberta_like("roberta", "Roberta"),
    _roberta_like("xlm_roberta", "XLMRoberta"),
    _roberta_like("camembert", "Camembert"),
    Family(
        package="electra",
        model="ElectraModel",
        layer="ElectraLayer",
        parts=layers.bert_parts,
        adapter=_BERT,
        mlm={"ElectraForMaskedLM": HeadAdapter("electra", heads.electra_logits)},
        token_labels=("ElectraForTokenClassification",),
        first_readers=("ElectraForSequenceClassification", "ElectraForMultipleChoice"),
    ),
    Family(
        package="distilbert",
        model="DistilBertModel",
        layer="TransformerBlock",
        parts=layers.distilbert_parts,
        adapter=ModelAdapter("transformer", token_types=False),
        mlm={"DistilBertForMaskedLM": HeadAdapter("distilbert", heads.distilbert_logits)},
        token_labels=("DistilBertForTokenClassification",),
        first_readers=(
            "DistilBertForSequenceClassification",
            "DistilBertForMultipleChoice",
        ),
    ),
)
