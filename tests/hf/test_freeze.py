"""`freeze`: the same results from models whose layers are constants, and what they refuse."""

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bert_unpad import _C, hf
from bert_unpad.hf import fallback, frozen_layers, whole_model
from tests.hf.test_stock_modules import BOTH, KNOWN, RIGHT, batch
from tests.hf.test_stock_modules import make as make_stock
from tests.support.hf_models import MASKS, NAMES, call_arguments, make
from tests.support.tolerances import assert_same_values

pytestmark = pytest.mark.filterwarnings("error::bert_unpad.hf.StockFallbackWarning")
WHOLE = ("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert")
STOCK_WHOLE = (
    *("EuroBert", "JinaEmbeddingsV3", "ModernBert", "NomicBert"),
    *("RobertaPreLayerNorm", "XLMRobertaXL"),
)


@pytest.fixture
def operators(monkeypatch) -> list[str]:
    """Grows by the name of each operator of a frozen model that runs."""
    calls: list[str] = []

    def count(module: Any, name: str) -> None:
        run = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return run(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count(whole_model, "encoder_model")
    count(frozen_layers, "compute_layers")
    count(frozen_layers, "compute_around")
    return calls


def results(out: Any) -> list[Tensor]:
    found = [out[key] for key in out]
    return [t for t in found if isinstance(t, Tensor)]


def frozen_of(model: nn.Module, **more: Any) -> nn.Module:
    return hf.freeze(hf.unpad(copy.deepcopy(model), **more))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", NAMES)
def test_every_class(name: str, mode: Any) -> None:
    stock = make(name).eval()
    ours, plain = frozen_of(stock), hf.unpad(stock)
    for kind in ("right", "holes", "none"):
        if kind == "holes" and name.startswith(("MPNet", "DebertaV2")):
            continue  # stock modules compute them
        labels = name.endswith(("ForMaskedLM", "ForSequenceClassification"))
        call = call_arguments(name, MASKS[kind], labels=labels)
        with mode():
            found, wanted = ours(**call), plain(**call)
            assert type(found).__name__ == type(wanted).__name__
            for t, want in zip(results(found), results(wanted), strict=True):
                assert_same_values(t.detach(), want.detach())
            again = ours(**call, return_dict=False)
            assert isinstance(again, tuple)
            assert len(again) == len(found.to_tuple())


@pytest.mark.parametrize("name", KNOWN)
def test_every_stock_family(name: str) -> None:
    stock = make_stock(name)
    ours, plain = frozen_of(stock), hf.unpad(stock)
    with torch.inference_mode():
        for mask in (RIGHT, None):
            for t, want in zip(
                results(ours(**batch(mask))), results(plain(**batch(mask))), strict=True
            ):
                assert_same_values(t, want)


@pytest.mark.parametrize(("name", "head"), BOTH)
def test_heads_of_stock_families(name: str, head: str) -> None:
    stock, call = make_stock(name, f"For{head}"), batch(RIGHT)
    if head == "MultipleChoice":
        call = {key: value.view(2, 2, -1) for key, value in call.items()}
    ours, plain = frozen_of(stock), hf.unpad(stock)
    with torch.inference_mode():
        found, want = ours(**call).logits, plain(**call).logits
    if found.dim() == 3:
        found, want = found[RIGHT], want[RIGHT]
    assert_same_values(found, want)


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_is_one_operator(name: str, operators: list[str]) -> None:
    ours, call = (
        frozen_of(make(f"{name}Model").eval()),
        call_arguments(f"{name}Model", MASKS["right"]),
    )
    ours(**call)
    assert operators == ["encoder_model"]
    ours(**call, position_ids=torch.arange(11)[None] + 2)
    ours(inputs_embeds=ours.get_input_embeddings()(call["input_ids"]))
    assert operators == ["encoder_model", "compute_layers", "compute_layers"]


@pytest.mark.parametrize("name", [name for name in KNOWN if name in STOCK_WHOLE])
def test_a_stock_family_is_one_operator(name: str, operators: list[str]) -> None:
    frozen_of(make_stock(name))(**batch(RIGHT))
    assert operators == ["encoder_model"]


@pytest.mark.parametrize("name", ["ElectraModel", "MPNetModel", "DebertaV2Model"])
def test_layers_are_where_a_model_is_not(name: str, operators: list[str]) -> None:
    frozen_of(make(name).eval())(**call_arguments(name, MASKS["right"]))
    around = name != "ElectraModel"
    assert operators == (["compute_around"] * 2 if around else ["compute_layers"])


def test_first_tokens_alone_where_a_head_reads_no_others(monkeypatch) -> None:
    asked = []
    run = whole_model.encoder_model
    monkeypatch.setattr(
        whole_model, "encoder_model", lambda *a, **k: asked.append(k["result"]) or run(*a, **k)
    )
    for name in ("BertForSequenceClassification", "RobertaForSequenceClassification", "BertModel"):
        frozen_of(make(name).eval())(**call_arguments(name, MASKS["right"]))
    assert asked == ["first", "first", "hidden"]


def test_pooled_output_is_computed_when_it_is_read() -> None:
    ours = frozen_of(make("BertModel").eval())
    calls = []
    ours.pooler.register_forward_hook(lambda *_: calls.append(1))
    with torch.inference_mode():
        out = ours(**call_arguments("BertModel", MASKS["right"]))
    assert not calls
    assert out.pooler_output is out["pooler_output"] is out[1]
    assert len(calls) == 1


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["BertModel", "MPNetModel", "ElectraModel", "ModernBert"])
def test_rounded_weights(name: str, weights: str) -> None:
    modern = name == "ModernBert"
    stock = make_stock(name) if modern else make(name).eval()
    call = batch(RIGHT) if modern else call_arguments(name, MASKS["right"])
    if weights == "bfloat16" and not _C.cpu_isa().endswith(("bf16", "amx")):
        with pytest.raises(ValueError, match="this CPU multiplies no bf16"):
            frozen_of(stock, weights=weights)
        return
    ours, plain = frozen_of(stock, weights=weights), hf.unpad(copy.deepcopy(stock), weights=weights)
    mask = call["attention_mask"].bool()
    with torch.inference_mode():
        found, want, exact = (model(**call)[0][mask] for model in (ours, plain, stock))
    assert functional.cosine_similarity(found, want).min() > 0.9999
    limit = {"bfloat16": 1e-3, "int8": 2e-2}[weights]
    assert 0 < 1 - functional.cosine_similarity(found, exact).double().min() < limit


def test_nothing_of_the_layers_is_left_to_look_through() -> None:
    stock = make("BertForSequenceClassification").eval()
    weights = sum(p.numel() for p in stock.bert.encoder.parameters())
    ours = frozen_of(stock)
    assert sum(p.numel() for p in ours.parameters()) == stock.num_parameters() - weights
    assert not list(ours.bert.encoder.parameters())
    assert not any(p.requires_grad for p in ours.bert.parameters())
    assert all(p.requires_grad for p in ours.classifier.parameters())
    assert "2 layers, bert_unpad" in repr(ours)
    assert ours.bert.embeddings.word_embeddings is ours.get_input_embeddings()


@pytest.mark.parametrize("name", ["BertModel", "MPNetModel", "DistilBertForSequenceClassification"])
def test_copies_and_pickles(name: str) -> None:
    ours, call = frozen_of(make(name).eval()), call_arguments(name, MASKS["right"], labels=False)
    with torch.inference_mode():
        want = ours(**call)[0]
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(other(**call)[0], want)
            other.get_input_embeddings().weight.data.zero_()
        assert torch.equal(ours(**call)[0], want)


def assert_equal_after(change: Any, stock: nn.Module, call: dict[str, Tensor]) -> None:
    """Whether a change of a model's modules counts, made before `freeze` and after it."""
    plain, later = hf.unpad(copy.deepcopy(stock)), frozen_of(stock)
    with torch.inference_mode():
        before = later(**call)[0]
    change(plain)
    change(later)
    earlier = hf.unpad(copy.deepcopy(stock))
    change(earlier)
    hf.freeze(earlier)
    with torch.inference_mode():
        want = plain(**call)[0]
        assert not torch.allclose(before, want, atol=1e-3)
        for model in (earlier, later, copy.deepcopy(later)):
            assert_same_values(model(**call)[0], want)


@pytest.mark.parametrize(
    "path", ["encoder", "embeddings", "embeddings.dropout", "embeddings.LayerNorm"]
)
def test_hooks_around_the_layers_run(path: str) -> None:
    call = call_arguments("BertModel", MASKS["right"])

    def change(model: nn.Module) -> None:
        def on_output(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, Tensor):
                return output + 0.5
            output["last_hidden_state"] = output["last_hidden_state"] + 0.5
            return output

        model.get_submodule(path).register_forward_hook(on_output)

    assert_equal_after(change, make("BertModel").eval(), call)


@pytest.mark.parametrize("name", ["BertModel", "MPNetModel", "ModernBert"])
def test_what_transformers_leaves_after_asking_for_hidden_states(name: str, monkeypatch) -> None:
    modern = name == "ModernBert"
    if modern and name not in KNOWN:
        pytest.skip("needs a newer transformers")
    stock = make_stock(name) if modern else make(name).eval()
    call = batch(RIGHT) if modern else call_arguments(name, MASKS["right"])
    ours = hf.unpad(copy.deepcopy(stock))
    with torch.inference_mode():
        want = ours(**call)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asked = ours(**call, output_hidden_states=True, output_attentions=True)
        assert asked.hidden_states
        monkeypatch.setattr(fallback, "_said", set())
        assert_same_values(ours(**call)[0], want)
        assert_same_values(hf.freeze(ours)(**call)[0], want)


def test_what_is_around_the_layers_is_read_at_each_call() -> None:
    call = call_arguments("BertModel", MASKS["right"])

    def other_table(model: Any) -> None:
        table = nn.Embedding.from_pretrained(model.get_input_embeddings().weight.flip(0) * 3)
        model.set_input_embeddings(table)

    def data(model: Any) -> None:
        table = model.embeddings.position_embeddings.weight
        table.data = table.data.flip(0) * 3

    def in_place(model: Any) -> None:
        with torch.no_grad():
            model.embeddings.LayerNorm.bias += 0.5

    def eps(model: Any) -> None:
        model.embeddings.LayerNorm.eps = 1.0

    def forward(model: Any) -> None:
        model.embeddings.LayerNorm.forward = torch.tanh

    def norm(model: Any) -> None:
        model.embeddings.LayerNorm = nn.Identity()

    def dropout(model: Any) -> None:
        model.embeddings.dropout = nn.Tanh()

    for change in (other_table, data, in_place, eps, forward, norm, dropout):
        assert_equal_after(change, make("BertModel").eval(), call)


def test_dropout_that_is_trained_alone_drops() -> None:
    stock, call = make("BertModel").eval(), call_arguments("BertModel", MASKS["right"])
    stock.embeddings.dropout.p = 0.5
    early = hf.unpad(copy.deepcopy(stock))
    early.embeddings.dropout.train()
    late = frozen_of(stock)
    late.embeddings.dropout.train()
    with torch.inference_mode():
        for model in (hf.freeze(early), late):
            assert not torch.equal(model(**call)[0], model(**call)[0])


@pytest.mark.skipif("EuroBert" not in KNOWN, reason="needs a newer transformers")
def test_norms_of_two_kinds() -> None:
    stock = make_stock("EuroBert")
    stock.norm = nn.LayerNorm(stock.config.hidden_size)
    ours, plain = frozen_of(stock), hf.unpad(stock)
    with torch.inference_mode():
        assert_same_values(ours(**batch(RIGHT))[0], plain(**batch(RIGHT))[0])


def test_pooled_output_is_that_of_the_call() -> None:
    stock, call = make("BertModel").eval(), call_arguments("BertModel", MASKS["right"])
    ours = frozen_of(stock)
    with torch.inference_mode():
        want = ours(**call).pooler_output
        out = ours(**call)
        out.last_hidden_state.zero_()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(out.get("pooler_output"), want)
    assert torch.equal(ours(**call).get("pooler_output").detach(), want)
    assert out.get("attentions") is None


@pytest.mark.parametrize("name", ["BertModel", "MPNetModel"])
def test_old_layers_are_freed(name: str) -> None:
    ours = hf.unpad(make(name).eval())
    with torch.inference_mode():
        ours(**call_arguments(name, MASKS["right"]))  # which keeps plans of the layers
    inner = [weakref.ref(m) for m in ours.encoder.layer.modules() if isinstance(m, nn.Linear)]
    hf.freeze(ours)
    gc.collect()
    assert not any(module() is not None for module in inner)


def test_gradients_of_what_is_frozen_are_refused() -> None:
    ours, call = frozen_of(make("BertModel").eval()), call_arguments("BertModel", MASKS["right"])
    ours.get_input_embeddings().requires_grad_(True)
    with pytest.raises(NotImplementedError, match="encoder_layers"):
        ours(**call)[0].sum().backward()
    with torch.no_grad():
        ours(**call)


def test_heads_can_be_trained() -> None:
    ours = frozen_of(make("BertForSequenceClassification").eval())
    ours(**call_arguments("BertForSequenceClassification", MASKS["right"])).loss.backward()
    assert ours.classifier.weight.grad.abs().max() > 0


def test_what_a_frozen_model_refuses(tmp_path) -> None:
    ours, call = frozen_of(make("BertModel").eval()), call_arguments("BertModel", MASKS["right"])
    stock = frozen_of(make_stock("ModernBert"))
    for model, given in ((ours, call), (stock, batch(RIGHT))):
        for name in ("output_attentions", "output_hidden_states"):
            with pytest.raises(
                ValueError, match=f"frozen, and cannot .* where {name} is asked for"
            ):
                model(**given, **{name: True})
        left = given | {"attention_mask": given["attention_mask"].flip(1)}
        with pytest.raises(ValueError, match=r"frozen, .* the first position"):
            model(**left)
        with pytest.raises(ValueError, match=r"frozen, .* additive"):
            model(**given | {"attention_mask": given["attention_mask"] * -1e4})
        for change in (torch.float16, torch.bfloat16, "meta"):
            before = model.get_input_embeddings().weight
            with pytest.raises(ValueError, match="frozen, and stays in float32 on a CPU"):
                model.to(change)
            assert model.get_input_embeddings().weight is before
            assert before.dtype == torch.float32
        model.float().to("cpu")
        with pytest.raises(ValueError, match="cannot be saved"):
            model.state_dict()
        with pytest.raises(ValueError, match="cannot be saved"):
            model.save_pretrained(tmp_path)
        weight = model.get_input_embeddings().weight.clone()
        given_state = {name: t + 1 for name, t in model.named_parameters()}
        with pytest.raises(ValueError, match="frozen; expected to be loaded before"):
            model.load_state_dict(given_state, strict=False)
        assert torch.equal(model.get_input_embeddings().weight, weight)
        with pytest.raises(ValueError, match="frozen"):
            hf.repad(model)
        with pytest.raises(ValueError, match="not frozen yet"):
            hf.freeze(model)
        with pytest.raises(ValueError, match="expected eval"):
            model.train()(**given)
        model.eval()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="no autocast"):
            model(**given)
        model(**given)
    with pytest.raises(ValueError, match=r"frozen, .* padding between tokens"):
        stock(**batch(RIGHT.clone().index_fill(1, torch.tensor([2]), False)))


def test_heads_say_that_the_model_is_frozen() -> None:
    for name in ("BertForMaskedLM", "BertForTokenClassification"):
        call = call_arguments(name, MASKS["right"])
        call["labels"] = torch.ones_like(call["input_ids"])
        with pytest.raises(ValueError, match=f"{name}: frozen, .* where labels other than -100"):
            frozen_of(make(name).eval())(**call)


def test_models_that_cannot_be_frozen() -> None:
    def fails(match: str, model: nn.Module) -> None:
        modules = list(model.modules())
        with pytest.raises(ValueError, match=match):
            hf.freeze(model)
        assert list(model.modules()) == modules

    def ours(name: str = "BertModel") -> Any:
        return hf.unpad(make(name).eval())

    fails("expected one after unpad", make("BertModel").eval())
    fails("expected one after unpad", nn.Linear(2, 2))
    fails("the model itself, because it is in training mode", ours().train())
    fails("bert, because it is in training mode", ours("BertForMaskedLM").train())
    fails("its parameters are torch.bfloat16 on cpu", ours().bfloat16())
    fails("still to be verified", hf.unpad(make("BertModel").eval(), verify=True))
    model = hf.unpad(make_stock("RobertaPreLayerNorm"))
    model.config.num_hidden_layers = 1
    fails("its configuration leaves out some of its layers", model)
    for part in ("", "output.dense", "attention.self", "output.LayerNorm"):
        model = ours()
        model.encoder.layer[1].get_submodule(part).register_forward_hook(lambda *_: None)
        fails("cannot freeze the model itself, because", model)
        model = hf.unpad(make_stock("Ernie"))
        model.encoder.layer[1].get_submodule(part).register_forward_hook(lambda *_: None)
        fails("cannot freeze the model itself, because", model)
    model = ours()
    model.encoder.layer[0] = torch.compile(model.encoder.layer[0])
    fails("a layer is wrapped", model)
    model = hf.unpad(make_stock("ModernBert")).bfloat16().float()
    fails("its angles were rounded", model)
