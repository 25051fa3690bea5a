"""Tiny random Hugging Face models of every served class, and what the tests compare."""

import copy

import pytest
import torch
from torch import nn

from tests.support.seeds import derived
from tests.support.tolerances import STEP, assert_same_gradients, assert_same_values

transformers = pytest.importorskip("transformers", minversion="5.0")

BATCH, SEQLEN, VOCAB, CHOICES = 4, 11, 61, 2

_COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 24,
    "pad_token_id": 1,
    "initializer_range": 0.2,
    "num_labels": 3,
}
_BERT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "type_vocab_size": 2,
}
_MORE = {
    "Electra": {"embedding_size": 32},
    "DebertaV2": {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 4,
        "max_relative_positions": 8,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
}
_DISTILBERT = {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 96}

HEADS = {
    "Bert": (
        "Model", "ForPreTraining", "ForMaskedLM", "ForSequenceClassification",
        "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice",
        "ForNextSentencePrediction",
    ),
    "Roberta": (
        "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
        "ForQuestionAnswering", "ForMultipleChoice",
    ),
    "XLMRoberta": ("Model", "ForMaskedLM", "ForSequenceClassification"),
    "Camembert": ("Model", "ForMaskedLM", "ForSequenceClassification"),
    "Electra": (
        "Model", "ForPreTraining", "ForMaskedLM", "ForSequenceClassification",
        "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice",
    ),
    "DebertaV2": (
        "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
        "ForQuestionAnswering", "ForMultipleChoice",
    ),
    "MPNet": (
        "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
        "ForQuestionAnswering", "ForMultipleChoice",
    ),
    "DistilBert": (
        "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
        "ForQuestionAnswering", "ForMultipleChoice",
    ),
}  # fmt: skip
NAMES = [family + head for family, heads in HEADS.items() for head in heads]

_RIGHT = torch.arange(SEQLEN) < torch.tensor([11, 6, 9, 1])[:, None]
_HOLES = torch.rand((BATCH, SEQLEN), generator=torch.Generator().manual_seed(derived(3))) < 0.6
_HOLES[:, 0] = True
MASKS = {
    "none": None,
    "ones": torch.ones((BATCH, SEQLEN), dtype=torch.int64),
    "right": _RIGHT.long(),
    "left": _RIGHT.flip(1).long(),
    "holes": _HOLES.float(),
    "first": (_HOLES & (torch.arange(SEQLEN) != torch.tensor([3, 0, 5, 6])[:, None])).bool(),
    "empty": (_HOLES & (torch.arange(BATCH) != 2)[:, None]).long(),
}


def family_of(name: str) -> str:
    return max((f for f in HEADS if name.startswith(f)), key=len)


def make(
    name: str, dropout: float = 0.0, seed: int = 0, attention: str | None = None, **changes
) -> nn.Module:
    """A model of the class with weights large enough for every part to matter.

    `attention` names its implementation; None leaves the choice to transformers.
    """
    family = family_of(name)
    if family == "DistilBert":
        rates = {
            "dropout": dropout,
            "attention_dropout": dropout,
            "seq_classif_dropout": dropout,
            "qa_dropout": dropout,
        }
        fields = _COMMON | _DISTILBERT | rates
    else:
        rates = {
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
            "classifier_dropout": dropout,
        }
        rates |= {"summary_last_dropout": dropout, "pooler_dropout": dropout}
        fields = _COMMON | _BERT | rates | _MORE.get(family, {})
    if name.endswith(("ForNextSentencePrediction", "ForQuestionAnswering")):
        fields = {**fields, "num_labels": 2}
    torch.manual_seed(derived(seed))
    config = getattr(transformers, f"{family}Config")(**fields | changes)
    model = getattr(transformers, name)._from_config(config, attn_implementation=attention).train()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model


def call_arguments(name: str, mask: torch.Tensor | None, seed: int = 1, labels: bool = True):
    """Keyword arguments for a call of such a model."""
    generator = torch.Generator().manual_seed(derived(seed))

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    ids = integers(VOCAB, BATCH, SEQLEN)  # the padding token's id too, and where mask is 1
    call = {"input_ids": ids, "attention_mask": mask}
    if family_of(name) not in ("DistilBert", "MPNet"):
        call["token_type_ids"] = integers(2, BATCH, SEQLEN)
    keep = torch.ones((BATCH, SEQLEN), dtype=torch.bool) if mask is None else mask.bool()
    if name.endswith("ForMultipleChoice"):
        call = {k: None if v is None else v[:, None].repeat(1, CHOICES, 1) for k, v in call.items()}
        call["input_ids"][:, 1] = integers(VOCAB, BATCH, SEQLEN)
    if not labels or name.endswith("Model"):
        return call
    if name == "ElectraForPreTraining":
        call["labels"] = integers(2, BATCH, SEQLEN)
    elif name.endswith(("ForMaskedLM", "ForPreTraining")):
        chosen = (torch.rand((BATCH, SEQLEN), generator=generator) < 0.4) & keep
        call["labels"] = torch.where(chosen, integers(VOCAB, BATCH, SEQLEN), -100)
        if name == "BertForPreTraining":
            call["next_sentence_label"] = integers(2, BATCH)
    elif name.endswith("ForTokenClassification"):
        call["labels"] = torch.where(keep, integers(3, BATCH, SEQLEN), -100)
    elif name.endswith("ForQuestionAnswering"):
        call["start_positions"] = call["end_positions"] = torch.zeros(BATCH, dtype=torch.int64)
    else:
        call["labels"] = integers(2, BATCH)
    return call


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def run(model: nn.Module, call: dict) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs and gradients of one training step without dropout."""
    model.zero_grad()
    out = model(**call)
    loss = out.loss if "loss" in out else _probe(out, call)
    loss.backward()
    return {key: out[key].detach() for key in out}, gradients(model)


def _probe(out, call) -> torch.Tensor:
    """A loss of a base model's real tokens."""
    mask = call["attention_mask"]
    hidden = out[0] if mask is None else out[0][mask.bool()]
    generator = torch.Generator().manual_seed(derived(9))
    loss = (hidden * torch.randn(hidden.shape, generator=generator).to(hidden)).sum()
    if "pooler_output" in out:
        loss = loss + out.pooler_output[:, ::2].sum()
    return loss


def real(values: dict[str, torch.Tensor], mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The outputs at real tokens; those without a token dimension as they are."""
    if mask is None:
        return values
    shape = tuple(mask.shape[-2:])
    return {
        key: value[mask.bool()] if tuple(value.shape[:2]) == shape else value
        for key, value in values.items()
    }


def assert_same_step(got, want, mask, tolerance: float = STEP) -> None:
    """Outputs at real tokens, losses and gradients of two steps agree."""
    outputs, expected = real(got[0], mask), real(want[0], mask)
    assert list(outputs) == list(expected)
    assert_same_values(outputs, expected, tolerance)
    assert_same_gradients(got[1], want[1], tolerance)


def clone(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
