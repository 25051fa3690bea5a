"""Layers that are compiled, wrapped or shared one by one compute what stock does."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from bert_unpad import hf
from bert_unpad.hf.fallback import StockFallbackWarning
from tests.support.hf_models import (
    MASKS,
    NAMES,
    assert_same_step,
    call_arguments,
    clone,
    make,
    run,
)
from tests.support.tolerances import assert_same_values

pytestmark = pytest.mark.filterwarnings("ignore")
MASK = MASKS["right"]


class Wrapper(nn.Module):
    """A module of the user's own around a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def layers(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def each(wrap):
    def change(model: nn.Module) -> nn.Module:
        found = layers(model)
        for index, layer in enumerate(found):
            found[index] = wrap(layer)
        return model

    return change


def compile_in_place(model: nn.Module) -> nn.Module:
    for layer in layers(model):
        layer.compile(backend="eager")
    return model


def share(model: nn.Module) -> nn.Module:
    layers(model)[1] = layers(model)[0]
    return model


def regions(model: nn.Module) -> nn.Module:
    return pytest.importorskip("accelerate").utils.compile_regions(model, backend="eager")


WAYS = {
    "layer.compile()": compile_in_place,
    "torch.compile(layer)": each(lambda layer: torch.compile(layer, backend="eager")),
    "checkpoint_wrapper": each(checkpoint_wrapper),
    "a plain module": each(Wrapper),
    "one layer twice": share,
}
PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", ".inner")


def check(name: str, way, seeds: tuple[int, ...]) -> None:
    stock = make(name)
    ours = way(hf.unpad(clone(stock)))
    if way is share:
        share(stock)
    for seed in seeds:
        call = call_arguments(name, MASK, seed=seed)
        if name.endswith("ForQuestionAnswering"):  # whose loss takes padding in
            call["attention_mask"] = None
        outputs, gradients = run(ours, call)
        for prefix in PREFIXES:
            gradients = {key.replace(prefix, ""): value for key, value in gradients.items()}
        assert_same_step((outputs, gradients), run(stock, call), call["attention_mask"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_every_head(name, way):
    check(name, WAYS[way], (1, 2))


@pytest.mark.parametrize("name", ["BertForMaskedLM", "DistilBertForSequenceClassification"])
def test_regional_compilation(name):
    pytest.importorskip("accelerate")
    torch._dynamo.reset()
    check(name, regions, (1,))


@pytest.mark.slow
def test_inductor():
    torch._dynamo.reset()
    check("BertForSequenceClassification", each(torch.compile), (1, 2))


@pytest.mark.parametrize("when", ["before unpad", "after unpad"])
def test_packed_through_wrappers_of_pytorch(when, packed_calls):
    """Wrappers that pass all arguments on cost nothing; others leave the call to stock."""
    name = "BertForSequenceClassification"
    stock = make(name)
    call = call_arguments(name, MASK)
    wrap = each(checkpoint_wrapper)
    ours = hf.unpad(wrap(clone(stock))) if when == "before unpad" else wrap(hf.unpad(clone(stock)))
    with torch.no_grad():
        assert_same_values(ours(**call).logits, stock(**call).logits)
    assert len(packed_calls) == 2
    if when == "before unpad":
        with pytest.raises(ValueError, match="layer 0 is a Wrapper, not a BertLayer"):
            hf.unpad(each(Wrapper)(clone(stock)))


def test_replaced_parts_are_left_to_stock(packed_calls, monkeypatch):
    """A layer, its stack, a forward function or a part of a layer that `unpad` has not seen."""
    from bert_unpad.hf import fallback

    def layer(model):
        layers(model)[1] = type(layers(stock)[1])(model.config)

    def stack(model):
        model.bert.encoder = clone(stock.bert.encoder)

    def forward(module):
        original = hf.repad(clone(module)).forward
        module.forward = lambda *args, **kwargs: original(*args, **kwargs)

    def part(model):
        attention = layers(model)[0].attention.self

        class Half(type(attention)):
            def forward(self, *args, **kwargs):
                out, weights = super().forward(*args, **kwargs)
                return out / 2, weights

        attention.__class__ = Half

    changes = {
        "layer 1 was replaced": layer,
        "its stack of layers": stack,
        "layer 0 was replaced": lambda model: forward(layers(model)[0]),
        "or its forward function": lambda model: forward(model.bert),
        "or was replaced": part,
    }
    stock = make("BertForMaskedLM")
    call = call_arguments("BertForMaskedLM", MASK)
    for reason, change in changes.items():
        ours = hf.unpad(clone(stock))
        change(ours)
        want = run(hf.repad(clone(ours)), call)
        monkeypatch.setattr(fallback, "_said", set())
        with pytest.warns(StockFallbackWarning, match=reason):
            got = run(ours, call)
        assert_same_step(got, want, MASK)
        assert packed_calls == []


def test_a_head_of_the_users_own_is_called():
    stock = make("RobertaForMaskedLM")

    class Doubled(type(stock.lm_head)):
        def forward(self, features):
            return 2 * super().forward(features)

    stock.lm_head.__class__ = Doubled
    call = call_arguments("RobertaForMaskedLM", MASK)
    assert_same_step(run(hf.unpad(clone(stock)), call), run(stock, call), MASK)
