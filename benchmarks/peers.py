"""The peers of the model benchmark, built on one Hugging Face BERT (its weights and modules).

`padded`     Hugging Face as it is: padded batch, sdpa attention, logits at every position.
`labels`     the same, but logits at masked positions only.
`unpadded`   what a careful user writes in plain PyTorch: packed tokens, one sdpa call a sequence,
             logits at masked positions only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from bert_unpad.batch import PackedInputs, pad


class Peers(nn.Module):
    """Pretraining losses of a transformers BertForPreTraining, computed in three ways."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def padded(self, inputs: PackedInputs) -> Tensor:
        batch = inputs.batch
        ids, types, mask = self._padded_inputs(inputs)
        labels = torch.full((batch.total,), -100).scatter(
            0, inputs.masked_positions, inputs.masked_labels
        )
        return self.model(
            input_ids=ids,
            token_type_ids=types,
            attention_mask=mask,
            labels=pad(labels, batch, value=-100),
            next_sentence_label=inputs.next_sentence_labels,
        ).loss

    def labels(self, inputs: PackedInputs) -> Tensor:
        ids, types, mask = self._padded_inputs(inputs)
        hidden = self.model.bert(
            input_ids=ids, token_type_ids=types, attention_mask=mask
        ).last_hidden_state
        masked = hidden.flatten(0, 1)[inputs.batch.indices[inputs.masked_positions]]
        return self._loss(masked, hidden[:, 0], inputs)

    def unpadded(self, inputs: PackedInputs) -> Tensor:
        bert, batch = self.model.bert, inputs.batch
        hidden = bert.embeddings(
            input_ids=inputs.input_ids[None],
            token_type_ids=inputs.token_type_ids[None],
            position_ids=batch.position_ids[None],
        )[0]
        lengths = batch.lengths.tolist()
        for layer in bert.encoder.layer:
            hidden = unpadded_layer(layer, hidden, lengths)
        first = batch.cu_seqlens[:-1].long()
        return self._loss(hidden[inputs.masked_positions], hidden[first], inputs)

    def _loss(self, masked: Tensor, first: Tensor, inputs: PackedInputs) -> Tensor:
        cls = self.model.cls
        logits = cls.predictions(masked)
        nsp = cls.seq_relationship(self.model.bert.pooler(first[:, None]))
        return functional.cross_entropy(
            logits.float(), inputs.masked_labels
        ) + functional.cross_entropy(nsp.float(), inputs.next_sentence_labels)

    @staticmethod
    def _padded_inputs(inputs: PackedInputs) -> tuple[Tensor, Tensor, Tensor]:
        batch = inputs.batch
        mask = pad(torch.ones(batch.total, dtype=torch.int64), batch)
        return pad(inputs.input_ids, batch), pad(inputs.token_type_ids, batch), mask


def unpadded_layer(layer: nn.Module, x: Tensor, lengths: list[int]) -> Tensor:
    """A Hugging Face BertLayer on packed tokens [T, hidden], attention sequence by sequence."""
    module = layer.attention.self
    heads, size = module.num_attention_heads, module.attention_head_size
    projections = (module.query, module.key, module.value)
    q, k, v = (p(x).view(-1, heads, size).transpose(0, 1).split(lengths, 1) for p in projections)
    dropout = module.dropout.p if module.training else 0.0
    outs = [
        functional.scaled_dot_product_attention(a[None], b[None], c[None], dropout_p=dropout)[0]
        for a, b, c in zip(q, k, v, strict=True)
    ]
    attention = torch.cat(outs, 1).transpose(0, 1).flatten(1)
    x = layer.attention.output(attention, x)
    return layer.output(layer.intermediate(x), x)
