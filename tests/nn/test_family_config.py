"""config.json of every family: what is refused, and what the parts of a family are."""

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn import FAMILIES, PRESETS, EncoderConfig, EncoderForPreTraining
from tests.support.encoder_parts import random_parts
from tests.support.seeds import derived

_DISENTANGLED = {"relative_positions": "disentangled", "relative_terms": ("c2p",)}


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
    values = {"model_type": model_type, "vocab_size": 40, "pad_token_id": 1, name: value}
    with pytest.raises(ValueError, match=f"^{name}: expected {expected}.*, got "):
        EncoderConfig.from_dict(values)


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
        ("modernbert", {"mlp_dropout": 0.1}, "mlp_dropout: expected 0.0, got 0.1"),
        ("modernbert", {"hidden_activation": "tanh"}, "hidden_activation: expected one of gelu, "),
        ("modernbert", {"norm_eps": 0}, "norm_eps: expected a number above 0"),
        ("modernbert", {"local_attention": "all"}, "local_attention: expected an integer of 1"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types: expected .* 22 layers"),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            r"rope_parameters\.full_attention\.rope_type: expected default or linear, got 'yarn'",
        ),
        (
            "modernbert",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
            r"rope_parameters\.full_attention\.factor: expected 1, got 2.0",
        ),
        ("eurobert", {"num_key_value_heads": 5}, "num_attention_heads: expected a multiple of "),
        ("eurobert", {"head_dim": 7}, "head_dim: expected an even number"),
        ("eurobert", {"rope_scaling": {"type": "dynamic"}}, r"rope_parameters\.rope_type: "),
        ("nomic_bert", {"tie_word_embeddings": False}, "tie_word_embeddings: expected True"),
        ("esm", {"position_embedding_type": "relative_key"}, "position_embedding_type: expected "),
        (
            "esm",
            {"pad_token_id": 1, "vocab_size": 9, "is_folding_model": True},
            "is_folding_model: expected False",
        ),
        ("mpnet", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets: expect"),
        ("deberta-v2", {"conv_kernel_size": 3}, "conv_kernel_size: expected 0, got 3"),
        ("deberta-v2", {"embedding_size": 64}, "embedding_size: expected 1536, got 64"),
        ("deberta-v2", {"legacy": False}, "legacy: expected True, got False"),
        ("deberta-v2", {"relative_attention": True}, "pos_att_type: expected c2p, p2c or both"),
        (
            "deberta-v2",
            {"relative_attention": True, "pos_att_type": ["p2p"]},
            "pos_att_type: expected c2p, p2c or both",
        ),
        (
            "deberta-v2",
            {"relative_attention": True, "pos_att_type": "c2p", "norm_rel_ebd": "batch"},
            "norm_rel_ebd: expected none or layer_norm",
        ),
        ("esm", {}, "pad_token_id: expected an integer, got None"),
        ("esm", {"pad_token_id": 1}, "vocab_size: expected an integer from 1"),
        (
            "esm",
            {"pad_token_id": 1, "vocab_size": 33, "token_dropout": True},
            "mask_token_id: expected a token with token_dropout, got None",
        ),
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


@pytest.mark.parametrize("name", PRESETS)
def test_dropout_of_attention_weights_can_be_set_in_every_family(name: str) -> None:
    config = dataclasses.replace(EncoderConfig(**PRESETS[name]), attention_probs_dropout_prob=0.07)
    modern = config.model_type in ("modernbert", "eurobert")
    values = config.to_dict()
    assert values["attention_dropout" if modern else "attention_probs_dropout_prob"] == 0.07
    again = EncoderConfig.from_dict(values)
    both = config.model_type == "modernbert"  # whose output projection has the same rate
    for found in (config, again):
        assert found.attention_probs_dropout_prob == 0.07
        assert (found.rate("attention_output_dropout_prob") == 0.07) == both
    if both:
        message = "^attention_output_dropout_prob: expected None in a model of type modernbert"
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, attention_output_dropout_prob=0.2)


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
    "modernbert-base": 149,
    "modernbert-large": 395,
    "eurobert-210m": 310,
    "nomic-bert-base": 137,
    "mpnet-base": 109,
    "deberta-v3-base": 184,
    "esm2-8m": 7.5,
    "esm2-35m": 34,
}


@pytest.mark.parametrize("seed", range(6))
def test_any_parts_make_a_model_that_is_saved_and_loaded(seed: int, tmp_path: Path) -> None:
    config = random_parts(random.Random(derived(seed)))
    torch.manual_seed(derived(seed))
    model = EncoderForPreTraining(config)
    model.save_pretrained(tmp_path)
    again = EncoderForPreTraining.from_pretrained(tmp_path)
    assert dataclasses.replace(again.config, extra={}) == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"norm": "batch"}, "norm: expected one of layer_norm, rms_norm, got 'batch'"),
        ({"norm_bias": 3}, "norm_bias: expected one of True, False, got 3"),
        ({"norm": "rms_norm"}, "norm_bias: expected False with norm rms_norm, got True"),
        ({"first_norm": True}, "first_norm: expected False with norm_place post"),
        ({"learned_positions": False, "position_offset": 1}, "position_offset: expected 0 without"),
        ({"embedding_norm": False}, "embedding_dropout_prob: expected 0 without a LayerNorm of"),
        ({"hidden_act": "silu"}, "hidden_act: expected one of gelu, gelu_new, .*_tanh, got 'silu'"),
        ({"head_act": "tanh"}, "head_act: expected one of gelu, .* silu, relu, got 'tanh'"),
        ({"window_pattern": ()}, "window_pattern: expected one or more integers of -1 or more"),
        ({"window_pattern": (-2,)}, "window_pattern: expected one or more integers"),
        ({"num_key_value_heads": 5}, "num_attention_heads: expected a multiple of num_key_value"),
        (
            {"relative_positions": "rotary", "attention_head_size": 7},
            "attention_head_size: expected an even number with rotary positions, got 7",
        ),
        ({"relative_positions": "alibi"}, "relative_positions: expected one of none, rotary, bias"),
        ({"relative_positions": "bias"}, "relative_buckets: expected a multiple of 4 from 4"),
        (
            {"relative_positions": "bias", "relative_buckets": 32, "max_relative_positions": 8},
            r"relative_buckets: expected .* less than 4 \* max_relative_positions = 32, got 32",
        ),
        ({"relative_positions": "disentangled"}, "relative_terms: expected c2p, p2c or both with"),
        ({"relative_terms": ("c2p",)}, "relative_terms: expected .*, else none"),
        ({"relative_terms": ("c2p", "c2p")}, "relative_terms: expected c2p, p2c, both or none"),
        (
            _DISENTANGLED | {"relative_buckets": 3},
            "relative_buckets: expected 0, or an even number from 4 to max_relative_pos",
        ),
        (_DISENTANGLED | {"num_key_value_heads": 1}, "num_key_value_heads: expected num_attention"),
        (_DISENTANGLED | {"attention_bias": False}, "attention_bias: expected True with disentan"),
        ({"token_dropout": True}, "mask_token_id: expected a token with token_dropout, got None"),
    ],
)
def test_parts_that_do_not_fit(parts: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        EncoderConfig(model_type="bert_unpad", **parts)


def test_windows_and_angles_in_older_and_newer_files() -> None:
    older = {
        "model_type": "modernbert",
        "num_hidden_layers": 7,
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
        "global_rope_theta": 1000.0,
        "local_rope_theta": 10.0,
    }
    config = EncoderConfig.from_dict(older)
    assert config.window_pattern == (-1, 64, 64)
    assert [config.window(layer) for layer in range(7)] == [-1, 64, 64, -1, 64, 64, -1]
    assert (config.rotary_theta, config.local_theta) == (1000.0, 10.0)
    newer = config.to_dict()
    assert newer["rope_parameters"]["full_attention"] == {
        "rope_type": "default",
        "rope_theta": 1000.0,
    }
    assert EncoderConfig.from_dict(newer) == config
    longer = dataclasses.replace(config, num_hidden_layers=9)
    assert longer.to_dict()["layer_types"][6:] == ["full_attention", *["sliding_attention"] * 2]

    euro = {"model_type": "eurobert", "rope_theta": 5.0, "rope_scaling": {"type": "linear"}}
    euro["rope_scaling"]["factor"] = 4.0
    config = EncoderConfig.from_dict(euro)
    assert (config.rotary_theta, config.rotary_factor) == (5.0, 4.0)
    assert EncoderConfig.from_dict(config.to_dict()) == config


def test_initial_weights_that_are_cut_off_and_scaled() -> None:
    sizes = {"vocab_size": 500, "hidden_size": 64, "num_attention_heads": 2}
    config = EncoderConfig(**PRESETS["modernbert-base"] | sizes | {"num_hidden_layers": 8})
    torch.manual_seed(derived(0))
    weights = dict(EncoderForPreTraining(config).named_parameters())
    for name, parameter in weights.items():
        if parameter.dim() == 1:
            continue
        small = ".output.dense." in name or ".transform." in name
        std = config.initializer_range / (4.0 if small else 1.0)
        assert parameter.abs().max() <= 2 * std, name
        # What is left of a normal distribution that is cut off at two standard deviations has 0.88
        # of its spread and a kurtosis of 2.4: six standard errors of the spread of these samples.
        rel = 6 * (1.4 / (4 * parameter[:500].numel())) ** 0.5
        assert parameter[:500].std().item() == pytest.approx(0.8796 * std, rel=rel), name


def test_scaled_angles_and_half_windows_of_modernbert() -> None:
    for kind in ("linear", "yarn"):
        scaled = {"model_type": "modernbert", "rope_scaling": {"rope_type": kind, "factor": 4.0}}
        with pytest.raises(ValueError, match=r"rope_parameters\.full_attention"):
            EncoderConfig.from_dict(scaled)
    config = EncoderConfig.from_dict({"model_type": "modernbert", "sliding_window": 16})
    assert max(config.window_pattern) == 16


def test_esm_files_with_positions_that_are_not_used(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    config = EncoderConfig(**PRESETS["esm2-8m"] | sizes | {"intermediate_size": 32})
    model = EncoderForPreTraining(config)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {"esm.embeddings.position_embeddings.weight": torch.zeros(1026, 16)}
    save_file(tensors, path)
    loaded = EncoderForPreTraining.from_pretrained(tmp_path)
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))


def test_esm_counts_masks_in_16_bits_too() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    config = EncoderConfig(**PRESETS["esm2-8m"] | sizes | {"intermediate_size": 32})
    embeddings = EncoderForPreTraining(config).bert.embeddings
    ids = torch.full((3001,), 5)
    ids[:900] = config.mask_token_id
    inputs = PackedInputs.build(batch=VarlenBatch.from_lengths([3001]), input_ids=ids)
    found = embeddings.bfloat16()._words(inputs)[-1] / embeddings.word_embeddings.weight[5]
    scale = (1 - 0.15 * 0.8) / (1 - 900 / 3001)
    torch.testing.assert_close(found.float(), torch.full((16,), scale), rtol=1e-2, atol=0.0)
