"""The peers of the model benchmark, built on one Hugging Face BERT (its weights and modules).

`padded`     Hugging Face as it is: padded batch, logits at every position.
`labels`     the same, but logits at masked positions only.
`unpadded`   what a careful user writes in plain PyTorch: packed tokens, attention by a function
             that takes them, logits at masked positions only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bert_unpad.batch import PackedInputs, VarlenBatch, pad
from bert_unpad.batch.tensor_fields import map_tensors, tensor_fields

# q, k, v [T, heads, head_dim], their packing, dropout_p -> [T, heads, head_dim]
Attend = Callable[[Tensor, Tensor, Tensor, VarlenBatch, float], Tensor]


@dataclass(frozen=True, eq=False)
class PaddedInputs:
    """A batch as Hugging Face's models take it, int64."""

    input_ids: Tensor
    """[B, S]"""
    token_type_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    """-100 where there is none."""
    next_sentence_labels: Tensor
    """[B]"""
    masked_positions: Tensor
    """[M]: rows of the flattened batch that have a label."""
    masked_labels: Tensor
    """[M]"""

    @classmethod
    def build(cls, inputs: PackedInputs) -> PaddedInputs:
        """On the host."""
        batch = inputs.batch
        labels = torch.full((batch.total,), -100).scatter(
            0, inputs.masked_positions, inputs.masked_labels
        )
        return cls(
            pad(inputs.input_ids, batch),
            pad(inputs.token_type_ids, batch),
            pad(torch.ones(batch.total, dtype=torch.int64), batch),
            pad(labels, batch, value=-100),
            inputs.next_sentence_labels,
            batch.indices[inputs.masked_positions],
            inputs.masked_labels,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PaddedInputs:
        return map_tensors(
            self, tensor_fields(self), lambda part: part.to(device, non_blocking=non_blocking)
        )

    def pin_memory(self) -> PaddedInputs:
        return map_tensors(self, tensor_fields(self), Tensor.pin_memory)


class Peers(nn.Module):
    """Pretraining losses of a transformers BertForPreTraining, computed in three ways."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def padded(self, inputs: PaddedInputs) -> Tensor:
        return self.model(
            input_ids=inputs.input_ids,
            token_type_ids=inputs.token_type_ids,
            attention_mask=inputs.attention_mask,
            labels=inputs.labels,
            next_sentence_label=inputs.next_sentence_labels,
        ).loss

    def labels(self, inputs: PaddedInputs) -> Tensor:
        hidden = self.model.bert(
            input_ids=inputs.input_ids,
            token_type_ids=inputs.token_type_ids,
            attention_mask=inputs.attention_mask,
        ).last_hidden_state
        masked = hidden.flatten(0, 1).index_select(0, inputs.masked_positions)
        return self.loss(masked, hidden[:, 0], inputs)

    def unpadded(self, inputs: PackedInputs, attend: Attend) -> Tensor:
        bert, batch = self.model.bert, inputs.batch
        hidden = bert.embeddings(
            input_ids=inputs.input_ids[None],
            token_type_ids=inputs.token_type_ids[None],
            position_ids=batch.position_ids[None],
        )[0]
        for layer in bert.encoder.layer:
            hidden = unpadded_layer(layer, hidden, batch, attend)
        first = hidden.index_select(0, batch.cu_seqlens[:-1])
        return self.loss(hidden.index_select(0, inputs.masked_positions), first, inputs)

    def loss(self, masked: Tensor, first: Tensor, inputs: PackedInputs | PaddedInputs) -> Tensor:
        cls = self.model.cls
        logits = cls.predictions(masked)
        nsp = cls.seq_relationship(self.model.bert.pooler(first[:, None]))
        return functional.cross_entropy(
            logits.float(), inputs.masked_labels
        ) + functional.cross_entropy(nsp.float(), inputs.next_sentence_labels)


def unpadded_layer(layer: nn.Module, x: Tensor, batch: VarlenBatch, attend: Attend) -> Tensor:
    """A Hugging Face BertLayer on packed tokens [T, hidden]."""
    module = layer.attention.self
    heads, size = module.num_attention_heads, module.attention_head_size
    projections = (module.query, module.key, module.value)
    q, k, v = (p(x).view(-1, heads, size) for p in projections)
    dropout = module.dropout.p if module.training else 0.0
    x = layer.attention.output(attend(q, k, v, batch, dropout).flatten(1), x)
    return layer.output(layer.intermediate(x), x)


def by_sequence(q: Tensor, k: Tensor, v: Tensor, batch: VarlenBatch, dropout_p: float) -> Tensor:
    """One sdpa call a sequence, which is all that PyTorch has for a CPU."""
    lengths = batch.lengths.tolist()
    parts = (x.transpose(0, 1).split(lengths, 1) for x in (q, k, v))
    outs = [
        functional.scaled_dot_product_attention(a[None], b[None], c[None], dropout_p=dropout_p)[0]
        for a, b, c in zip(*parts, strict=True)
    ]
    return torch.cat(outs, 1).transpose(0, 1)


def by_flash(q: Tensor, k: Tensor, v: Tensor, batch: VarlenBatch, dropout_p: float) -> Tensor:
    """FlashAttention-2 as PyTorch has it; its public function for packed tokens has no dropout."""
    ends, longest = batch.cu_seqlens, batch.max_seqlen
    return torch.ops.aten._flash_attention_forward(
        q, k, v, ends, ends, longest, longest, dropout_p, False, False
    )[0]


def by_flash_attn(q: Tensor, k: Tensor, v: Tensor, batch: VarlenBatch, dropout_p: float) -> Tensor:
    """FlashAttention-2 of the flash_attn package, where that is installed."""
    from flash_attn import flash_attn_varlen_func

    ends, longest = batch.cu_seqlens, batch.max_seqlen
    return flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, dropout_p=dropout_p)
