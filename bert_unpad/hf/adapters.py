"""The table of supported model families: which classes are swapped, and how they differ.

A new family of the same architecture needs only an entry here.
"""

from dataclasses import dataclass

from transformers import modeling_outputs as outputs

from bert_unpad.hf import heads, layer_parts
from bert_unpad.hf.heads import HeadAdapter
from bert_unpad.hf.models import ModelAdapter


@dataclass(frozen=True, eq=False)
class Family:
    """One model family: classes <prefix>... of transformers.models.<package>.modeling_<package>.

    Heads are named by the part of their class name after the prefix.
    """

    package: str
    prefix: str
    stack_class: str
    layer_class: str
    layer: layer_parts.LayerAdapter
    adapter: ModelAdapter
    mlm: dict[str, HeadAdapter]
    first_readers: tuple[str, ...]
    """Heads that read the first column of the base model's output directly, without a pooler."""
    first_only: dict[str, str | None]
    """Heads that read only the first column, with the class that their `classifier` must have for
    that; None accepts any class."""
    passes_on: bool = True
    """Whether heads pass arguments that they do not know on to the base model."""
    base: str = ""
    """The attribute of a head that holds the base model; if empty, the package's name."""

    @property
    def base_attribute(self) -> str:
        """The attribute of a head that holds the base model."""
        return self.base or self.package


_POOLED = outputs.BaseModelOutputWithPoolingAndCrossAttentions


def _roberta_like(package: str, prefix: str) -> Family:
    return Family(
        package,
        prefix,
        f"{prefix}Encoder",
        f"{prefix}Layer",
        layer_parts.BERT,
        ModelAdapter("encoder", _POOLED, positions="ids"),
        {"ForMaskedLM": HeadAdapter("roberta", heads.roberta_logits)},
        ("ForSequenceClassification",),
        {
            "ForSequenceClassification": f"{prefix}ClassificationHead",
            "ForMultipleChoice": None,
        },
        base="roberta",
    )


FAMILIES = (
    Family(
        "bert",
        "Bert",
        "BertEncoder",
        "BertLayer",
        layer_parts.BERT,
        ModelAdapter("encoder", _POOLED),
        {
            "ForMaskedLM": HeadAdapter("bert", heads.bert_logits),
            "ForPreTraining": HeadAdapter("bert", heads.bert_logits, pretraining=True),
        },
        (),
        {
            "ForSequenceClassification": None,
            "ForMultipleChoice": None,
            "ForNextSentencePrediction": None,
        },
    ),
    _roberta_like("roberta", "Roberta"),
    _roberta_like("xlm_roberta", "XLMRoberta"),
    _roberta_like("camembert", "Camembert"),
    Family(
        "electra",
        "Electra",
        "ElectraEncoder",
        "ElectraLayer",
        layer_parts.BERT,
        ModelAdapter("encoder", outputs.BaseModelOutputWithPastAndCrossAttentions),
        {"ForMaskedLM": HeadAdapter("electra", heads.electra_logits)},
        ("ForSequenceClassification", "ForMultipleChoice"),
        # Multiple choice may be configured to read all columns.
        {"ForSequenceClassification": "ElectraClassificationHead"},
    ),
    Family(
        "deberta_v2",
        "DebertaV2",
        "DebertaV2Encoder",
        "DebertaV2Layer",
        layer_parts.DEBERTA,
        ModelAdapter("encoder", outputs.BaseModelOutput),
        {"ForMaskedLM": HeadAdapter("deberta", heads.deberta_logits)},
        ("ForSequenceClassification", "ForMultipleChoice"),
        {},
        passes_on=False,
        base="deberta",
    ),
    Family(
        "mpnet",
        "MPNet",
        "MPNetEncoder",
        "MPNetLayer",
        layer_parts.MPNET,
        ModelAdapter(
            "encoder", outputs.BaseModelOutputWithPooling, positions="ids", token_types=False
        ),
        {"ForMaskedLM": HeadAdapter("mpnet", heads.roberta_logits)},
        ("ForSequenceClassification",),
        {},
        passes_on=False,
    ),
    Family(
        "distilbert",
        "DistilBert",
        "Transformer",
        "TransformerBlock",
        layer_parts.DISTILBERT,
        ModelAdapter("transformer", outputs.BaseModelOutput, token_types=False),
        {"ForMaskedLM": HeadAdapter("distilbert", heads.distilbert_logits)},
        ("ForSequenceClassification", "ForMultipleChoice"),
        {"ForSequenceClassification": None, "ForMultipleChoice": None},
    ),
)
