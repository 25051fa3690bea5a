"""What the swap leaves as it was: names, files, copies, optimizers, checkpointing, compilation."""

import io
import json
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from bert_unpad import hf
from tests.support.hf_models import (
    MASKS,
    NAMES,
    SEQLEN,
    assert_same_step,
    call_arguments,
    clone,
    gradients,
    make,
    run,
    transformers,
)
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived
from tests.support.tolerances import STEP

MASK = MASKS["right"]


def test_importing_the_package_does_not_import_transformers():
    code = (
        "import sys, bert_unpad; assert 'transformers' not in sys.modules; "
        "bert_unpad.hf.unpad; assert 'transformers' in sys.modules; "
        "assert 'transformers.models.roberta.modeling_roberta' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT)


def test_old_transformers_is_refused(monkeypatch):
    # transformers replaces itself in sys.modules while it is imported.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    with pytest.raises(ImportError, match=r"bert_unpad.hf needs transformers >= 5.0, but 4.57"):
        hf.require_transformers()


@pytest.mark.parametrize("name", NAMES)
def test_state_and_classes(name, packed_calls):
    stock = make(name)
    ours = clone(stock)
    parameters, keys = list(ours.parameters()), list(ours.state_dict())
    classes = [type(module) for module in ours.modules()]
    assert hf.unpad(ours) is ours
    assert all(a is b for a, b in zip(ours.parameters(), parameters, strict=True))
    assert list(ours.state_dict()) == keys
    assert [v.dtype for v in ours.state_dict().values()] == [
        v.dtype for v in stock.state_dict().values()
    ]
    assert isinstance(ours, type(stock))
    assert type(ours).__name__ == type(stock).__name__
    hf.unpad(ours)  # again: nothing happens
    call = call_arguments(name, MASK)
    ours(**call)
    assert packed_calls
    packed_calls.clear()
    assert hf.repad(ours) is ours
    assert [type(module) for module in ours.modules()] == classes
    assert not any(key.startswith("_bert_unpad") for m in ours.modules() for key in vars(m))
    got, want = run(ours, call), run(stock, call)
    assert packed_calls == []
    for ours_part, stock_part in zip(got, want, strict=True):
        assert ours_part.keys() == stock_part.keys()
        assert all(torch.equal(ours_part[key], stock_part[key]) for key in ours_part)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "DistilBertForTokenClassification"])
def test_saved_files_are_those_of_stock(name, tmp_path):
    stock = make(name)
    ours = hf.unpad(clone(stock))
    stock.save_pretrained(tmp_path / "stock")
    ours.save_pretrained(tmp_path / "ours")
    files = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == files
    for file in files:
        same = (tmp_path / "stock" / file).read_bytes() == (tmp_path / "ours" / file).read_bytes()
        assert same, file
    assert json.loads((tmp_path / "ours/config.json").read_text())["architectures"] == [name]
    loaded = hf.unpad(getattr(transformers, name).from_pretrained(tmp_path / "ours")).train()
    call = call_arguments(name, MASK)
    assert_same_step(run(loaded, call), run(stock, call), MASK)
    # from_pretrained of the swapped class makes a model that works, swapped or not.
    again = type(ours).from_pretrained(tmp_path / "ours").train()
    assert_same_step(run(again, call), run(stock, call), MASK)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", ["BertForPreTraining", "RobertaForTokenClassification",
                                  "DistilBertForSequenceClassification"])  # fmt: skip
def test_copies_are_packed_too(name, how, packed_calls):
    ours = hf.unpad(make(name), logits="none")
    if how == "deepcopy":
        copy = clone(ours)
    elif how == "pickle":
        copy = pickle.loads(pickle.dumps(ours))
    else:
        buffer = io.BytesIO()
        torch.save(ours, buffer)
        buffer.seek(0)
        copy = torch.load(buffer, weights_only=False)
    assert [type(m) for m in copy.modules()] == [type(m) for m in ours.modules()]
    shared = {id(p) for p in ours.parameters()} & {id(p) for p in copy.parameters()}
    assert not shared
    call = call_arguments(name, MASK)
    got = run(copy, call)
    assert len(packed_calls) == 2
    assert_same_step(got, run(ours, call), MASK, tolerance=1e-7)
    hf.repad(copy)
    assert type(copy) is getattr(transformers, name)


def test_tied_weights_and_an_optimizer_made_before():
    """Ten steps: stock and ours stay together, and the decoder stays the embedding."""
    models = {"stock": make("BertForMaskedLM")}
    models["ours"] = clone(models["stock"])
    optimizers = {k: torch.optim.AdamW(m.parameters(), lr=1e-3) for k, m in models.items()}
    hf.unpad(models["ours"])
    losses = {"stock": [], "ours": []}
    for step in range(10):
        call = call_arguments("BertForMaskedLM", MASK, seed=step)
        for key, model in models.items():
            optimizers[key].zero_grad()
            loss = model(**call).loss
            loss.backward()
            optimizers[key].step()
            losses[key].append(loss.item())
    assert losses["ours"] == pytest.approx(losses["stock"], rel=1e-4)
    ours = models["ours"]
    assert ours.cls.predictions.decoder.weight is ours.bert.embeddings.word_embeddings.weight
    assert losses["ours"][-1] != losses["ours"][0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_checkpointing_changes_nothing(reentrant, dropout, packed_calls):
    call = call_arguments("BertForMaskedLM", MASK)
    plain = hf.unpad(make("BertForMaskedLM", dropout=dropout), logits="none")
    torch.manual_seed(derived(3))
    want = run(plain, call)
    assert len(packed_calls) == 2
    plain.gradient_checkpointing_enable({"use_reentrant": reentrant})
    plain.enable_input_require_grads()
    torch.manual_seed(derived(3))
    got = run(plain, call)
    assert len(packed_calls) == 2 + 4  # computed again in the backward pass
    assert_same_step(got, want, MASK, tolerance=1e-7)


def test_dropout_follows_the_seed_and_stops_in_eval():
    ours = hf.unpad(make("BertForMaskedLM", dropout=0.2))
    call = call_arguments("BertForMaskedLM", MASK)

    def loss(seed: int) -> float:
        torch.manual_seed(derived(seed))
        return ours(**call).loss.item()

    assert loss(1) == loss(1)
    assert loss(1) != loss(2)
    ours.eval()
    assert loss(1) == loss(2)
    assert loss(1) == pytest.approx(make("BertForMaskedLM").eval()(**call).loss.item(), rel=STEP)


def test_dropout_has_the_statistics_of_stock():
    stock = make("BertForMaskedLM", dropout=0.1)
    ours = hf.unpad(clone(stock))
    call = call_arguments("BertForMaskedLM", MASK)
    torch.manual_seed(derived(0))
    with torch.no_grad():
        losses = {
            key: torch.tensor([model(**call).loss.item() for _ in range(150)])
            for key, model in (("stock", stock), ("ours", ours))
        }
    spread = losses["stock"].std()
    assert spread > 0
    difference = (losses["ours"].mean() - losses["stock"].mean()).abs()
    assert difference < 4 * spread * (2 / 150) ** 0.5
    assert 0.7 < losses["ours"].std() / spread < 1.4


def test_frozen_and_adapted_layers():
    """A module that is not exactly nn.Linear is called as it is: here a hand-made LoRA."""

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
            self.b = nn.Parameter(torch.randn(base.out_features, 4) * 0.1)

        def forward(self, x):
            return self.base(x) + x @ self.a.t() @ self.b.t()

    stock = make("BertForSequenceClassification")
    for layer in stock.bert.encoder.layer:
        attention = layer.attention.self
        attention.query, attention.value = Lora(attention.query), Lora(attention.value)
        layer.output.dense = Lora(layer.output.dense)
    stock.bert.embeddings.requires_grad_(False)
    stock.bert.encoder.layer[0].attention.self.key.weight.requires_grad_(False)
    ours = hf.unpad(clone(stock))
    call = call_arguments("BertForSequenceClassification", MASK)
    assert_same_step(run(ours, call), run(stock, call), MASK)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(**call)
    torch.testing.assert_close(out.loss, stock(**call).loss, rtol=0.1, atol=0.1)


def test_supports_says_what_and_why():
    support = hf.supports(make("BertForMaskedLM"))
    assert support
    assert support.accelerated == {
        "bert": "embeddings and layers",
        "": "logits at labels only",
    }
    assert support.stock == {}
    decoder = make("BertModel", is_decoder=True)
    assert hf.supports(decoder).stock == {"": "it is a decoder"}
    double = make("BertModel").double()
    assert "float64" in hf.supports(double).stock[""]
    for model in (decoder, double, nn.Linear(2, 2)):
        assert not hf.supports(model)
        with pytest.raises(ValueError, match="nothing to accelerate"):
            hf.unpad(model)
    with pytest.raises(ValueError, match="logits: expected one of"):
        hf.unpad(make("BertModel"), logits="some")
    both = nn.ModuleDict({"a": make("BertModel"), "b": make("BertModel", is_decoder=True)})
    classes = [type(m) for m in both.b.modules()]
    assert hf.supports(both).stock == {"b": "it is a decoder"}
    hf.unpad(both)
    assert [type(m) for m in both.b.modules()] == classes


def test_what_is_no_model_or_not_known_is_named():
    for function in (hf.unpad, hf.supports):
        with pytest.raises(
            TypeError, match=r"model: expected a torch.nn.Module, got 'name'; .*load"
        ):
            function("name")
    with pytest.raises(ValueError) as error:
        hf.unpad(nn.Linear(2, 2))
    for word in (
        "BertModel",
        "DistilBertModel",
        'attn_implementation="bert_unpad_flash"',
        "bert_unpad.nn",
    ):
        assert word in str(error.value)


def test_a_layer_of_the_users_own_is_not_touched():
    model = make("BertModel")

    class Mine(type(model.encoder.layer[1])):
        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states

    model.encoder.layer[1].__class__ = Mine
    assert "layer 1 is a Mine" in hf.supports(model).stock[""]


def test_a_subclass_of_the_users_own_is_served(packed_calls):
    class Mine(transformers.BertForMaskedLM):
        extra = 5

    stock = Mine(make("BertForMaskedLM").config)
    ours = hf.unpad(clone(stock))
    assert isinstance(ours, Mine)
    call = call_arguments("BertForMaskedLM", MASK)
    assert_same_step(run(ours, call), run(stock, call), MASK)
    assert packed_calls


def test_the_signature_stays():
    import inspect

    stock = make("BertForMaskedLM")
    ours = hf.unpad(clone(stock))
    assert inspect.signature(ours.forward) == inspect.signature(stock.forward)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForSequenceClassification"])
def test_compiled_model_serves_all_lengths_with_one_graph(name):
    # Stock sets problem_type in its first call, which would be one more compilation.
    layers = 1 if name.endswith("Classification") else 2
    fields = {"problem_type": "single_label_classification", "num_hidden_layers": layers}
    ours = hf.unpad(make(name, **fields), logits="none")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    shapes = (("right", SEQLEN), ("right", 9), ("holes", 9), ("ones", 7), ("right", 8))
    for seed, (kind, seqlen) in enumerate(shapes):
        call = call_arguments(name, MASKS[kind].long(), seed=seed)
        call = {k: v[:, :seqlen].contiguous() if v.dim() == 2 else v for k, v in call.items()}
        ours.zero_grad()
        loss = compiled(**call).loss
        loss.backward()
        got = {"loss": loss.detach()}, {n: g.clone() for n, g in gradients(ours).items()}
        want = run(ours, call)
        assert_same_step(got, ({"loss": want[0]["loss"]}, want[1]), None)
        counts.append(counter.frame_count)
    # A second padded length may cost one more graph; other lengths and label counts never do.
    assert counts[1] == counts[2] == counts[3] == counts[4]
    if name.endswith("Classification"):
        with pytest.raises(ValueError, match="attention_mask: the first position"):
            compiled(**call_arguments(name, MASKS["left"]))
    else:
        call["labels"] = call["labels"].clone().fill_(3)
        with pytest.raises(ValueError, match="labels: expected -100 where attention_mask is 0"):
            compiled(**call)
