"""Heads that compute less: logits at labelled positions only, or only the first column.

The class of a stock BertForMaskedLM (or of a similar model) is swapped for a subclass that inherits
from `PackedMlm` first. Its loss is the stock one: the mean cross-entropy over labels that are not
-100. Logits at all positions are computed when they are read.
"""

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
from bert_unpad.hf.fallback import recording_reason, stock_modules, warn_stock
from bert_unpad.hf.layers import StockModule, unwrap
from bert_unpad.hf.models import STOCK, PackedModel, bind, packing_or_reason, wants_dict
from bert_unpad.hf.outputs import LazyTensor, lazy_output_class
from bert_unpad.hf.packing import IGNORE, Packing
from bert_unpad.hf.plain_modules import dense, unchanged, untouched
from bert_unpad.hf.stock_modules import PackedCall

LOGITS = ("lazy", "full", "none")
SPAN_LOSSES = ("packed", "stock")


@dataclass(frozen=True)
class HeadAdapter:
    """The differences between the masked-language models of the families."""

    base: str
    """The attribute that holds the base model."""
    logits: Callable[[nn.Module, Tensor], Tensor]
    """Computes logits [..., vocabulary] from the model and hidden states [..., hidden]."""
    pretraining: bool = False
    """Whether the model also has a next-sentence head, as in BertForPreTraining."""


def bert_logits(model: Any, x: Tensor) -> Tensor:
    """Computes the logits of BertForMaskedLM and BertForPreTraining."""
    cls, head = model.cls, model.cls.predictions
    if unchanged(cls) and unchanged(head):
        return dense(head.decoder, head.transform(x).to(x.dtype))
    return head(x)


def roberta_logits(model: Any, x: Tensor) -> Tensor:
    """Computes the logits of masked-language models like RoBERTa's."""
    head = model.lm_head
    if unchanged(head):
        y = head.layer_norm(functional.gelu(head.dense(x)))
        return dense(head.decoder, y.to(x.dtype))
    return head(x)


def electra_logits(model: Any, x: Tensor) -> Tensor:
    """Computes the logits of ELECTRA's generator."""
    return dense(model.generator_lm_head, model.generator_predictions(x).to(x.dtype))


def deberta_logits(model: Any, x: Tensor) -> Tensor:
    """Computes the logits of DebertaV2ForMaskedLM, whose head is BERT's or that of the paper."""
    if model.legacy:
        return bert_logits(model, x)
    return model.lm_predictions(x, model.deberta.embeddings.word_embeddings).to(x.dtype)


def distilbert_logits(model: Any, x: Tensor) -> Tensor:
    """Computes the logits of DistilBertForMaskedLM, whose head's modules belong to the model."""
    y = model.vocab_layer_norm(model.activation(model.vocab_transform(x)))
    return dense(model.vocab_projector, y.to(x.dtype))


class PackedMlm(StockModule):
    """Mixin for the class of a stock masked-language model; it comes first in the bases."""

    _bert_unpad_head: HeadAdapter
    _bert_unpad_arguments: tuple[str, ...]
    _bert_unpad_passes_on: bool
    """See `Family.passes_on`."""

    def forward(self, *args, **kwargs):
        call = bind(self._bert_unpad_arguments, args, kwargs)
        head = self._bert_unpad_head
        base = getattr(self, head.base)
        if not isinstance(unwrap(base), PackedModel):
            return super().forward(**call)
        packing = packing_or_reason(unwrap(base), call)
        if isinstance(packing, str):
            return _run_stock(self, packing, super().forward, call)
        labels, next_label = call.pop("labels", None), call.pop("next_sentence_label", None)
        found = None
        # BertForPreTraining computes its loss only when both labels are given.
        if labels is not None and (next_label is not None or not head.pretraining):
            found = packing.labelled(labels)
            if found is None:
                call["labels"] = labels
                if head.pretraining:
                    call["next_sentence_label"] = next_label
                return _run_stock(self, _PADDED_LABELS, super().forward, call)
        return_dict = wants_dict(self, call)
        how = getattr(self, "_bert_unpad_logits", "lazy")
        # FSDP reads all outputs when forward ends; FSDP1 then has no whole weights any more.
        in_fsdp = getattr(self, "_is_fsdp_managed_module", False)
        if how == "lazy" and (in_fsdp or torch.compiler.is_compiling()):
            how = "full"
        # Logits are rarely read in training, and often in evaluation, where it would cost twice.
        if found is not None and (how == "none" or (how == "lazy" and self.training)):
            packing = packing.narrow(found[0], head.pretraining)
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
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

        def logits() -> Tensor:
            with torch.autocast(device, dtype, enabled):  # as now, not as when they are read
                complete = x
                if packing.last is not None:
                    base: Any = unwrap(getattr(self, head.base))
                    stack: Any = unwrap(getattr(base, base._bert_unpad_adapter.stack))
                    complete = stack._bert_unpad_complete(packing, base_output.hidden_states[0], x)
                return packing.pad(head.logits(self, complete))

        loss, relationship = None, None
        if head.pretraining:
            relationship = self.cls.seq_relationship(base_output.pooler_output)
        if found is not None:
            rows, labels = found
            some = head.logits(self, gather_rows(x[0], packing.output_rows(rows)))
            total, _ = ops.masked_cross_entropy(some, labels, ignore_index=IGNORE)
            loss = total / rows.shape[0]  # nan without labels, as in stock
            if relationship is not None and next_label is not None:
                loss = loss + functional.cross_entropy(
                    relationship.view(-1, 2), next_label.view(-1)
                )
        value: Tensor | LazyTensor | None = None
        if found is None or how == "full":
            value = logits()
        elif how == "lazy":
            value = LazyTensor(logits, some.dtype, self.training)
        stock: type = BertForPreTrainingOutput if head.pretraining else MaskedLMOutput
        kind: Any = lazy_output_class(stock) if isinstance(value, LazyTensor) else stock
        if head.pretraining:
            return kind(loss=loss, prediction_logits=value, seq_relationship_logits=relationship)
        return kind(loss=loss, logits=value)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "bert_unpad")))


_PADDED_LABELS = "labels other than -100 lie at padded positions"


def _run_stock(head: Any, reason: str, forward: Callable, call: dict[str, Any]) -> Any:
    """Runs the stock forward of a head, because of `reason`.

    Raises:
        ValueError: its base model is frozen.
    """
    name = type(head).__name__
    if unwrap(head.base_model)._bert_unpad_frozen:
        raise ValueError(f"{name}: frozen, and cannot compute a call where {reason}")
    warn_stock(name, reason)
    if head._bert_unpad_passes_on:
        return forward(**call, packing=STOCK)
    with stock_modules():
        return forward(**call)


class PackedLabels(StockModule):
    """Mixin for heads whose stock loss may depend on what the stock modules compute at padding.

    Then they run. Token classification counts every label that is not -100, question answering
    takes its softmax over all columns. The others are here if they drop what marks packed input.
    """

    _bert_unpad_arguments: tuple[str, ...]
    _bert_unpad_passes_on: bool

    def forward(self, *args, **kwargs):
        call = bind(self._bert_unpad_arguments, args, kwargs)
        if not self._bert_unpad_passes_on and call.get("cu_seq_lens_q") is not None:
            raise ValueError(
                f"{type(self).__name__}: cu_seq_lens_q: expected none, as this head does not pass "
                "it on to its base model; pass a padded batch"
            )
        base = unwrap(self.base_model)
        swapped = isinstance(base, (PackedModel, PackedCall))
        if swapped and (reason := self._bert_unpad_loss_reason(call)):
            return _run_stock(self, reason, super().forward, call)
        return super().forward(**call)

    def _bert_unpad_loss_reason(self, call: dict[str, Any]) -> str | None:
        return None


class PackedTokenLabels(PackedLabels):
    """Mixin for heads with a label for each token."""

    def _bert_unpad_loss_reason(self, call: dict[str, Any]) -> str | None:
        labels, mask = call.get("labels"), call.get("attention_mask")
        if (
            isinstance(labels, Tensor)
            and isinstance(mask, Tensor)
            and labels.shape == mask.shape
            and not torch.compiler.is_compiling()
            and not recording_reason()
            and bool(((labels != IGNORE) & (mask == 0)).any())
        ):
            return _PADDED_LABELS
        return None


class PackedSpans(PackedLabels):
    """Mixin for question answering."""

    _bert_unpad_span_loss: str

    def _bert_unpad_loss_reason(self, call: dict[str, Any]) -> str | None:
        loss = call.get("start_positions") is not None and call.get("end_positions") is not None
        if self._bert_unpad_span_loss == "packed" or not loss or recording_reason():
            return None
        mask = call.get("attention_mask")
        # A compiled call cannot look for padding.
        if mask is None or (not torch.compiler.is_compiling() and bool((mask != 0).all())):
            return None
        return 'with span_loss="stock" the softmax of its loss is over padding too'


class PackedFirst(StockModule):
    """Mixin for heads whose result depends only on the first column of the last layer."""

    _bert_unpad_base: str
    """The attribute that holds the base model."""
    _bert_unpad_classifier: str | None
    """The class of a `classifier` that reads the first column; None if forward reads it."""

    def forward(self, *args, **kwargs):
        base, reader = getattr(self, self._bert_unpad_base), self._bert_unpad_classifier
        if not isinstance(base, PackedModel) or not untouched(base):  # a hook sees the output
            return super().forward(*args, **kwargs)
        if reader is not None:
            classifier = self.classifier
            if type(classifier).__name__ != reader or not untouched(classifier):
                return super().forward(*args, **kwargs)
        return super().forward(*args, first_only=True, **kwargs)
