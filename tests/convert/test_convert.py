"""Checkpoints between layouts: bit for bit there and back, nothing dropped without a word."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_unpad import convert
from bert_unpad.nn import BertConfig, BertForPreTraining
from tests.support.seeds import derived

CONFIG = BertConfig(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=16,
)


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(derived(0))
    model = BertForPreTraining(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def run(*arguments) -> int:
    return convert.main([str(argument) for argument in arguments])


def assert_same_tensors(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


def test_hf_to_nvidia_and_back(checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path / "model.pt", "--to", "nvidia") == 0
    saved = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    assert saved["bert.pooler.dense_act.weight"].shape == (32, 32)
    assert "bert.encoder.layer.1.intermediate.dense_act.bias" in saved
    assert "cls.predictions.transform.dense_act.weight" in saved
    assert "bert.encoder.layer.1.output.dense.bias" in saved
    assert saved["cls.predictions.decoder.weight"].shape == (64, 32)
    assert saved["cls.predictions.bias"].shape == (64,)
    again = run(
        tmp_path / "model.pt", tmp_path / "again", "--from", "nvidia", "--config",
        tmp_path / "model.json",
    )  # fmt: skip
    assert again == 0
    assert (
        "cls.predictions.bias: left out 3 rows that pad the vocabulary" in capsys.readouterr().err
    )
    name = "model.safetensors"
    assert_same_tensors(load_file(tmp_path / "again" / name), load_file(checkpoint / name))
    loaded = BertForPreTraining.from_pretrained(tmp_path / "again")
    original = BertForPreTraining.from_pretrained(checkpoint)
    assert_same_tensors(loaded.state_dict(), original.state_dict())


def test_nvidia_from_a_ddp_checkpoint_with_16_bit_tensors(checkpoint, tmp_path):
    assert run(checkpoint, tmp_path / "model.pt", "--to", "nvidia") == 0
    saved = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    wrapped = {f"module.{name}": tensor.half() for name, tensor in saved.items()}
    torch.save(wrapped, tmp_path / "ddp.pt")
    config = ("--config", tmp_path / "model.json")
    assert run(tmp_path / "ddp.pt", tmp_path / "out", "--from", "nvidia", *config) == 0
    found, want = (load_file(d / "model.safetensors") for d in (tmp_path / "out", checkpoint))
    assert_same_tensors(found, {name: tensor.half() for name, tensor in want.items()})


def test_missing_and_unknown_tensors_are_listed(checkpoint, tmp_path, capsys):
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors["bert.pooler.dense.bias"]
    tensors["bert.extra"] = torch.ones(2)
    save_file(tensors, file)
    assert run(checkpoint, tmp_path / "model.pt", "--to", "nvidia") == 1
    err = capsys.readouterr().err
    assert "missing: bert.pooler.dense.bias" in err
    assert "unknown: bert.extra" in err
    assert "nothing written" in err
    assert not (tmp_path / "model.pt").exists()
    assert run(checkpoint, tmp_path / "model.pt", "--to", "nvidia", "--allow-partial") == 0
    assert "bert.extra" in torch.load(tmp_path / "model.pt", weights_only=True)["model"]


def test_refuses(checkpoint, tmp_path, capsys):
    assert run(checkpoint, tmp_path / "model.pt", "--to", "nvidia") == 0
    assert run(tmp_path / "model.pt", tmp_path / "out", "--from", "nvidia") == 1
    assert "give --config" in capsys.readouterr().err
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    saved["model"]["cls.predictions.decoder.weight"] += 1
    torch.save(saved, tmp_path / "untied.pt")
    config = ("--config", tmp_path / "model.json")
    assert run(tmp_path / "untied.pt", tmp_path / "out", "--from", "nvidia", *config) == 1
    assert "an untied decoder" in capsys.readouterr().err
    saved["model"]["bert.pooler.dense_act.bias"] = torch.ones(3)
    saved["model"]["cls.predictions.decoder.weight"] -= 1
    del saved["model"]["cls.predictions.decoder.weight"]
    torch.save(saved, tmp_path / "shape.pt")
    assert run(tmp_path / "shape.pt", tmp_path / "out", "--from", "nvidia", *config) == 1
    assert "bert.pooler.dense.bias: expected shape [32], got [3]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("hf", "nothing does not exist; expected a folder with config.json and model.safetensors"),
        ("google", "nothing.index does not exist; expected a checkpoint's prefix or index"),
        ("nvidia", "nothing does not exist; expected a file of torch.save"),
    ],
)
def test_a_source_that_is_not_there_is_named(checkpoint, tmp_path, capsys, layout, expected):
    config = ("--config", checkpoint / "config.json")
    assert run(tmp_path / "nothing", tmp_path / "out", "--from", layout, *config) == 2
    error = capsys.readouterr().err
    assert f"source: {tmp_path / expected}" in error
    assert "Errno" not in error
    assert run(checkpoint, tmp_path / "out", "--config", tmp_path / "c.json") == 2
    assert f"--config: {tmp_path / 'c.json'} does not exist" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_target_that_cannot_be_written_is_named(checkpoint, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run(checkpoint, tmp_path / "file" / "out") == 1
    assert "target: " in capsys.readouterr().err
