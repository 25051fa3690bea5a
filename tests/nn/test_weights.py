"""Hugging Face checkpoints, both ways, and equality of loss and gradients with transformers."""

import dataclasses
import json
import logging
import os

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from bert_unpad.batch import PackedInputs, VarlenBatch, pad, unpad
from bert_unpad.nn import BertConfig, BertForPreTraining, weights
from bert_unpad.nn.flops import forward_flops
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_gradients, assert_same_values

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 24,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def hf_model(kind: str = "BertForPreTraining", **changes):
    torch.manual_seed(derived(0))
    config = transformers.BertConfig(**SIZES, **NO_DROPOUT, initializer_range=0.2, **changes)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model


def own_model() -> BertForPreTraining:
    torch.manual_seed(derived(3))
    config = BertConfig(**SIZES, **NO_DROPOUT, initializer_range=0.2, extra={"use_cache": True})
    model = BertForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


MASKS = {
    "right": [[1] * 10, [1] * 6 + [0] * 4, [1] * 9 + [0]],
    "left": [[0] * 4 + [1] * 6, [1] * 10, [0] + [1] * 9],
    "holes": [[1, 0, 1, 1, 0, 1, 1, 1, 0, 1], [1] * 10, [0, 0, 1, 1, 0, 1, 1, 1, 0, 0]],
}


def padded_and_packed(padding: str):
    """The same batch for transformers (padded, keyword arguments) and packed."""
    generator = torch.Generator().manual_seed(derived(2))
    mask = torch.tensor(MASKS[padding])
    shape = mask.shape
    # No padding token (0) in the text: transformers drops its embedding's gradient.
    ids = torch.randint(1, 61, shape, generator=generator)
    token_types = torch.randint(2, shape, generator=generator)
    first = mask.cumsum(1) == 1
    chosen = (torch.rand(shape, generator=generator) < 0.4) & (mask == 1) & ~first
    labels = torch.where(chosen, torch.randint(61, shape, generator=generator), -100)
    next_sentence = torch.tensor([0, 1, 1])
    batch = VarlenBatch.from_mask(mask)
    positions = (unpad(labels, batch) != -100).nonzero().flatten()
    packed = PackedInputs.build(
        batch=batch,
        input_ids=unpad(ids, batch),
        token_type_ids=unpad(token_types, batch),
        masked_positions=positions,
        masked_labels=unpad(labels, batch)[positions],
        next_sentence_labels=next_sentence,
    )
    padded = {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": token_types,
        "labels": labels,
        "next_sentence_label": next_sentence,
    }
    return padded, packed


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new", "gelu_pytorch_tanh"])
def test_loss_and_gradients_equal_transformers(tmp_path, hidden_act):
    stock = hf_model(hidden_act=hidden_act)
    stock.save_pretrained(tmp_path)
    model = BertForPreTraining.from_pretrained(tmp_path)
    padded, packed = padded_and_packed("right")

    want = stock(**padded)
    want.loss.backward()
    got = model(packed)
    loss = got.mlm_loss_sum / packed.num_masked + got.nsp_loss_sum / 3
    loss.backward()
    assert_same_values(loss, want.loss)

    stock_grads = {name: p.grad for name, p in stock.named_parameters()}
    # Our gradients, renamed and split the same way as the parameters they belong to.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    own_grads = weights.to_hf_state_dict(model)
    assert_same_gradients(own_grads, stock_grads)


@pytest.mark.parametrize("padding", MASKS)
def test_logits_equal_transformers_for_any_padding(tmp_path, padding):
    stock = hf_model().eval()
    stock.save_pretrained(tmp_path)
    model = BertForPreTraining.from_pretrained(tmp_path).eval()
    padded, packed = padded_and_packed(padding)
    with torch.no_grad():
        want = stock(**padded)
        mlm, nsp = model.logits(packed, all_positions=True)
        mlm_masked, _ = model.logits(packed)
        hidden = model.encode(packed)
        want_hidden = stock.bert(**{k: padded[k] for k in list(padded)[:3]}).last_hidden_state
    batch = packed.batch
    assert_same_values(mlm, unpad(want.prediction_logits, batch))
    assert_same_values(mlm_masked, mlm[packed.masked_positions])
    kept = padded["attention_mask"][..., None]
    assert_same_values(pad(hidden, batch), want_hidden * kept)
    # transformers pools column 0, which only right padding leaves to a token
    if padding == "right":
        assert_same_values(nsp, want.seq_relationship_logits)


def test_transformers_reads_what_we_write(tmp_path):
    model = own_model().eval()
    folder = tmp_path / "new" / "folder"
    model.save_pretrained(folder)
    stock, info = transformers.AutoModelForPreTraining.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    padded, packed = padded_and_packed("right")
    with torch.no_grad():
        want = stock.eval()(**padded)
        mlm, nsp = model.logits(packed, all_positions=True)
    expected = unpad(want.prediction_logits, packed.batch)
    assert_same_values(mlm, expected)
    assert_same_values(nsp, want.seq_relationship_logits)
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["config.json", "model.safetensors"]
    assert json.loads((folder / "config.json").read_text())["use_cache"] is True


def test_round_trip_is_exact_and_overrides_apply(tmp_path):
    model = own_model()
    model.save_pretrained(tmp_path)
    again = BertForPreTraining.from_pretrained(tmp_path, hidden_dropout_prob=0.25)
    assert again.config.hidden_dropout_prob == 0.25
    assert again.bert.encoder.layer[0].output.dropout_p == 0.25
    for name, tensor in weights.to_hf_state_dict(model).items():
        assert torch.equal(tensor, weights.to_hf_state_dict(again)[name]), name
    assert (again.word_embeddings[61:] == 0).all()
    with pytest.raises(TypeError, match="no_such_field"):
        BertForPreTraining.from_pretrained(tmp_path, no_such_field=1)


def test_saved_dtype_is_that_of_the_parameters(tmp_path):
    model = own_model().bfloat16()
    model.config.extra["torch_dtype"] = "float16"
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["dtype"] == "bfloat16"
    assert "torch_dtype" not in saved
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert BertForPreTraining.from_pretrained(tmp_path).word_embeddings.dtype == torch.float32


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    own_model().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def half_written(tensors, path, metadata=None):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(weights, "save_file", half_written)
    with pytest.raises(OSError, match="disk full"):
        hf_model_as_own().save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def hf_model_as_own() -> BertForPreTraining:
    model = BertForPreTraining(BertConfig(**SIZES))
    weights.load_state_dict(model, hf_model().state_dict())
    return model


def test_shards_are_read_through_their_index(tmp_path):
    stock = hf_model()
    stock.save_pretrained(tmp_path, max_shard_size="50KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    model = BertForPreTraining.from_pretrained(tmp_path)
    expected = stock.state_dict()
    for name, tensor in weights.to_hf_state_dict(model).items():
        assert torch.equal(tensor, expected[name]), name
    os.remove(shards[1])
    with pytest.raises(FileNotFoundError, match=shards[1].name):
        BertForPreTraining.from_pretrained(tmp_path)


HEADS = {
    "cls.predictions.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
}
POOLER_AND_NSP = {
    "bert.pooler.dense.weight",
    "bert.pooler.dense.bias",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
}


@pytest.mark.parametrize(
    ("kind", "missing", "unexpected"),
    [
        ("BertModel", HEADS, set()),
        ("BertForMaskedLM", POOLER_AND_NSP, set()),
        ("BertForSequenceClassification", HEADS, {"classifier.weight", "classifier.bias"}),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, caplog, kind, missing, unexpected):
    stock = hf_model(kind)
    stock.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not fit") as error:
        BertForPreTraining.from_pretrained(tmp_path)
    assert all(name in str(error.value) for name in missing | unexpected)

    with caplog.at_level(logging.WARNING, logger="bert_unpad"):
        model = BertForPreTraining.from_pretrained(tmp_path, strict=False)
    assert all(name in caplog.text for name in missing | unexpected)
    report = weights.load_state_dict(model, stock.state_dict(), strict=False)
    assert (set(report.missing), set(report.unexpected)) == (missing, unexpected)
    own = weights.to_hf_state_dict(model)
    for name, tensor in stock.state_dict().items():
        name = f"bert.{name}" if kind == "BertModel" else name
        if name in own:
            assert torch.equal(own[name], tensor), name


def test_older_names_are_understood():
    modern = hf_model().state_dict()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta")
        .replace("intermediate.dense", "intermediate.dense_act"): tensor
        for name, tensor in modern.items()
        if name not in ("cls.predictions.bias", "cls.predictions.decoder.weight")
    }
    old["bert.embeddings.position_ids"] = torch.arange(24)[None]
    assert "cls.predictions.decoder.bias" in old
    assert any(name.endswith("gamma") for name in old)
    model = BertForPreTraining(BertConfig(**SIZES))
    assert not weights.load_state_dict(model, old)
    for name, tensor in weights.to_hf_state_dict(model).items():
        assert torch.equal(tensor, modern[name]), name


def test_a_checkpoint_that_does_not_fit_leaves_the_model_alone():
    tensors = dict(hf_model().state_dict())
    model = own_model()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    query = "bert.encoder.layer.1.attention.self.query.weight"
    for change, message in (
        ({query: torch.zeros(64, 63)}, rf"{query}: expected shape \[64, 64\], got \[64, 63\]"),
        (
            {"cls.predictions.decoder.weight": torch.zeros(61, 64)},
            "untied decoders are not supported",
        ),
        ({"bert.embeddings.position_ids": torch.ones(1, 24)}, "position_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            weights.load_state_dict(model, tensors | change)
    del tensors[query]
    with pytest.raises(ValueError, match=f"missing: {query}"):
        weights.load_state_dict(model, tensors)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        BertForPreTraining.from_pretrained(tmp_path)
    BertConfig(**SIZES).to_json(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        BertForPreTraining.from_pretrained(tmp_path)


def test_config_of_transformers_is_kept(tmp_path):
    stock = transformers.BertConfig(**SIZES, id2label={0: "a", 1: "b", 2: "c"})
    stock.save_pretrained(tmp_path)
    config = weights.read_config(tmp_path)
    assert {name: getattr(config, name) for name in SIZES} == SIZES
    again = transformers.BertConfig.from_dict(config.to_dict())
    assert again.to_dict() == stock.to_dict()
    assert again.num_labels == 3


def test_flop_count_equals_what_pytorch_counts_for_the_padded_model():
    stock = hf_model(attn_implementation="eager").eval()
    ids = torch.randint(61, (3, 10), generator=torch.Generator().manual_seed(derived(0)))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        stock(input_ids=ids)
    config = dataclasses.replace(BertConfig(**SIZES), **NO_DROPOUT)
    assert counter.get_total_flops() == forward_flops(config, [10, 10, 10], num_masked=30)
