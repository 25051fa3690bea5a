"""`unpad(model, verify=True)` and `verify(model)`: right models pass, planted faults are found."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.models.modernbert import modeling_modernbert

from bert_unpad import hf, ops
from bert_unpad.flash import functions
from bert_unpad.hf import packing as packings
from bert_unpad.hf.flash import NAME
from bert_unpad.hf.layer_parts import LayerAdapter
from bert_unpad.hf.packing import Packing
from bert_unpad.hf.stock_modules import STOCK_FAMILIES
from tests.hf.test_stock_modules import KNOWN, RIGHT, batch, make
from tests.support.hf_models import make as make_swapped
from tests.support.seeds import derived

pytestmark = pytest.mark.filterwarnings("error::bert_unpad.hf.StockFallbackWarning")
SWAPPED = ["Bert", "Roberta", "Electra", "DistilBert", "MPNet", "DebertaV2"]
FROM_MASK = Packing.from_mask  # the right one
COUNT_IDS = {f.prefix for f in STOCK_FAMILIES if f.counts_ids} | {"Roberta", "MPNet"}


def stock_model(name: str) -> nn.Module:
    return make_swapped(f"{name}Model").eval() if name in SWAPPED else make(name)


@pytest.mark.parametrize("name", SWAPPED + KNOWN)
def test_right_models_pass(name: str) -> None:
    stock = stock_model(name)
    for kind in (torch.float32, torch.bfloat16):
        model = hf.unpad(copy.deepcopy(stock).to(kind), verify=True)
        kept = copy.deepcopy(model.state_dict())
        for mask in (None, RIGHT, RIGHT):  # the second is the first with padding
            out = model(**batch(mask))[0]
        assert "_bert_unpad_verify" not in vars(model)
        assert out.dtype == kind
        for name, value in model.state_dict().items():
            assert torch.equal(value, kept[name])
        assert all(p.grad is None for p in model.parameters())
    model = hf.unpad(copy.deepcopy(stock), verify=True)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        model(**batch(RIGHT))


def test_embedded_tokens_keep_their_graph() -> None:
    model = hf.unpad(make("ModernBert"), verify=True)
    states = torch.randn(*RIGHT.shape, 64, requires_grad=True)
    scaled = 2 * states
    out = model(inputs_embeds=scaled, attention_mask=RIGHT.long())[0]
    assert states.grad is None
    out.sum().backward()
    assert states.grad is not None


def test_heads_and_training_pass() -> None:
    for model, base in (
        (make_swapped("BertForMaskedLM"), "bert"),
        (make("ModernBert", "ForMaskedLM"), "model"),
    ):
        ours = hf.unpad(model.train(), verify=True)
        assert vars(getattr(ours, base))["_bert_unpad_verify"]
        labels = batch(RIGHT)["input_ids"].masked_fill(~RIGHT, -100)
        ours(**batch(RIGHT), labels=labels).loss.backward()
        assert ours.training
        assert "_bert_unpad_verify" not in vars(getattr(ours, base))


def of_packing(change: Callable[[Packing], Packing]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Packing, "from_mask", lambda *args, **more: change(FROM_MASK(*args, **more)))

    return plant


def with_mask(change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            Packing, "from_mask", lambda mask, *args, **more: FROM_MASK(change(mask), *args, **more)
        )

    return plant


def with_lengths(packing: Packing, lengths: Tensor) -> Packing:
    wrong = FROM_MASK(torch.arange(int(lengths.max())) < lengths[:, None], False)
    return dataclasses.replace(
        packing, batch=wrong.batch, cu_seqlens=wrong.cu_seqlens, max_seqlen=wrong.max_seqlen
    )


def stale(packing: Packing) -> Packing:
    return with_lengths(packing, packing.cu_seqlens.diff().flip(0))


def joined(packing: Packing) -> Packing:
    lengths = packing.cu_seqlens.diff()
    return with_lengths(packing, torch.cat([lengths[:1] + lengths[1:2], lengths[2:]]))


def shifted(packing: Packing) -> Packing:
    columns = packing.columns.clone()
    columns[4:9] += 1
    return dataclasses.replace(packing, columns=columns)


def drop_one(mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[0, -1] = 0
    return mask


def rolled(patch: pytest.MonkeyPatch) -> None:
    right = Packing.pad
    patch.setattr(Packing, "pad", lambda self, x: right(self, x.roll(1, 1)))


PACKING = {
    "a token is left out": with_mask(drop_one),
    "padding leaks": with_mask(torch.ones_like),
    "cu_seqlens of another batch": of_packing(stale),
    "two sequences joined": of_packing(joined),
    "a position shifted": of_packing(shifted),
    "rows rolled": rolled,
}


class ScaledGradient(torch.autograd.Function):
    """Right outputs, and gradients 2 % too large."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy * 1.02


ATTENTION: dict[str, Callable[[Tensor], Tensor]] = {
    "heads permuted": lambda x: x.roll(1, -2),
    "a head's results are zero": lambda x: torch.cat([x[..., :-1, :], 0 * x[..., -1:, :]], -2),
    "a token's results are another's": lambda x: x.roll(1, 0),
    "1 % too large": lambda x: 1.01 * x,
    "a wrong gradient": ScaledGradient.apply,
}
LAYERS = 2


def plant_attention(patch: pytest.MonkeyPatch, fault: Callable[[Tensor], Tensor], where: int):
    """Puts a fault into one layer's attention."""
    calls = 0

    def wrap(right: Callable) -> Callable:
        def attention(*args, **more):
            nonlocal calls
            out = right(*args, **more)
            calls += 1
            if calls % LAYERS != where:
                return out
            return (fault(out[0]), *out[1:]) if isinstance(out, tuple) else fault(out)

        return attention

    names = ("varlen_attention", "varlen_cross_attention")
    raw = {name: wrap(getattr(torch.ops.bert_unpad, name)) for name in names}
    patch.setattr(functions, "_ops", SimpleNamespace(**raw))
    wrapped = {name: wrap(getattr(ops, name)) for name in names}
    patch.setattr(packings, "ops", SimpleNamespace(**{**vars(ops), **wrapped}))


def assert_found(model: nn.Module, stock: nn.Module) -> None:
    with pytest.raises(hf.VerificationError, match="the model is stock again"):
        model(**batch(RIGHT))
    assert type(model) is type(stock)
    assert [type(m) for m in model.modules()] == [type(m) for m in stock.modules()]
    assert model.config._attn_implementation == stock.config._attn_implementation
    assert torch.equal(model(**batch(RIGHT))[0], stock(**batch(RIGHT))[0])


@pytest.mark.parametrize("fault", PACKING)
@pytest.mark.parametrize("name", SWAPPED + KNOWN)
def test_faults_of_packing(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "a position shifted" and name in COUNT_IDS:
        pytest.skip("its positions are counted from the ids")
    if fault == "a position shifted" and name == "DebertaV2":
        pytest.skip("it has no learned positions")
    if fault == "a position shifted" and name == "Esm":
        pytest.skip("its learned positions are the padded batch's, and rotary ones come with them")
    stock = stock_model(name)
    model = hf.unpad(copy.deepcopy(stock), verify=True)
    PACKING[fault](monkeypatch)
    assert_found(model, stock)


@pytest.mark.parametrize("where", range(LAYERS))
@pytest.mark.parametrize("fault", ATTENTION)
@pytest.mark.parametrize("name", SWAPPED + KNOWN)
def test_faults_of_attention(
    name: str, fault: str, where: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = stock_model(name)
    model = hf.unpad(copy.deepcopy(stock), verify=True)
    plant_attention(monkeypatch, ATTENTION[fault], where)
    assert_found(model, stock)


def test_an_ignored_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = make("ModernBert")
    model = hf.unpad(copy.deepcopy(stock), verify=True)
    monkeypatch.setattr(LayerAdapter, "window", lambda *_arguments: (-1, -1))
    assert_found(model, stock)


def test_the_message_names_the_first_layer_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf.unpad(make("NomicBert"), verify=True)
    plant_attention(monkeypatch, ATTENTION["heads permuted"], 0)  # the second call
    with pytest.raises(hf.VerificationError, match=r"NomicBertModel: .*\.1: in float32 stock and"):
        model(**batch(RIGHT))


# With the string, attention is ours, and all else the model's own. transformers 5.0 does not let
# ModernBERT's be chosen.
WINDOWS = hasattr(modeling_modernbert, "ALL_ATTENTION_FUNCTIONS")
UNSERVED = ("MPNet", "DebertaV2") if WINDOWS else ("MPNet", "DebertaV2", "ModernBert")
STRINGS = [name for name in SWAPPED + KNOWN if name not in UNSERVED]


def string_models(name: str) -> tuple[nn.Module, nn.Module]:
    """The stock model, and one whose first batch with padding is checked."""
    models = [stock_model(name) for _ in range(2)]
    for model, attention in zip(models, ("sdpa", NAME), strict=True):
        model.set_attn_implementation(attention)
    return models[0], hf.verify(models[1])


@pytest.mark.parametrize("name", STRINGS)
def test_right_strings_pass(name: str) -> None:
    stock, model = string_models(name)
    plain, copied = stock_model(name), copy.deepcopy(model)
    plain.set_attn_implementation(NAME)
    model(**batch(None))
    assert model._forward_pre_hooks
    for _ in range(2):
        out = model(**batch(RIGHT))[0]
    assert torch.equal(out, plain(**batch(RIGHT))[0])
    again = pickle.loads(pickle.dumps(model))
    for found in (model, again, copy.deepcopy(model)):
        assert vars(found).keys() == vars(plain).keys()
        assert not found._forward_pre_hooks
        assert not found._forward_pre_hooks_with_kwargs
        assert found.config._attn_implementation == NAME
        for key, value in found.state_dict().items():
            assert torch.equal(value, stock.state_dict()[key])
    assert all(p.grad is None for p in model.parameters())
    call = batch(RIGHT)
    copied(call.pop("input_ids"), **call)
    assert not copied._forward_pre_hooks


def test_a_string_is_checked_inside_of_heads_and_as_the_model_computes() -> None:
    model = make_swapped("BertForMaskedLM")
    with pytest.raises(ValueError, match="attn_implementation: expected 'bert_unpad_flash'"):
        hf.verify(model)
    model.set_attn_implementation(NAME)
    hf.verify(model.train())
    labels = batch(RIGHT)["input_ids"].masked_fill(~RIGHT, -100)
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch(RIGHT), labels=labels).loss.backward()
    assert model.training
    assert not model.bert._forward_pre_hooks


def joined_sequences(patch: pytest.MonkeyPatch) -> None:
    right = functions._attend

    def wrong(name: str, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, *args: object):
        cu = torch.cat([cu_q[:1], cu_q[2:]])
        return right(name, q, k, v, cu, cu, int(cu.diff().max()), int(cu.diff().max()), *args[3:])

    patch.setattr(functions, "_attend", wrong)


def with_string_mask(change: Callable[[Tensor], Tensor | None]):
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = masking_utils.flash_attention_mask

        def wrong(*args: object, **more: object) -> Tensor | None:
            mask = right(*args, **more)
            return None if mask is None else change(mask)

        patch.setattr(masking_utils, "flash_attention_mask", wrong)

    return plant


STRING_FAULTS = {
    "padding leaks": with_string_mask(lambda _mask: None),
    "a token is left out": with_string_mask(drop_one),
    "the mask of another row": with_string_mask(lambda mask: mask.roll(1, 0)),
    "two sequences joined": joined_sequences,
    "causal": lambda patch: patch.setattr(functions, "bounds", lambda *_arguments: (-1, 0)),
    "a narrow window": lambda patch: patch.setattr(functions, "bounds", lambda *_args: (2, 2)),
    "another scale": lambda patch: patch.setattr(functions, "scale_of", lambda *_arguments: 0.3),
}


def assert_string_found(model: nn.Module, stock: nn.Module) -> None:
    with pytest.raises(hf.VerificationError, match="the model is stock again"):
        model(**batch(RIGHT))
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks
    assert torch.equal(model(**batch(RIGHT))[0], stock(**batch(RIGHT))[0])


@pytest.mark.parametrize("fault", STRING_FAULTS)
@pytest.mark.parametrize("name", STRINGS)
def test_faults_of_a_string(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = string_models(name)
    STRING_FAULTS[fault](monkeypatch)
    assert_string_found(model, stock)


@pytest.mark.parametrize("where", range(LAYERS))
@pytest.mark.parametrize("fault", ATTENTION)
@pytest.mark.parametrize("name", ["Bert", "DistilBert", "Albert"])
def test_faults_of_a_string_s_attention(
    name: str, fault: str, where: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = string_models(name)
    plant_attention(monkeypatch, ATTENTION[fault], where)
    assert_string_found(model, stock)


@pytest.mark.skipif(not WINDOWS, reason="attention cannot be chosen")
def test_a_string_s_ignored_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = string_models("ModernBert")
    monkeypatch.setattr(functions, "bounds", lambda *_arguments: (-1, -1))
    assert_string_found(model, stock)


def dropping_model(name: str) -> nn.Module:
    model = stock_model(name) if name in SWAPPED else make(name, **RATES)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and name in SWAPPED:
            module.p = 0.2
    return model.train()


RATES = {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.125}
RATES |= {"attention_dropout": 0.125, "mlp_dropout": 0.3, "embedding_dropout": 0.35}
DROPPING = [(name, "varlen_attention") for name in SWAPPED + KNOWN]
DROPPING += [(x, "dropout_add_layer_norm") for x in SWAPPED + KNOWN if x != "EuroBert"]


@pytest.mark.parametrize("name", SWAPPED + KNOWN)
def test_dropout_of_the_same_rates_passes(name: str) -> None:
    model = hf.unpad(dropping_model(name), verify=True)
    torch.manual_seed(derived(4))
    model(**batch(RIGHT))
    assert "_bert_unpad_verify" not in vars(model)
    after = torch.rand(1)
    torch.manual_seed(derived(4))
    model(**batch(RIGHT))
    assert torch.equal(torch.rand(1), after)  # the check has drawn nothing


@pytest.mark.parametrize("change", [lambda p: 0.0, lambda p: 2 * p], ids=["none", "twice"])
@pytest.mark.parametrize(("name", "operator"), DROPPING)
def test_dropout_of_another_rate_is_found(
    name: str, operator: str, change: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf.unpad(dropping_model(name), verify=True)
    right = getattr(ops, operator)

    def wrong(*arguments: object, dropout_p: float, **more: object) -> Tensor:
        return right(*arguments, dropout_p=change(dropout_p), **more)

    monkeypatch.setattr(ops, operator, wrong)
    with pytest.raises(hf.VerificationError, match="dropout: stock modules drop at the rates"):
        model(**batch(RIGHT))


def test_dropout_of_another_rate_is_found_in_a_string(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dropping_model("Ernie")
    model.set_attn_implementation(NAME)
    right = torch.ops.bert_unpad.varlen_attention
    rate = RATES["attention_probs_dropout_prob"]

    def wrong(*arguments: object, **more: object) -> object:
        return right(*(2 * x if x is rate else x for x in arguments), **more)

    monkeypatch.setattr(functions, "_ops", SimpleNamespace(varlen_attention=wrong))
    hf.verify(model)
    with pytest.raises(hf.VerificationError, match="dropout: stock modules drop at the rates"):
        model(**batch(RIGHT))
