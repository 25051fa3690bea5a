"""`unpad(model, verify=True)`: right models pass, and planted faults are found."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from bert_unpad import hf, ops
from bert_unpad.flash import functions
from bert_unpad.hf import packing as packings
from bert_unpad.hf.packing import Packing
from bert_unpad.hf.stock_modules import STOCK_FAMILIES
from tests.hf.test_stock_modules import KNOWN, RIGHT, batch, make
from tests.support.hf_models import make as make_swapped

pytestmark = pytest.mark.filterwarnings("error::bert_unpad.hf.StockFallbackWarning")
SWAPPED = ["Bert", "Roberta", "Electra", "DistilBert"]
FROM_MASK = Packing.from_mask  # the right one
COUNT_IDS = {f.prefix for f in STOCK_FAMILIES if f.counts_ids} | {"Roberta"}


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
    with pytest.raises(hf.VerificationError, match="the model has its stock modules again"):
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
    monkeypatch.setattr(functions, "bounds", lambda *_arguments: (-1, -1))
    assert_found(model, stock)


def test_the_message_names_the_first_layer_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf.unpad(make("NomicBert"), verify=True)
    plant_attention(monkeypatch, ATTENTION["heads permuted"], 0)  # the second call
    with pytest.raises(hf.VerificationError, match=r"NomicBertModel: .*\.1: in float32 stock and"):
        model(**batch(RIGHT))
