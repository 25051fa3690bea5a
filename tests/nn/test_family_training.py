"""Training with every family: dropout, rows of the last layer, recomputation, empty batches."""

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from bert_unpad.batch import PackedInputs, VarlenBatch, unpad
from bert_unpad.nn import EncoderConfig, EncoderForPreTraining
from tests.support.encoder_parts import random_parts
from tests.support.tolerances import assert_same_gradients, assert_same_values

transformers = pytest.importorskip("transformers")

from tests.support.encoder_families import (
    CASES,
    Case,
    own_loss,
    padded_and_packed,
    stock_model,
)
from tests.support.seeds import derived

DROPOUT = {
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.2,
    "classifier_dropout_prob": 0.2,
}


def make_model(case: Case, seed: int, rates: dict[str, float] | None = None):
    values = case.values(random.Random(derived(seed))) | dict.fromkeys(case.dropout, 0.0)
    config = EncoderConfig.from_dict(
        {"model_type": case.model_type, "architectures": [case.architecture]} | values
    )
    if rates is not None:  # also such as the family's config.json has no name for
        if not config.embedding_norm:
            rates = rates | {"embedding_dropout_prob": 0.0}
        config = dataclasses.replace(config, model_type="bert_unpad", extra={}, **rates)
    torch.manual_seed(derived(seed))
    model = EncoderForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train(), *padded_and_packed(case, config.vocab_size, config.type_vocab_size, seed)


def step(
    model: EncoderForPreTraining, padded: dict[str, Tensor], packed: PackedInputs, seed: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of one step with dropout masks that `seed` determines."""
    model.zero_grad()
    torch.manual_seed(derived(seed))
    loss = own_loss(model, padded, packed)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return loss.detach(), {name: grad.clone() for name, grad in grads.items() if grad is not None}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dropout_follows_the_seed_and_stops_in_evaluation(case: Case) -> None:
    model, padded, packed = make_model(case, 1, DROPOUT)
    loss, grads = step(model, padded, packed)
    same, same_grads = step(model, padded, packed)
    assert loss == same
    assert all(torch.equal(grad, same_grads[name]) for name, grad in grads.items())
    assert loss != step(model, padded, packed, seed=1)[0]
    assert loss.isfinite()
    model.eval()
    plain, *_ = make_model(case, 1)
    assert step(model, padded, packed)[0] == step(plain.eval(), padded, packed)[0]


@pytest.mark.parametrize("name", DROPOUT)
def test_each_rate_has_an_effect(name: str) -> None:
    case = next(case for case in CASES if case.architecture == "AlbertForPreTraining")
    rates = dict.fromkeys(DROPOUT, 0.0) | {"feed_forward_dropout_prob": None}
    model, padded, packed = make_model(case, 2, rates | {name: 0.3})
    plain, *_ = make_model(case, 2, rates)
    assert step(model, padded, packed)[0] != step(plain, padded, packed)[0]


def test_modernberts_attention_has_one_rate_for_weights_and_output() -> None:
    """As transformers', which has `attention_dropout` for both."""
    case = next((case for case in CASES if case.model_type == "modernbert"), None)
    if case is None:
        pytest.skip("this transformers has no ModernBERT")
    theirs = stock_model(case, 9, attention_dropout=0.3).model.layers[0].attn
    config = EncoderConfig.from_dict({"model_type": "modernbert", "attention_dropout": 0.3})
    with torch.device("meta"):
        ours = EncoderForPreTraining(config).bert.encoder.layer[0].attention
    assert (ours.self.dropout_p, ours.output.dropout_p) == (0.3, 0.3)
    assert (theirs.attention_dropout, theirs.out_drop.p) == (0.3, 0.3)


@pytest.mark.parametrize("recompute", ["gelu", "layer"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_recomputing_changes_no_bit(case: Case, recompute: str) -> None:
    model, padded, packed = make_model(case, 3, DROPOUT)
    loss, grads = step(model, padded, packed)
    model.bert.encoder.recompute = recompute
    again, again_grads = step(model, padded, packed)
    assert loss == again
    assert all(torch.equal(grad, again_grads[name]) for name, grad in grads.items())


MLM = [case for case in CASES if "mlm" in case.heads]


@pytest.mark.parametrize("case", MLM, ids=str)
def test_rows_of_the_last_layer_equal_those_of_all_tokens(case: Case) -> None:
    model, padded, packed = make_model(case, 4)
    _, grads = step(model, padded, packed)
    rows, every = model.logits(packed), model.logits(packed, all_positions=True)
    assert_same_values(rows[0], every[0][packed.masked_positions])
    model.zero_grad()
    chosen = every[0][packed.masked_positions]
    loss = torch.nn.functional.cross_entropy(chosen, packed.masked_labels)
    if every[1] is not None:
        assert_same_values(rows[1], every[1])
        loss = loss + torch.nn.functional.cross_entropy(every[1], packed.next_sentence_labels)
    loss.backward()
    assert_same_gradients(grads, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("lengths", [[], [0, 0]])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_tokens_every_gradient_is_zero(case: Case, lengths: list[int]) -> None:
    model, *_ = make_model(case, 5)
    packed = PackedInputs.build(
        VarlenBatch.from_lengths(lengths), torch.empty(0, dtype=torch.int64)
    )
    out = model.detect(packed, packed.input_ids) if "rtd" in case.heads else model(packed)
    assert all(value == 0 for value in out)
    (out[0] + out[2 if len(out) == 4 else 0]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad == 0).all(), name


def test_tokens_that_do_not_count_for_the_discriminator() -> None:
    case = next(case for case in CASES if "rtd" in case.heads)
    model, padded, packed = make_model(case, 6)
    labels = unpad(padded["labels"], packed.batch)
    counted = torch.arange(labels.numel()) % 3 != 0
    out = model.detect(packed, torch.where(counted, labels, -100))
    logits = model.detector_logits(packed)[counted]
    want = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, labels[counted].float(), reduction="sum"
    )
    assert_same_values(out.rtd_loss_sum.detach(), want.detach())
    assert out.rtd_correct == ((logits > 0) == labels[counted].bool()).sum()
    with pytest.raises(ValueError, match=r"replaced: expected shape \[\d+\], got \[1\]"):
        model.detect(packed, labels[:1])


def test_a_head_that_is_not_there_is_named() -> None:
    detector = next(case for case in CASES if "rtd" in case.heads)
    model, _, packed = make_model(MLM[0], 7)
    with pytest.raises(ValueError, match=r"heads: expected a model with rtd, got \('mlm'"):
        model.detect(packed, packed.input_ids)
    model, _, packed = make_model(detector, 7)
    for call in (model, model.logits):
        with pytest.raises(ValueError, match=r"heads: expected a model with mlm, got \('rtd',\)"):
            call(packed)


def test_longer_than_the_positions_is_refused() -> None:
    case = next(case for case in CASES if case.model_type == "roberta")
    model, *_ = make_model(case, 8)
    limit = model.config.max_length
    assert limit == model.config.max_position_embeddings - 2

    def encode(length: int) -> Tensor:
        ids = torch.full((length,), 5)
        return model.encode(PackedInputs.build(VarlenBatch.from_lengths([length]), ids))

    assert encode(limit).shape[0] == limit
    with pytest.raises(ValueError, match=f"max_position_embeddings - 2 = {limit} tokens, got"):
        encode(limit + 1)


@pytest.mark.parametrize("seed", range(12))
def test_random_parts(seed: int) -> None:
    """Rows, recomputation and dropout with combinations of parts that no family has."""
    draw = random.Random(derived(seed))
    config = random_parts(draw)
    case = CASES[0]
    torch.manual_seed(derived(seed))
    model = EncoderForPreTraining(config).train()
    padded, packed = padded_and_packed(case, config.vocab_size, config.type_vocab_size, seed)
    model.config = dataclasses.replace(config, heads=tuple({*config.heads} - {"rtd"}))
    loss, grads = step(model, padded, packed)
    for recompute in ("gelu", "layer"):
        model.bert.encoder.recompute = recompute
        again, again_grads = step(model, padded, packed)
        assert loss == again
        assert all(torch.equal(grad, again_grads[name]) for name, grad in grads.items())
    model.eval()
    rows, every = model.logits(packed), model.logits(packed, all_positions=True)
    assert_same_values(rows[0], every[0][packed.masked_positions])
