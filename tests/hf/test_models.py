"""Unpadded Hugging Face models against the stock ones: outputs, losses, gradients."""

import warnings

import pytest
import torch

from bert_unpad import hf
from tests.support.hf_models import (
    BATCH,
    MASKS,
    NAMES,
    SEQLEN,
    VOCAB,
    assert_same_step,
    call_arguments,
    clone,
    make,
    real,
    run,
)
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_values

pytestmark = [
    pytest.mark.filterwarnings("ignore::bert_unpad.hf.StockFallbackWarning"),
]


RELATIVE = ("DebertaV2", "MPNet")


def reads_first(name: str) -> bool:
    """Whether the model reads its first column, so that padding there is left to stock."""
    if name.startswith("Bert"):
        return not name.endswith(("MaskedLM", "TokenClassification", "QuestionAnswering"))
    if name.endswith(("SequenceClassification", "MultipleChoice")):
        return True
    return name.endswith("Model") and not name.startswith(("Electra", "DistilBert", "DebertaV2"))


def counts_holes(name: str, mask: torch.Tensor | None) -> bool:
    """Whether padding between tokens counts in the model's distances, so that stock computes it."""
    if mask is None or not name.startswith(RELATIVE):
        return False
    kept = [row.nonzero().flatten() for row in mask]
    return any(len(row) and int(row[-1] - row[0]) >= len(row) for row in kept)


CASES = [
    (name, kind)
    for name in NAMES
    for kind in MASKS
    # The families share all code that sees a mask, so some kinds are enough for the others.
    if name.startswith("Bert")
    or kind in ("none", "right", "first")
    or (name.startswith(RELATIVE) and kind in ("left", "holes"))
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_equals_stock(name, kind, packed_calls):
    mask = MASKS[kind]
    stock = make(name)
    ours = hf.unpad(clone(stock))
    call = call_arguments(name, mask)
    got, want = run(ours, call), run(stock, call)
    packed = not (reads_first(name) and kind in ("left", "first", "empty"))
    packed = packed and not counts_holes(name, mask)
    tokens = BATCH * SEQLEN if mask is None else int(mask.sum())
    tokens *= 2 if name.endswith("MultipleChoice") else 1
    if name == "ElectraForPreTraining" and kind == "none":
        packed = True  # its loss then counts all positions
    # `run` reads the lazy logits, for which the last layer then computes all rows.
    layers = 3 if name.endswith("MaskedLM") or name == "BertForPreTraining" else 2
    assert packed_calls == ([tokens] * layers if packed else [])
    # The loss of question answering is a softmax over all columns, padding included.
    padded = kind not in ("none", "ones")
    if name.endswith("QuestionAnswering") and padded and packed:
        for key in ("start_logits", "end_logits"):
            assert_same_values(real(got[0], mask)[key], real(want[0], mask)[key])
        return
    assert_same_step(got, want, mask)


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "RobertaForMaskedLM"])
@pytest.mark.parametrize("given", ["position_ids", "inputs_embeds", "positional"])
def test_other_ways_to_call(name, given):
    mask = MASKS["right"]
    stock = make(name)
    ours = hf.unpad(clone(stock))
    call = call_arguments(name, mask)
    if given == "position_ids":
        call["position_ids"] = (torch.arange(SEQLEN) * 2 + 1)[None]
    elif given == "inputs_embeds":
        generator = torch.Generator().manual_seed(derived(4))
        call["inputs_embeds"] = torch.randn(BATCH, SEQLEN, 64, generator=generator)
        del call["input_ids"]
    got, want = run(ours, call), run(stock, call)
    if given == "positional":
        ids, labels = call.pop("input_ids"), call.get("labels")
        out = ours(ids, mask, call["token_type_ids"], labels=labels, return_dict=False)
        assert isinstance(out, tuple)
        torch.testing.assert_close(out[0].detach(), next(iter(got[0].values())))
    assert_same_step(got, want, mask)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu_pytorch_tanh", "relu", "gelu_fast"])
def test_activations(activation, packed_calls):
    mask = MASKS["right"]
    stock = make("BertForMaskedLM", hidden_act=activation)
    ours = hf.unpad(clone(stock))
    call = call_arguments("BertForMaskedLM", mask)
    assert_same_step(run(ours, call), run(stock, call), mask)
    assert packed_calls


BF16_CASES = [
    (name, how)
    for how in ("autocast", "weights")
    for name in ("BertModel", "BertForPreTraining", "DistilBertForMaskedLM",
                 "RobertaForTokenClassification", "ElectraForSequenceClassification",
                 "BertForMultipleChoice")
    if how == "autocast" or not name.endswith(("Classification", "Choice"))
]  # fmt: skip


@pytest.mark.parametrize(("name", "how"), BF16_CASES)
def test_bf16_error_is_at_most_twice_that_of_stock(name, how):
    mask = MASKS["right"]
    exact, stock = make(name).double(), make(name)
    ours = hf.unpad(make(name))
    if how == "weights":
        stock, ours = stock.bfloat16(), ours.bfloat16()
    errors = {"stock": 0.0, "ours": 0.0}
    for seed in range(3):
        call = call_arguments(name, mask, seed=seed)
        want = run(exact, call)
        for key, model in (("stock", stock), ("ours", ours)):
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                got = run(model, call)
            for part, reference in zip(got, want, strict=True):
                for field, value in real(reference, mask).items():
                    difference = real(part, mask)[field].double() - value
                    errors[key] += (difference.norm() / (value.norm() + 1e-2)).item()
            if key == "ours":
                plain = stock(**call)
                assert got[0].keys() == plain.keys()
    assert errors["ours"] <= 2 * errors["stock"]
    assert errors["stock"] > 0


def test_loss_without_labels_and_with_all_ignored():
    stock = make("BertForMaskedLM")
    ours = hf.unpad(clone(stock))
    call = call_arguments("BertForMaskedLM", MASKS["right"])
    call["labels"] = torch.full_like(call["labels"], -100)
    assert ours(**call).loss.isnan()
    assert stock(**call).loss.isnan()
    del call["labels"]
    assert ours(**call).loss is None
    # BertForPreTraining has no loss unless both labels are there.
    pretraining = hf.unpad(make("BertForPreTraining"))
    call = call_arguments("BertForPreTraining", MASKS["right"])
    del call["next_sentence_label"]
    assert pretraining(**call).loss is None


@pytest.mark.parametrize(
    "name",
    ["BertForMaskedLM", "BertForPreTraining", "BertForTokenClassification",
     "DebertaV2ForMaskedLM", "MPNetForTokenClassification"],
)  # fmt: skip
def test_labels_at_padded_positions_count_as_in_stock(name, packed_calls):
    mask = MASKS["right"]
    stock = make(name)
    ours = hf.unpad(clone(stock))
    call = call_arguments(name, mask)
    call["labels"][3, 5] = 2
    got, want = run(ours, call), run(stock, call)
    assert packed_calls == []
    assert_same_step(got, want, None)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("QuestionAnswering")])
def test_span_loss_of_stock(name, packed_calls):
    stock = make(name)
    ours = hf.unpad(clone(stock), span_loss="stock")
    call = call_arguments(name, MASKS["right"])
    assert_same_step(run(ours, call), run(stock, call), None)
    assert packed_calls == []
    ours(**{key: value for key, value in call.items() if not key.endswith("positions")})
    ours(**call | {"attention_mask": MASKS["ones"]})
    assert len(packed_calls) == 4  # without a loss or without padding
    with pytest.raises(ValueError, match="span_loss: expected one of packed, stock, got 'all'"):
        hf.unpad(ours, span_loss="all")


def test_lazy_logits():
    mask = MASKS["right"]
    stock = make("BertForMaskedLM")
    call = call_arguments("BertForMaskedLM", mask)
    ours = hf.unpad(clone(stock))
    out = ours(**call)
    lazy = dict(out.items())["logits"]
    assert not lazy.computed
    assert not lazy.float().computed
    assert lazy.dtype == torch.float32
    assert out["loss"] is out[0]
    assert not lazy.computed
    assert isinstance(out, type(stock(**call)))
    want = stock(**call).logits
    kept = mask.bool()
    for logits in (out.logits, out["logits"], out[1], out.to_tuple()[1], torch.add(lazy, 0)):
        assert isinstance(logits, torch.Tensor)
        assert logits.shape == (BATCH, SEQLEN, VOCAB)
        assert_same_values(logits[kept], want[kept])
    assert lazy.computed
    assert lazy.shape == want.shape
    in_evaluation = ours.eval()(**call)
    for walked in (dict(in_evaluation.items())["logits"], list(in_evaluation.values())[1]):
        assert type(walked) is torch.Tensor
        assert_same_values(walked[kept], want[kept])
    # A loss of the user's own on the logits reaches every weight.
    out.logits[kept].logsumexp(-1).sum().backward()
    want[kept].logsumexp(-1).sum().backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["full", "none"])
def test_how_logits_are_returned(how):
    ours = hf.unpad(make("BertForMaskedLM"), logits=how)
    call = call_arguments("BertForMaskedLM", MASKS["right"])
    logits = dict(ours(**call).items()).get("logits")
    assert logits is None if how == "none" else logits.shape == (BATCH, SEQLEN, VOCAB)
    del call["labels"]
    assert ours(**call).logits.shape == (BATCH, SEQLEN, VOCAB)


def test_lazy_logits_survive_a_walk_over_the_outputs():
    """accelerate rebuilds outputs from a dict to cast 16-bit tensors; FSDP2 from a pytree."""
    ours = hf.unpad(make("BertForMaskedLM"))
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(**call_arguments("BertForMaskedLM", MASKS["right"]))
    assert dict(out.items())["logits"].dtype == torch.bfloat16
    rebuilt = type(out)({k: v.float() for k, v in out.items()})
    leaves, spec = torch.utils._pytree.tree_flatten(rebuilt)
    rebuilt = torch.utils._pytree.tree_unflatten(leaves, spec)
    lazy = dict(rebuilt.items())["logits"]
    assert not lazy.computed
    assert rebuilt.logits.dtype == torch.float32
    assert rebuilt.loss == out.loss


_FULL_MASK = MASKS["right"][:, None, None, :].bool().expand(-1, 1, SEQLEN, -1)
STOCK_ONLY = {
    "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True},
    "4-D mask": {"attention_mask": _FULL_MASK},
    "soft mask": {"attention_mask": MASKS["right"] * 2},
    "use_cache": {"use_cache": True},
}


@pytest.mark.parametrize("case", STOCK_ONLY)
def test_what_is_left_to_stock_is_stock_bit_for_bit_and_said_once(case, packed_calls):
    stock = make("BertModel").eval()
    ours = hf.unpad(clone(stock))
    call = call_arguments("BertModel", MASKS["right"]) | STOCK_ONLY[case]
    from bert_unpad.hf import fallback

    fallback._said.clear()
    with pytest.warns(hf.StockFallbackWarning, match="leaves this call to the stock modules"):
        got = ours(**call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours(**call)
    want = stock(**call)
    assert packed_calls == []
    assert got.keys() == want.keys()
    assert torch.equal(got.last_hidden_state, want.last_hidden_state)
    if case == "output_hidden_states":
        for a, b in zip(got.hidden_states, want.hidden_states, strict=True):
            assert torch.equal(a, b)


def test_hooks_inside_layers_are_honoured(packed_calls):
    stock = make("BertModel")
    ours = hf.unpad(clone(stock))
    seen = []
    handle = ours.encoder.layer[0].attention.self.register_forward_hook(
        lambda module, args, out: seen.append(out[0].shape)
    )
    call = call_arguments("BertModel", MASKS["right"])
    ours(**call)
    assert seen == [(BATCH, SEQLEN, 64)]
    assert packed_calls == []
    handle.remove()
    # One on a module that is called anyway runs, and may change its result.
    ours.encoder.layer[0].intermediate.dense.register_forward_hook(lambda m, a, out: out * 0.5)
    stock.encoder.layer[0].intermediate.dense.register_forward_hook(lambda m, a, out: out * 0.5)
    assert_same_step(run(ours, call), run(stock, call), call["attention_mask"])
    assert packed_calls


def test_wrong_calls_raise():
    ours = hf.unpad(make("BertModel"))
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        ours()
    ids = torch.zeros(1, 25, dtype=torch.int64)
    with pytest.raises((IndexError, RuntimeError)):
        ours(input_ids=ids)  # longer than the position embeddings
