"""Layers as one operator where nothing is trained, in fp32 and in 8 bits."""

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

transformers = pytest.importorskip("transformers", minversion="5.0")

from bert_unpad import hf
from bert_unpad.hf import inference
from tests.support.hf_models import MASKS, call_arguments, clone, make
from tests.support.tolerances import assert_same_values

MASK = MASKS["right"]
NAMES = [
    *("BertModel", "BertForSequenceClassification", "DistilBertModel", "RobertaForMaskedLM"),
    *("DebertaV2Model", "MPNetModel", "MPNetForSequenceClassification"),
]


@pytest.fixture
def whole_layers(monkeypatch) -> list[bool]:
    """Grows by whether its weights are in 8 bits with every layer that is one operator."""
    calls: list[bool] = []
    layers, project = inference.encoder_layers, inference.encoder_project

    def encoder_layers(x, cu_seqlens, longest, parameters, shapes, **more):
        firsts = parameters[:: len(parameters) // len(shapes)]
        calls.extend(weight.dtype == torch.uint8 for weight in firsts)
        return layers(x, cu_seqlens, longest, parameters, shapes, **more)

    def encoder_project(x, parameters, shape):
        calls.append(parameters[0].dtype == torch.uint8)
        return project(x, parameters, shape)

    monkeypatch.setattr(inference, "encoder_layers", encoder_layers)
    monkeypatch.setattr(inference, "encoder_project", encoder_project)
    return calls


def first(model: nn.Module, call: dict[str, Any]) -> torch.Tensor:
    return model(**call)[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_stock_model(name, mode, whole_layers):
    stock, call = make(name).eval(), call_arguments(name, MASK, labels=False)
    ours = hf.unpad(clone(stock))
    with mode():
        found, want = first(ours, call), first(stock, call)
    if not name.endswith("ForSequenceClassification"):
        found, want = (x[call["attention_mask"] == 1] for x in (found, want))
    assert_same_values(found, want)
    assert whole_layers == [False, False]


@pytest.mark.parametrize("name", NAMES)
def test_8_bits(name, whole_layers):
    stock, call = make(name).eval(), call_arguments(name, MASK, labels=False)
    ours = hf.unpad(clone(stock), weights="int8")
    with torch.inference_mode():
        found, want = first(ours, call), first(stock, call)
        again = first(pickle.loads(pickle.dumps(copy.deepcopy(ours))), call)
    assert torch.equal(found, again)
    if not name.endswith("ForSequenceClassification"):
        found, want = (x[call["attention_mask"] == 1] for x in (found, want))
    assert functional.cosine_similarity(found.flatten(), want.flatten(), dim=0) > 0.99
    assert not torch.equal(found, want)
    assert whole_layers == [True] * 4
    assert list(ours.state_dict()) == list(stock.state_dict())
    hf.repad(ours)
    with torch.inference_mode():
        assert torch.equal(first(ours, call), first(stock, call))
    assert whole_layers == [True] * 4


def train(model: nn.Module, call: dict[str, Any]) -> None:
    """One update by an optimizer whose writes PyTorch does not count on a CPU."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    first(model.train(), call).square().mean().backward()
    optimizer.step()
    model.zero_grad()
    model.eval()


CHANGES = {
    "in place": lambda model, call: model.encoder.layer[1].output.dense.weight.mul_(2.0),
    "data": lambda model, call: model.encoder.layer[1].output.dense.weight.data.mul_(2.0),
    "training": torch.enable_grad()(train),
    "a file": lambda model, call: model.load_state_dict(make("BertModel", seed=5).state_dict()),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_are_rounded_again(change, mode):
    if change == "training" and mode is torch.inference_mode:
        pytest.skip("nothing is trained within it")
    call = call_arguments("BertModel", MASK)
    with mode():
        ours = hf.unpad(make("BertModel").eval(), weights="int8")
        before = first(ours, call)
        CHANGES[change](ours, call)
        changed = first(ours, call)
        fresh = first(hf.unpad(clone(hf.repad(ours)), weights="int8"), call)
    assert not torch.equal(before, changed)
    assert torch.equal(changed, fresh)


def test_unpad_says_which_weights(whole_layers):
    call, ours = call_arguments("BertModel", MASK), make("BertModel").eval()
    with torch.no_grad():
        exact = first(hf.unpad(ours), call)
        rounded = first(hf.unpad(ours, weights="int8"), call)
        assert torch.equal(first(hf.unpad(ours), call), exact)
        assert not torch.equal(rounded, exact)
    assert whole_layers == [False] * 2 + [True] * 2 + [False] * 2
    assert not any(inference._rounded.get(layer) for layer in ours.encoder.layer)


def test_what_the_operator_cannot_do_is_left_to_the_modules(whole_layers):
    stock, call = make("BertModel").eval(), call_arguments("BertModel", MASK)
    ours = hf.unpad(clone(stock), weights="int8")
    real = call["attention_mask"] == 1

    def same(expected: int) -> None:
        del whole_layers[:]
        with torch.no_grad():
            assert_same_values(first(ours, call)[real], first(stock, call)[real])
        assert len(whole_layers) == expected

    layers = ours.encoder.layer
    first(ours, call)  # gradients
    assert not whole_layers
    hooks = [layer.intermediate.dense.register_forward_hook(lambda *_: None) for layer in layers]
    same(0)
    for hook in hooks:
        hook.remove()

    class Half(nn.Linear):
        def forward(self, x):
            return super().forward(x) / 2

    for model in (ours, stock):
        for layer in model.encoder.layer:
            layer.output.dense.__class__ = Half
    same(0)
    for model in (ours, stock):
        for layer in model.encoder.layer:
            layer.output.dense.__class__ = nn.Linear
    ours.train()
    for module in ours.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    same(0)
    ours.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first(ours, call)
    assert not whole_layers


def test_calibration_keeps_layers_that_lose_too_much(whole_layers):
    call = call_arguments("BertModel", MASK)
    stock = make("BertModel").eval()
    with (
        torch.no_grad()
    ):  # one feature of all tokens is so large that nothing is left of the others
        stock.encoder.layer[1].intermediate.dense.bias[3] = 3000.0
        stock.encoder.layer[1].output.dense.weight[:, 3] = 0.0
    ours = hf.unpad(clone(stock), weights="int8")
    cosines = hf.calibrate(ours, call, 0.9)
    assert list(cosines) == ["encoder.layer.0", "encoder.layer.1"]
    assert cosines["encoder.layer.0"] > 0.99 > 0.9 > cosines["encoder.layer.1"]
    del whole_layers[:]
    with torch.no_grad():
        first(ours, call)
    assert whole_layers == [True, False]
    assert not any(layer._forward_hooks for layer in ours.encoder.layer)
    assert list(hf.calibrate(ours, call)) == ["encoder.layer.0"]
    with pytest.raises(ValueError, match="whose layers compute"):
        hf.calibrate(hf.unpad(stock), call)


@pytest.mark.filterwarnings("ignore::bert_unpad.hf.StockFallbackWarning")
def test_calibration_tells_of_layers_that_ran_in_8_bits_only():
    call = call_arguments("BertModel", MASK)
    ours = hf.unpad(make("BertModel"), weights="int8")
    for change in ({}, {"output_hidden_states": True}, {"attention_mask": MASKS["left"]}):
        ours.train(not change)
        with pytest.raises(ValueError, match="whose layers compute"):
            hf.calibrate(ours, call | change)
    with pytest.raises(ValueError, match="without autocast"), torch.autocast("cpu"):
        hf.calibrate(ours, call)
    # A layer that stands in several places counts where it loses most.
    config = transformers.AlbertConfig(
        vocab_size=61, embedding_size=32, hidden_size=64, num_hidden_layers=3,
        num_attention_heads=2, intermediate_size=96, pad_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    albert = hf.unpad(transformers.AlbertModel(config).eval(), weights="int8")
    for least in (0.5, 1.1):
        (cosine,) = hf.calibrate(albert, call, least).values()
        assert 0.99 < cosine < 1
    with pytest.raises(ValueError, match="whose layers compute"):
        hf.calibrate(albert, call)


def test_inputs_and_modules_of_other_forms(whole_layers):
    stock, call = make("BertModel").eval(), call_arguments("BertModel", None)
    for layer in stock.encoder.layer:
        layer.output.LayerNorm = nn.Identity()
    ours = hf.unpad(clone(stock))
    with torch.no_grad():
        assert_same_values(first(ours, call), first(stock, call))
    assert not whole_layers
    stock = make("BertModel").eval()
    ours = hf.unpad(clone(stock))
    for model in (ours, stock):  # rows that lie apart
        model.embeddings.register_forward_hook(lambda _, args, x: torch.cat([x, x], -1)[..., :64])
    with torch.no_grad():
        assert_same_values(first(ours, call), first(stock, call))
    assert whole_layers == [False] * 2


def halve(module: nn.Module) -> None:
    """Gives a module a forward function of its own."""
    module.forward = lambda x, forward=module.forward: forward(x) / 2


def prune(layer: nn.Module) -> None:
    """Cuts the feed-forward half to 32 features, by data alone."""
    inner, out = layer.intermediate.dense, layer.output.dense
    inner.weight.data, inner.bias.data = inner.weight.data[:32], inner.bias.data[:32]
    out.weight.data = out.weight.data[:, :32].clone()


def plain(module: nn.Linear) -> nn.Linear:
    """Another linear layer of the same numbers, doubled."""
    other = nn.Linear(module.in_features, module.out_features)
    other.load_state_dict({name: 2 * t for name, t in module.state_dict().items()})
    return other


def replace_linear(layer: nn.Module) -> None:
    layer.attention.output.dense = plain(layer.attention.output.dense)


def hook_of_a_new_list(layer: nn.Module) -> None:
    """Clears a module's hooks as users do, and adds one."""
    layer.output.dense._forward_hooks = OrderedDict()
    layer.output.dense.register_forward_hook(lambda _, args, x: 2 * x)


# What is done to the second layer between two calls, and how many layers one operator computes
# then, in one call or layer by layer.
BETWEEN = {
    "a hook on the layer": (
        lambda layer: layer.register_forward_hook(lambda _, args, x: 2 * x),
        [1, 1],
    ),
    "a hook within": (
        lambda layer: layer.output.dense.register_forward_hook(lambda _, args, x: 2 * x),
        [1],
    ),
    "a hook in a new list of hooks": (hook_of_a_new_list, [1]),
    "forward": (lambda layer: halve(layer.output.LayerNorm), [1]),
    "another module": (replace_linear, [2]),
    "another parameter": (
        lambda layer: setattr(layer.output.dense, "bias", nn.Parameter(torch.ones(64))),
        [2],
    ),
    "a parameter less": (lambda layer: setattr(layer.output.dense, "bias", None), [2]),
    "other data": (prune, [2, 1, 1]),
    "eps": (lambda layer: setattr(layer.output.LayerNorm, "eps", 0.5), [2]),
    "class": (lambda layer: setattr(layer.output.dropout, "__class__", nn.AlphaDropout), [1]),
    "activation": (
        lambda layer: setattr(layer.intermediate, "intermediate_act_fn", nn.ReLU()),
        [2],
    ),
    "training": (lambda layer: layer.attention.self.train(), [1]),
}


@pytest.mark.parametrize("change", BETWEEN)
def test_what_changes_between_calls_counts(change, monkeypatch):
    stock, call = make("BertModel").eval(), call_arguments("BertModel", MASK)
    ours, real, counts = hf.unpad(clone(stock)), call["attention_mask"] == 1, []
    operator = inference.encoder_layers

    def encoder_layers(x, cu_seqlens, longest, parameters, shapes, **more):
        counts.append(len(shapes))
        return operator(x, cu_seqlens, longest, parameters, shapes, **more)

    monkeypatch.setattr(inference, "encoder_layers", encoder_layers)
    make_it, expected = BETWEEN[change]
    with torch.inference_mode():
        before = first(ours, call)
        for model in (stock, ours):
            make_it(model.encoder.layer[1])
        assert counts == [2]
        found, want = first(ours, call), first(stock, call)
    assert counts[1:] == expected
    assert_same_values(found[real], want[real])
    assert ((found - before).abs().max() < 1e-5) == (change in ("class", "training"))


@pytest.mark.parametrize("pick", [slice(None, None, -1), slice(1), slice(1, None)], ids=str)
def test_another_list_of_layers_takes_its_place(pick):
    stock, call = make("BertModel").eval(), call_arguments("BertModel", MASK)
    ours, real = hf.unpad(clone(stock)), call["attention_mask"] == 1
    with torch.inference_mode():
        first(ours, call)
        for model in (stock, ours):
            model.encoder.layer = nn.ModuleList(list(model.encoder.layer)[pick])
        assert_same_values(first(ours, call)[real], first(stock, call)[real])


def test_hooks_on_all_modules_are_called():
    call, ours = call_arguments("BertModel", MASK), hf.unpad(make("BertModel").eval())
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    with torch.no_grad():
        try:
            ours(**call)
        finally:
            handle.remove()
        ours(**call)
    assert [seen.count(layer) for layer in ours.encoder.layer] == [1, 1]


def test_a_model_that_diverges(whole_layers):
    call = call_arguments("BertModel", MASK)
    ours = hf.unpad(make("BertModel").eval(), weights="int8")
    with torch.no_grad():
        ours.encoder.layer[1].intermediate.dense.weight.fill_(torch.nan)
        assert first(ours, call)[0].isnan().all()
    assert whole_layers == [True]


def test_errors():
    with pytest.raises(ValueError, match="weights: expected one of float32, bfloat16, int8, got"):
        hf.unpad(make("BertModel"), weights="int4")
    with pytest.raises(ValueError, match="verify: expected False with weights='int8'"):
        hf.unpad(make("BertModel"), weights="int8", verify=True)
    text = 'weights: expected "float32" for this model, because of layer encoder.layer.0: '
    with pytest.raises(ValueError, match=text + "its parameters are not float32 on a CPU"):
        hf.unpad(make("BertModel").bfloat16(), weights="int8")
    model = make("BertModel", hidden_act="relu6")
    with pytest.raises(ValueError, match=text + "its activation is none of GELU, SiLU and ReLU"):
        hf.unpad(model, weights="int8")
    assert not any("_bert_unpad_weights" in vars(module) for module in model.modules())
    model = make("BertModel")
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[2, 2] = torch.nan
    with pytest.raises(ValueError, match=text + ".*weight must be finite, but row 2 is not"):
        hf.unpad(model, weights="int8")
    assert not any("_bert_unpad_weights" in vars(module) for module in model.modules())
