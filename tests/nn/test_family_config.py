"""config.json of every family: what is refused, and what the parts of a family are."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch

from bert_unpad.nn import FAMILIES, PRESETS, EncoderConfig, EncoderForPreTraining

SMALL = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("is_decoder", True, "False"),
        ("add_cross_attention", True, "False"),
        ("pruned_heads", {"0": [1]}, "none"),
        ("num_hidden_layers", 0, "an integer from 1"),
        ("vocab_size", "many", "an integer from 1"),
        ("initializer_range", 0.0, "a number above 0"),
    ],
)
def test_what_no_family_supports(model_type: str, name: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected {expected}.*, got "):
        EncoderConfig.from_dict({"model_type": model_type, name: value})


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("roberta", {"position_embedding_type": "relative_key"}, "position_embedding_type: "),
        ("roberta", {"pad_token_id": None}, "pad_token_id: expected an integer, got None"),
        ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings: expected more than"),
        ("roberta", {"tie_word_embeddings": False}, "tie_word_embeddings: expected True"),
        ("electra", {"embedding_size": 0}, "embedding_size: expected an integer from 1"),
        ("electra", {"hidden_act": "relu"}, "hidden_act: expected one of gelu"),
        ("albert", {"num_hidden_groups": 5}, "num_hidden_layers: expected a multiple of"),
        ("albert", {"inner_group_num": 0}, "inner_group_num: expected an integer from 1"),
        ("albert", {"classifier_dropout_prob": 1.0}, "classifier_dropout_prob: expected a number"),
    ],
)
def test_what_a_family_does_not_support(model_type: str, values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        EncoderConfig.from_dict({"model_type": model_type} | values)


def test_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ValueError, match=r"config\.json: model_type: expected one of bert, .*'t5'"):
        EncoderConfig.from_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_size": 16}, "embedding_size: expected None in a model of type bert, got 16"),
        ({"position_offset": 2}, "position_offset: expected 0 in a model of type bert, got 2"),
        ({"head_act": "gelu"}, "head_act: expected None in a model of type bert"),
        ({"model_type": "albert"}, "embedding_size|num_hidden_groups|feed_forward_dropout_prob"),
        ({"heads": ("rtd",)}, r"heads: expected one of .*'nsp'.* in a model of type bert"),
        ({"heads": ("mlm", "mlm")}, "heads: expected one or more of mlm, nsp, rtd"),
        ({"heads": ()}, "heads: expected one or more of mlm, nsp, rtd"),
        ({"heads": ("lm",)}, "heads: expected one or more of mlm, nsp, rtd"),
    ],
)
def test_parts_of_another_family_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderConfig(**changes)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str) -> None:
    config = EncoderConfig(**PRESETS[name])
    assert EncoderConfig.from_dict(config.to_dict() | {"architectures": [_first(config)]}) == (
        dataclasses.replace(config, extra={"architectures": [_first(config)]})
    )
    with torch.device("meta"):
        model = EncoderForPreTraining(config)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == pytest.approx(PARAMETERS[name] * 1e6, rel=0.02)


def _first(config: EncoderConfig) -> str:
    return config.family.architecture(config.heads)


# Millions, with heads: as the papers and model cards state them for the models.
PARAMETERS = {
    "bert-base": 110,
    "bert-large": 336,
    "roberta-base": 125,
    "albert-base": 12,
    "electra-small": 13.5,
    "electra-base": 109,
}


@pytest.mark.parametrize("seed", range(4))
def test_any_parts_make_a_model_that_is_saved_and_loaded(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    parts = {name: draw.choice(values) for name, values in PARTS.items()}
    config = EncoderConfig(**SMALL | parts, model_type="bert_unpad", intermediate_size=48)
    torch.manual_seed(seed)
    model = EncoderForPreTraining(config)
    model.save_pretrained(tmp_path)
    again = EncoderForPreTraining.from_pretrained(tmp_path)
    assert dataclasses.replace(again.config, extra={}) == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


PARTS = {
    "embedding_size": [None, 16, 32],
    "heads": [("mlm",), ("mlm", "nsp"), ("mlm", "nsp", "rtd"), ("rtd",)],
    "hidden_act": ["gelu", "gelu_new"],
    "head_act": [None, "gelu", "gelu_new"],
    "num_hidden_groups": [None, 1, 2],
    "position_offset": [0, 3],
    "type_vocab_size": [1, 2],
}
