"""Heads over the vocabulary: logits at labelled positions only, the others when they are read.

The class of a stock BertForMaskedLM (or a relative) is swapped for a subclass with `PackedMlm` in
front. Its loss is the stock one: the mean of the cross-entropy over the labels that are not -100.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_outputs import MaskedLMOutput
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput

from bert_unpad import ops
from bert_unpad.batch.rows import gather_rows
from bert_unpad.hf.fallback import warn_stock
from bert_unpad.hf.models import STOCK, PackedModel, bind, packing_or_reason
from bert_unpad.hf.outputs import LazyTensor, lazy_output_class
from bert_unpad.hf.packing import IGNORE, Packing
from bert_unpad.hf.plain_modules import dense, untouched

__all__ = ["HeadAdapter", "PackedFirst", "PackedMlm", "PackedTokenLabels"]

LOGITS = ("lazy", "full", "none")


@dataclass(frozen=True)
class HeadAdapter:
    """What differs between the masked-language models of the families."""

    base: str
    """The attribute that holds the base model."""
    logits: Callable[[nn.Module, Tensor], Tensor]
    """(model, hidden states [..., hidden]) -> logits [..., vocabulary]."""
    pretraining: bool = False
    """Whether there is a next-sentence head too, as in BertForPreTraining."""


def bert_logits(model: nn.Module, x: Tensor) -> Tensor:
    """`cls` of BertForMaskedLM and BertForPreTraining."""
    cls, head = model.cls, model.cls.predictions
    if untouched(cls) and untouched(head):
        return dense(head.decoder, head.transform(x).to(x.dtype))
    return head(x)


def roberta_logits(model: nn.Module, x: Tensor) -> Tensor:
    """`lm_head` of RoBERTa's family."""
    head = model.lm_head
    if untouched(head):
        y = head.layer_norm(functional.gelu(head.dense(x)))
        return dense(head.decoder, y.to(x.dtype))
    return head(x)


def electra_logits(model: nn.Module, x: Tensor) -> Tensor:
    """The generator's head."""
    return dense(model.generator_lm_head, model.generator_predictions(x).to(x.dtype))


def distilbert_logits(model: nn.Module, x: Tensor) -> Tensor:
    """The head of DistilBertForMaskedLM, whose modules are the model's own."""
    y = model.vocab_layer_norm(model.activation(model.vocab_transform(x)))
    return dense(model.vocab_projector, y.to(x.dtype))


class PackedMlm:
    """Mixed into the class of a stock masked-language model, in front of it."""

    _bert_unpad_head: HeadAdapter
    _bert_unpad_arguments: tuple[str, ...]

    def forward(self, *args, **kwargs):
        call = bind(self._bert_unpad_arguments, args, kwargs)
        head = self._bert_unpad_head
        base = getattr(self, head.base)
        if not isinstance(base, PackedModel):
            return super().forward(**call)
        packing = packing_or_reason(base, call)
        if isinstance(packing, str):
            warn_stock(type(self).__name__, packing)
            return super().forward(**call, packing=STOCK)
        labels, next_label = call.pop("labels", None), call.pop("next_sentence_label", None)
        found = None
        # BertForPreTraining computes its loss only when both labels are given.
        if labels is not None and (next_label is not None or not head.pretraining):
            found = packing.labelled(labels)
            if found is None:
                warn_stock(type(self).__name__, "labels other than -100 lie at padded positions")
                given = {"labels": labels}
                if head.pretraining:
                    given["next_sentence_label"] = next_label
                return super().forward(**call, **given, packing=STOCK)
        return_dict = call.pop("return_dict", None)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        how = getattr(self, "_bert_unpad_logits", "lazy")
        if how == "lazy" and torch.compiler.is_compiling():
            how = "full"
        # Logits are rarely read in training, and often in evaluation, where it would cost twice.
        if found is not None and (how == "none" or (how == "lazy" and self.training)):
            packing = packing.narrow(base._bert_unpad_last_layer(), found[0], head.pretraining)
        out = base(**call, packing=packing, return_dict=True)
        out = self._bert_unpad_output(out, packing, found, next_label, how)
        return out if return_dict else out.to_tuple()

    def _bert_unpad_output(
        self,
        base_output: Any,
        packing: Packing,
        found: tuple[Tensor, Tensor] | None,
        next_label: Tensor | None,
        how: str,
    ):
        head, x = self._bert_unpad_head, base_output.last_hidden_state
        device = x.device.type
        cast = {
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }

        def logits() -> Tensor:
            with torch.autocast(device, **cast):  # whatever holds when they are read
                complete = x if packing.last is None else packing.last.complete(x, packing)
                return packing.pad(head.logits(self, complete))

        loss, relationship = None, None
        if head.pretraining:
            relationship = self.cls.seq_relationship(base_output.pooler_output)
        if found is not None:
            rows, labels = found
            some = head.logits(self, gather_rows(x[0], packing.output_rows(rows)))
            total, _ = ops.masked_cross_entropy(some, labels, ignore_index=IGNORE)
            loss = total / rows.shape[0]  # nan without labels, as in stock
            if relationship is not None:
                loss = loss + functional.cross_entropy(
                    relationship.view(-1, 2), next_label.view(-1)
                )
        if found is None or how == "full":
            value = logits()
        elif how == "lazy":
            value = LazyTensor(logits, some.dtype, self.training)
        else:
            value = None
        stock = BertForPreTrainingOutput if head.pretraining else MaskedLMOutput
        kind = lazy_output_class(stock) if isinstance(value, LazyTensor) else stock
        if head.pretraining:
            return kind(loss=loss, prediction_logits=value, seq_relationship_logits=relationship)
        return kind(loss=loss, logits=value)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "bert_unpad")))


class PackedTokenLabels:
    """Mixed into token classification, whose stock loss counts every label that is not -100.

    Where one lies at a padded position, the loss depends on what the stock modules compute there.
    """

    _bert_unpad_arguments: tuple[str, ...]

    def forward(self, *args, **kwargs):
        call = bind(self._bert_unpad_arguments, args, kwargs)
        labels, mask = call.get("labels"), call.get("attention_mask")
        if (
            isinstance(labels, Tensor)
            and isinstance(mask, Tensor)
            and labels.shape == mask.shape
            and not torch.compiler.is_compiling()
            and bool(((labels != IGNORE) & (mask == 0)).any())
        ):
            warn_stock(type(self).__name__, "labels other than -100 lie at padded positions")
            return super().forward(**call, packing=STOCK)
        return super().forward(**call)


class PackedFirst:
    """Mixed into heads whose result depends on the first column of the last layer alone."""

    _bert_unpad_base: str
    """The attribute that holds the base model."""
    _bert_unpad_classifier: str | None
    """The class of a `classifier` that reads the first column; None: forward does so itself."""

    def forward(self, *args, **kwargs):
        base, reader = getattr(self, self._bert_unpad_base), self._bert_unpad_classifier
        if not isinstance(base, PackedModel) or not untouched(base):  # a hook sees the output
            return super().forward(*args, **kwargs)
        if reader is not None:
            classifier = self.classifier
            if type(classifier).__name__ != reader or not untouched(classifier):
                return super().forward(*args, **kwargs)
        return super().forward(*args, first_only=True, **kwargs)
