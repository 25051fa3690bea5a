"""`unpad` of families whose own forward runs on packed tokens, against the stock models."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from transformers.models.modernbert import modeling_modernbert

from bert_unpad import hf, ops
from bert_unpad.hf import fallback, stock_modules
from bert_unpad.hf.flash import NAME
from bert_unpad.hf.stock_modules import STOCK_FAMILIES
from tests.hf.test_flash import FAMILIES, FIELDS, same_step
from tests.support.hf_models import transformers
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_values

pytestmark = pytest.mark.filterwarnings("error::bert_unpad.hf.StockFallbackWarning")
# transformers before 5.23 lacks some.
KNOWN = [f.prefix for f in STOCK_FAMILIES if hasattr(transformers, f"{f.prefix}Config")]
HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "MultipleChoice")
BOTH = [
    (name, head) for name in KNOWN for head in HEADS if hasattr(transformers, f"{name}For{head}")
]
MORE = {"Esm": {"token_dropout": True}}
LATER = ("ModernBert", "Esm", "EuroBert", "NomicBert")
ROWS, COLUMNS = 4, 9
RIGHT = torch.arange(COLUMNS) < torch.tensor([9, 5, 1, 7])[:, None]
HOLES = RIGHT.clone()
HOLES[0, 3] = HOLES[3, 2] = False
MASKS = {"right": RIGHT, "holes": HOLES, "full": torch.ones_like(RIGHT), "none": None}


def make(name: str, kind: str = "Model", **more: object) -> nn.Module:
    if name in LATER and not hasattr(modeling_modernbert, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("this version of transformers lacks it, or `unpad` leaves it stock there")
    fields = FIELDS | FAMILIES[name][0] | MORE.get(name, {}) | {"num_labels": 3} | more
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(fields))
    torch.manual_seed(derived(0))
    kind = getattr(transformers, f"{name}{kind}")
    return kind._from_config(config, attn_implementation="sdpa").eval()


def batch(mask: Tensor | None) -> dict[str, Tensor]:
    """Random ids, one of them masked; RoBERTa-like models count positions from ids that are not
    padding (1)."""
    generator = torch.Generator().manual_seed(derived(2))
    ids = torch.randint(5, 61, (ROWS, COLUMNS), generator=generator)
    ids[0, 2] = ids[1, 3] = 4
    if mask is None:
        return {"input_ids": ids}
    return {"input_ids": ids.where(mask, 1), "attention_mask": mask.long()}


def kept(mask: Tensor | None) -> Tensor:
    return torch.ones(ROWS, COLUMNS, dtype=torch.bool) if mask is None else mask


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", KNOWN)
def test_base_models(name: str, kind: str) -> None:
    stock, mask = make(name), MASKS[kind]
    if name == "ModernBert" and kind == "holes":
        pytest.skip("stock modules compute it")
    ours = hf.unpad(copy.deepcopy(stock))
    call = batch(mask) | {"output_hidden_states": True}

    def run(model: nn.Module) -> Tensor:
        out = model(**call)
        tokens = [out.last_hidden_state, *out.hidden_states]
        parts = [x[kept(mask)].flatten() for x in tokens]
        if out.get("pooler_output") is not None:
            parts.append(out.pooler_output.flatten())
        return torch.cat(parts)

    same_step(ours, stock, copy.deepcopy(stock).double(), run)
    assert not ours(**call)[0][~kept(mask)].any()
    assert isinstance(ours(**call, return_dict=False), tuple)


@pytest.mark.parametrize(("name", "head"), BOTH)
def test_heads(name: str, head: str) -> None:
    stock = make(name, f"For{head}", problem_type="single_label_classification")
    ours = hf.unpad(copy.deepcopy(stock))
    call = batch(RIGHT)
    if head == "MultipleChoice":
        call = {key: value.view(2, 2, COLUMNS) for key, value in call.items()}
        call["labels"] = torch.tensor([1, 0])
    elif head == "SequenceClassification":
        call["labels"] = torch.tensor([1, 0, 2, 1])
    else:
        labels = torch.randint(0, 3, (ROWS, COLUMNS))
        call["labels"] = labels.masked_fill(~RIGHT, -100)

    def run(model: nn.Module) -> Tensor:
        out = model(**call)
        logits = out.logits[RIGHT] if out.logits.dim() == 3 else out.logits
        return torch.cat([out.loss.reshape(1), logits.flatten()])

    same_step(ours, stock, copy.deepcopy(stock).double(), run)


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "Esm"])
def test_packed_input(name: str) -> None:
    stock = make(name)
    ours = hf.unpad(copy.deepcopy(stock))
    lengths = [6, 1, 4]
    rows = [torch.randint(5, 61, (1, n)) for n in lengths]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    out = ours(input_ids=torch.cat(rows, 1), cu_seq_lens_q=cu_seqlens)
    wanted = [stock(input_ids=row) for row in rows]
    assert_same_values(out[0], torch.cat([x[0] for x in wanted], 1))
    if out.get("pooler_output") is not None:
        assert_same_values(out.pooler_output, torch.cat([x.pooler_output for x in wanted]))


@pytest.mark.parametrize("name", KNOWN)
def test_embedded_tokens(name: str) -> None:
    stock = make(name)
    ours = hf.unpad(copy.deepcopy(stock))
    states = torch.randn(ROWS, COLUMNS, stock.get_input_embeddings().embedding_dim)
    call = {"inputs_embeds": states, "attention_mask": RIGHT.long()}
    assert_same_values(ours(**call)[0][RIGHT], stock(**call)[0][RIGHT])


@pytest.mark.parametrize(
    ("name", "head"), [x for x in BOTH if x[1] in ("MaskedLM", "TokenClassification")]
)
def test_labels_at_padding_are_stock(name: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = make(name, f"For{head}")
    ours = hf.unpad(copy.deepcopy(stock))
    labels = torch.randint(0, 3, (ROWS, COLUMNS))
    monkeypatch.setattr(fallback, "_said", set())
    with pytest.warns(hf.StockFallbackWarning, match="labels other than -100 lie at padded"):
        got = ours(**batch(RIGHT), labels=labels)
    want = stock(**batch(RIGHT), labels=labels)
    assert torch.equal(got.loss, want.loss)
    assert torch.equal(got.logits, want.logits)


@pytest.mark.parametrize("name", KNOWN)
def test_the_loss_of_question_answering(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(transformers, f"{name}ForQuestionAnswering"):
        pytest.skip("it has no such head")
    stock = make(name, "ForQuestionAnswering", num_labels=2)
    call = batch(RIGHT) | {"start_positions": torch.zeros(ROWS, dtype=torch.int64)}
    call["end_positions"] = torch.zeros(ROWS, dtype=torch.int64)
    ours = hf.unpad(copy.deepcopy(stock), span_loss="stock")
    monkeypatch.setattr(fallback, "_said", set())
    with pytest.warns(hf.StockFallbackWarning, match="the softmax of its loss is over padding"):
        assert torch.equal(ours(**call).loss, stock(**call).loss)


def test_an_attention_that_was_changed_afterwards() -> None:
    """Nothing runs packed by an attention that knows nothing of sequences."""
    stock = make("EuroBert")
    ours = hf.unpad(copy.deepcopy(stock))
    for model in (stock, ours):
        model.set_attn_implementation("eager")
    with pytest.warns(hf.StockFallbackWarning, match="its attention became 'eager' after"):
        assert torch.equal(ours(**batch(RIGHT))[0], stock(**batch(RIGHT))[0])
    call = {"input_ids": torch.randint(5, 61, (1, 7)), "cu_seq_lens_q": torch.tensor([0, 3, 7])}
    with pytest.raises(ValueError, match="its attention became 'eager' after `unpad`; pass a pad"):
        ours(**call)


def test_models_that_share_a_configuration() -> None:
    first = make("Ernie")
    both = nn.ModuleList([first, type(first)._from_config(first.config)])
    assert both[0].config is both[1].config
    hf.repad(hf.unpad(both))
    assert first.config._attn_implementation == "sdpa"


def test_checkpointing_cannot_go_with_stock_calls() -> None:
    ours = hf.unpad(make("ModernBert")).train()
    ours.gradient_checkpointing_enable()
    left = {key: value.flip(1) for key, value in batch(RIGHT).items()}
    with pytest.warns(hf.StockFallbackWarning), pytest.raises(ValueError, match="checkpointing"):
        ours(**left)


def test_a_configuration_without_return_dict() -> None:
    stock = make("Albert", return_dict=False)
    ours = hf.unpad(copy.deepcopy(stock))
    got, want = ours(**batch(RIGHT)), stock(**batch(RIGHT))
    assert isinstance(got, tuple)
    assert_same_values(got[0][RIGHT], want[0][RIGHT])


def test_a_head_of_rows_refuses_packed_input() -> None:
    call = {"input_ids": torch.randint(5, 61, (1, 7)), "cu_seq_lens_q": torch.tensor([0, 3, 7])}
    with pytest.raises(ValueError, match="this model's head reads the rows of a padded batch"):
        hf.unpad(make("ModernBert", "ForSequenceClassification"))(**call)


def test_packed_input_that_a_model_would_mix_raises() -> None:
    call = {"input_ids": torch.randint(5, 61, (1, 7)), "cu_seq_lens_q": torch.tensor([0, 3, 7])}
    with pytest.raises(ValueError, match="its embeddings need to know each sequence's tokens"):
        hf.unpad(make("Esm"))(**call)
    model = make("Esm")
    model.set_attn_implementation(NAME)
    more = {"cu_seq_lens_k": call["cu_seq_lens_q"], "max_length_q": 4, "max_length_k": 4}
    with pytest.raises(ValueError, match="a token of this model depends on others"):
        model(**call, **more)


@pytest.mark.parametrize("name", KNOWN)
def test_what_cannot_be_packed_is_stock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = make(name, attn_implementation="eager")
    stock.set_attn_implementation("eager")
    ours = hf.unpad(copy.deepcopy(stock))
    left = {key: value.flip(1) for key, value in batch(RIGHT).items()}
    for call, reason in (
        (batch(RIGHT) | {"output_attentions": True}, "output_attentions is asked for"),
        (left, "the first position, which the model may read, is padding"),
        (batch(HOLES), "padding between tokens, which counts in the model's distances of tokens"),
    ):
        if "distances" in reason and name != "ModernBert":
            continue
        monkeypatch.setattr(fallback, "_said", set())
        with pytest.warns(hf.StockFallbackWarning, match=reason):
            got = ours(**call)
        want = stock(**call)
        assert torch.equal(got[0], want[0])
        assert len(got.get("attentions") or ()) == len(want.get("attentions") or ())
    assert ours.config._attn_implementation == NAME


@pytest.mark.parametrize("name", KNOWN)
def test_users_tools(name: str) -> None:
    stock = make(name)
    ours = hf.unpad(copy.deepcopy(stock))
    call = batch(RIGHT)
    want = stock(**call)[0][RIGHT]
    copies = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    for model in (*copies, torch.compile(ours, backend="aot_eager")):
        assert_same_values(model(**call)[0][RIGHT], want)
    with torch.inference_mode():
        assert_same_values(ours(**call)[0][RIGHT], want)
    ours.train()
    if ours.supports_gradient_checkpointing:
        ours.gradient_checkpointing_enable()
    embeddings = ours.get_input_embeddings().weight
    found = []
    for model in (ours, stock.train(), copy.deepcopy(stock).double()):
        model.zero_grad()
        model(**call)[0][RIGHT].square().sum().backward()
        found.append(model.get_input_embeddings().weight.grad)
    assert embeddings.grad is found[0]
    assert_same_values(*found[:2], truth=found[2])
    hf.repad(ours)
    assert type(ours) is type(stock)
    assert ours.config._attn_implementation == "sdpa"
    assert torch.equal(ours.eval()(**call)[0], stock.eval()(**call)[0])


@pytest.mark.parametrize("name", KNOWN)
def test_16_bits_are_as_good_as_stock(name: str) -> None:
    stock = make(name)
    ours = hf.unpad(copy.deepcopy(stock))
    call = batch(RIGHT)
    with torch.no_grad():
        truth = stock(**call)[0][RIGHT]
        errors = [
            (model.bfloat16()(**call)[0][RIGHT].float() - truth).norm() for model in (ours, stock)
        ]
    assert errors[0] <= 1.5 * errors[1]


def test_support_is_said() -> None:
    model = make("ModernBert", "ForSequenceClassification")
    assert hf.supports(model).accelerated == {"model": "the call, and layers"}
    decoder = make("Ernie", is_decoder=True)
    assert hf.supports(decoder).stock == {"": "it is a decoder"}


# Of the sums that end the halves of a layer, where a family drops less than it is configured to.
DROPS = {"Albert": [0.25, 0.0], "EuroBert": [0.0], "ModernBert": [0.125], "XLMRobertaXL": [0.25]}
ROTARY = [name for name in KNOWN if name in ("EuroBert", "JinaEmbeddingsV3", "NomicBert")]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The layers that our operators have computed."""
    layers: list[nn.Module] = []

    def compute(layer: nn.Module, *arguments: object) -> Tensor:
        layers.append(layer)
        return original(layer, *arguments)

    original = stock_modules.compute
    monkeypatch.setattr(stock_modules, "compute", compute)
    return layers


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, stock_modules.FusedLayer)]


@pytest.mark.parametrize("name", KNOWN)
def test_operators_compute_the_layers(
    name: str, fused: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: dict[str, list[float]] = {}
    kinds = {"varlen_attention": "attention"}
    kinds |= dict.fromkeys(("dropout_add_layer_norm", "dropout_add_rms_norm"), "ends")
    for operator, kind in kinds.items():
        called = getattr(ops, operator)

        def watched(*arguments, _called=called, _kind=kind, **more):
            rates.setdefault(_kind, []).append(more["dropout_p"])
            return _called(*arguments, **more)

        monkeypatch.setattr(ops, operator, watched)
    dropped = {"hidden_dropout_prob": 0.25, "attention_probs_dropout_prob": 0.125}
    ours = hf.unpad(make(name, **dropped, attention_dropout=0.125, mlp_dropout=0.25)).train()
    count = ours.config.num_hidden_layers
    ours(**batch(RIGHT))
    assert len(fused) == count
    assert rates["attention"] == [0.125] * count
    pre = layers_of(ours)[0]._bert_unpad_layer.parts(layers_of(ours)[0]).ffn_norm is None
    assert rates["ends"] == DROPS.get(name, [0.25] if pre else [0.25, 0.25]) * count
    ours.eval()(**batch(RIGHT))
    assert rates["attention"][count:] == [0.0] * count


@pytest.mark.parametrize("name", KNOWN)
def test_layers_with_hooks_inside_stay_stock(name: str, fused: list[nn.Module]) -> None:
    stock = make(name)
    ours = hf.unpad(copy.deepcopy(stock))
    layer = layers_of(ours)[-1]
    attention, called = layer._bert_unpad_layer.parts(layer).attention, []
    attention.register_forward_hook(lambda *_: called.append(True))
    assert_same_values(ours(**batch(RIGHT))[0][RIGHT], stock(**batch(RIGHT))[0][RIGHT])
    assert called
    assert layer not in fused
    assert len(set(fused)) == len(layers_of(ours)) - 1


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("default", {}),
        ("default", {"factor": 4.0}),  # which it does not read
        ("linear", {"factor": 4.0}),
        ("dynamic", {"factor": 4.0}),
    ],
)
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_positions_of_other_kinds(
    name: str, kind: str, more: dict[str, float], fused: list[nn.Module]
) -> None:
    rope = {"rope_type": kind, "rope_theta": 77.0} | more
    stock = make(name, rope_parameters=rope)
    ours = hf.unpad(copy.deepcopy(stock))
    same_step(*(ours, stock, copy.deepcopy(stock).double()), lambda m: m(**batch(RIGHT))[0][RIGHT])
    assert len(fused) == (0 if kind == "dynamic" else 2)


def test_each_kind_of_layer_rotates_by_its_own_base(fused: list[nn.Module]) -> None:
    kinds = {"full_attention": 900.0, "sliding_attention": 30.0}
    rope = {kind: {"rope_type": "default", "rope_theta": t} for kind, t in kinds.items()}
    stock = make("ModernBert", rope_parameters=rope)
    ours = hf.unpad(copy.deepcopy(stock))
    same_step(*(ours, stock, copy.deepcopy(stock).double()), lambda m: m(**batch(RIGHT))[0][RIGHT])
    assert len(fused) == 3


@pytest.mark.parametrize("name", ROTARY)
def test_rounded_angles_are_those_of_the_stock_model(name: str, fused: list[nn.Module]) -> None:
    stock = make(name)
    ours = hf.unpad(copy.deepcopy(stock))
    for model in (ours, hf.unpad(copy.deepcopy(stock.half().float()))):
        got = model.half().float()(**batch(RIGHT))[0][RIGHT]
        assert_same_values(got, stock(**batch(RIGHT))[0][RIGHT])
    assert not fused


@pytest.mark.parametrize("name", KNOWN)
def test_autocast_is_as_good_as_stock(name: str) -> None:
    stock = make(name)
    ours = hf.unpad(copy.deepcopy(stock))
    call = batch(RIGHT)
    truth = stock(**call)[0][RIGHT]
    found = []
    for model in (ours, stock):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**call)[0]
        out[RIGHT].float().square().sum().backward()
        found.append(out)
    assert found[0].dtype == found[1].dtype
    errors = [(out[RIGHT].float() - truth).norm() for out in found]
    assert errors[0] <= 2 * errors[1]
    for got, want in zip(ours.parameters(), stock.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None)


@pytest.mark.parametrize("name", KNOWN)
def test_layers_compiled_one_by_one(name: str) -> None:
    stock = make(name)
    ours = hf.unpad(copy.deepcopy(stock))
    for layer in layers_of(ours):
        layer.compile(backend="aot_eager")
    assert_same_values(ours(**batch(RIGHT))[0][RIGHT], stock(**batch(RIGHT))[0][RIGHT])


@pytest.mark.parametrize(("name", "target"), [("ModernBert", "Wqkv"), ("EuroBert", "q_proj")])
def test_adapters(name: str, target: str, fused: list[nn.Module]) -> None:
    peft = pytest.importorskip("peft")
    found = []
    for swapped in (False, True):
        torch.manual_seed(derived(3))
        config = peft.LoraConfig(target_modules=[target], init_lora_weights=False)
        model = peft.get_peft_model(make(name), config).eval()
        found.append(hf.unpad(model) if swapped else model)
    stock, ours = found
    same_step(*(ours, stock, copy.deepcopy(stock).double()), lambda m: m(**batch(RIGHT))[0][RIGHT])
    assert len(fused) == ours.config.num_hidden_layers
