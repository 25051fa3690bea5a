"""Small random models of every family, transformers' and ours, and batches for both."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from bert_unpad.batch import PackedInputs, VarlenBatch, unpad
from bert_unpad.nn import FAMILIES, EncoderForPreTraining
from tests.support.seeds import derived

PAD = 1
"""The padding token, which no text holds: transformers drops its embedding's gradient."""


def sizes(draw: random.Random) -> dict[str, Any]:
    """Sizes that most families' config.json names alike."""
    heads, head_dim = draw.choice([2, 3, 4]), draw.choice([8, 16, 24])
    return {
        "vocab_size": draw.randint(50, 90),
        "hidden_size": heads * head_dim,
        "num_hidden_layers": draw.choice([2, 3]),
        "num_attention_heads": heads,
        "intermediate_size": draw.choice([40, 64, 96]),
        "max_position_embeddings": draw.randint(30, 40),
        "initializer_range": 0.2,
        "pad_token_id": PAD,
    }


def _with_types(draw: random.Random) -> dict[str, Any]:
    return sizes(draw) | {"type_vocab_size": 2}


def _factorised(draw: random.Random) -> dict[str, Any]:
    return _with_types(draw) | {"embedding_size": draw.choice([16, 24])}


def _shared(draw: random.Random) -> dict[str, Any]:
    layers = draw.choice(
        [{"num_hidden_layers": 3}, {"num_hidden_layers": 4, "num_hidden_groups": 2}]
    )
    return _factorised(draw) | layers | {"inner_group_num": draw.choice([1, 2])}


def _modern(draw: random.Random) -> dict[str, Any]:
    layers = [draw.choice(["full_attention", "sliding_attention"]) for _ in range(4)]
    return sizes(draw) | {
        "num_hidden_layers": 5,
        "local_attention": draw.choice([4, 6]),
        "layer_types": [*layers, "sliding_attention"],
        "embedding_dropout": 0.0,
        "norm_bias": draw.choice([False, True]),
        "attention_bias": draw.choice([False, True]),
        "mlp_bias": draw.choice([False, True]),
        "classifier_bias": draw.choice([False, True]),
        "decoder_bias": draw.choice([False, True]),
        "classifier_activation": draw.choice(["gelu", "silu"]),
    }


def _euro(draw: random.Random) -> dict[str, Any]:
    groups, size = draw.choice([1, 2]), draw.choice([8, 16])
    factor = draw.choice([None, 2.0])
    linear = {} if factor is None else {"rope_type": "linear", "factor": factor}
    return sizes(draw) | {
        "num_attention_heads": 2 * groups,
        "num_key_value_heads": groups,
        "hidden_size": 48,
        "head_dim": size,
        "tie_word_embeddings": draw.choice([False, True]),
        "attention_bias": draw.choice([False, True]),
        "mlp_bias": draw.choice([False, True]),
        "rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0} | linear,
    }


def _nomic(draw: random.Random) -> dict[str, Any]:
    return _with_types(draw) | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}


def _esm2(draw: random.Random) -> dict[str, Any]:
    return sizes(draw) | {
        "position_embedding_type": "rotary",
        "token_dropout": True,
        "emb_layer_norm_before": False,
        "mask_token_id": 4,
        "rope_theta": draw.choice([100.0, 10_000.0]),
    }


def _esm1(draw: random.Random) -> dict[str, Any]:
    return _esm2(draw) | {"position_embedding_type": "absolute", "emb_layer_norm_before": True}


def _deberta(draw: random.Random) -> dict[str, Any]:
    return sizes(draw) | {
        "relative_attention": True,
        "pos_att_type": draw.choice([["p2c", "c2p"], "c2p|p2c", ["c2p"], ["p2c"]]),
        "share_att_key": draw.choice([False, True]),
        "norm_rel_ebd": draw.choice(["none", "layer_norm"]),
        "position_buckets": draw.choice([-1, 4, 6]),
        "max_relative_positions": draw.choice([7, 12, -1]),
        "position_biased_input": draw.choice([False, True]),
        "type_vocab_size": draw.choice([0, 2]),
    }


@dataclass(frozen=True)
class Case:
    """A class of transformers, and how to draw its sizes."""

    model_type: str
    architecture: str
    values: Callable[[random.Random], dict[str, Any]]
    dropout: tuple[str, ...] = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    """The names of the dropout rates."""

    def __str__(self) -> str:
        return self.architecture

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that our model has."""
        return FAMILIES[self.model_type].architectures[self.architecture]


_CASES = (
    Case("bert", "BertForPreTraining", _with_types),
    Case("bert", "BertForMaskedLM", _with_types),
    Case("roberta", "RobertaForMaskedLM", lambda draw: sizes(draw) | {"type_vocab_size": 1}),
    Case("electra", "ElectraForMaskedLM", _factorised),
    Case("electra", "ElectraForPreTraining", _factorised),
    Case("electra", "ElectraForPreTraining", lambda draw: _with_types(draw) | _square(draw)),
    Case("albert", "AlbertForPreTraining", _shared, ("classifier_dropout_prob",)),
    Case("albert", "AlbertForMaskedLM", _shared, ("classifier_dropout_prob",)),
    Case("modernbert", "ModernBertForMaskedLM", _modern, ()),
    Case("eurobert", "EuroBertForMaskedLM", _euro, ()),
    Case("mpnet", "MPNetForMaskedLM", sizes),
    Case("deberta-v2", "DebertaV2ForMaskedLM", _deberta),
    Case("deberta-v2", "DebertaV2ForMaskedLM", _with_types),
    Case("nomic_bert", "NomicBertForMaskedLM", _nomic),
    Case("esm", "EsmForMaskedLM", _esm2),
    Case("esm", "EsmForMaskedLM", _esm1),
    Case("esm", "EsmForMaskedLM", lambda draw: _esm2(draw) | {"token_dropout": False}),
)
# Older versions of transformers lack some.
CASES = tuple(case for case in _CASES if hasattr(transformers, case.architecture))


def _square(draw: random.Random) -> dict[str, Any]:
    return {"hidden_size": 48, "num_attention_heads": 3, "embedding_size": 48}


def stock_model(case: Case, seed: int, **changes: Any) -> Any:
    """transformers' model without dropout, with weights on which every part has an effect."""
    values = case.values(random.Random(derived(seed))) | dict.fromkeys(case.dropout, 0.0) | changes
    config = transformers.AutoConfig.for_model(case.model_type, **values)
    torch.manual_seed(derived(seed))
    model = getattr(transformers, case.architecture)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.normal_(0, 0.2)
    return model.train()


MASKS = {
    "right": [[1] * 10, [1] * 6 + [0] * 4, [1] * 9 + [0], [1] * 2 + [0] * 8],
    "left": [[0] * 4 + [1] * 6, [1] * 10, [0] + [1] * 9, [0] * 8 + [1] * 2],
}


def padded_and_packed(
    case: Case, vocab_size: int, types: int, seed: int, padding: str = "right"
) -> tuple[dict[str, Tensor], PackedInputs]:
    """The same batch for transformers (padded, keyword arguments) and packed.

    In the packed batch of a discriminator, `masked_labels` are of no use: its labels, 0 or 1 for
    each token, are in the padded one.
    """
    generator = torch.Generator().manual_seed(derived(seed))
    mask = torch.tensor(MASKS[padding])

    def integers(least: int, high: int) -> Tensor:
        return torch.randint(least, high, mask.shape, generator=generator)

    ids = torch.where(mask == 1, integers(PAD + 1, vocab_size), PAD)
    token_types = integers(0, max(types, 1)) * mask
    first = mask.cumsum(1) == 1
    chosen = (torch.rand(mask.shape, generator=generator) < 0.4) & (mask == 1) & ~first
    labels = torch.where(chosen, integers(0, vocab_size), -100)
    sentences = torch.randint(2, mask.shape[:1], generator=generator)
    batch = VarlenBatch.from_mask(mask)
    positions = (unpad(labels, batch) != -100).nonzero().flatten()
    packed = PackedInputs.build(
        batch=batch,
        input_ids=unpad(ids, batch),
        token_type_ids=unpad(token_types, batch),
        masked_positions=positions,
        masked_labels=unpad(labels, batch)[positions],
        next_sentence_labels=sentences,
    )
    padded = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if types:
        padded["token_type_ids"] = token_types
    if "rtd" in case.heads:
        padded["labels"] = integers(0, 2) * mask
    if "nsp" in case.heads:
        name = "sentence_order_label" if case.model_type == "albert" else "next_sentence_label"
        padded[name] = sentences
    return padded, packed


def own_loss(
    model: EncoderForPreTraining, padded: dict[str, Tensor], packed: PackedInputs
) -> Tensor:
    """The loss as transformers averages it."""
    if "rtd" in model.config.heads:
        out = model.detect(packed, unpad(padded["labels"], packed.batch))
        return out.rtd_loss_sum / packed.batch.total
    out = model(packed)
    sentences = max(packed.batch.batch_size, 1)
    return out.mlm_loss_sum / max(packed.num_masked, 1) + out.nsp_loss_sum / sentences
