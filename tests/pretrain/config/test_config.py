"""The configuration: files and overrides, and errors that name the key."""

import dataclasses
import math
import typing
from collections.abc import Iterator

import pytest
import torch
import yaml

from bert_unpad.nn import (
    PRESETS,
    BertConfig,
    BertForPreTraining,
    EncoderConfig,
    EncoderForPreTraining,
)
from bert_unpad.pretrain.config import ConfigError, ModelConfig, read_config
from bert_unpad.pretrain.model import build_model
from bert_unpad.pretrain.update.schedule import warmup_updates
from tests.support.paths import CONFIGS

BASE = ["--batching.global_batch_size", "8", "--schedule.total_steps", "10"]


def test_overrides_go_before_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optimizer: {lr: 0.5, eps: 1e-8}\ndata: {max_seq_length: 64}\n")
    config, text = read_config(["--config", str(file), "--optimizer.lr", "3e-4", *BASE])
    assert config.optimizer.lr == 3e-4
    assert config.optimizer.eps == 1e-8
    assert config.data.max_seq_length == 64
    assert yaml.safe_load(text)["optimizer"]["lr"] == 3e-4


def test_the_saved_configuration_repeats_the_run(tmp_path):
    config, text = read_config(["--optimizer.betas", "[0.8, 0.95]", "--clip.mode", "none", *BASE])
    file = tmp_path / "config.yaml"
    file.write_text(text)
    again, same = read_config(["--config", str(file)])
    assert again == config
    assert same == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.lrr", "1"], "optimizer.lrr: expected an option such as optimizer.lr, got"),
        (["--optimizer.l", "1"], "optimizer.l: expected an option such as optimizer.lr, got"),
        (["--optimizer", "{lrr: 1}"], "optimizer.lrr: expected an option such as optimizer.lr"),
        (["--optimizer.lr", "fast"], "optimizer.lr: expected a number, got 'fast'"),
        (["--optimizer.lr", "null"], "optimizer.lr: expected a number, got 'null'"),
        (
            ["--optimizer.betas", "[1]"],
            r"optimizer.betas: expected a list of 2 numbers or null, got '\[1\]'",
        ),
        (["--seed", "1.5"], "seed: expected an integer, got '1.5'"),
        (["--compile", "maybe"], "compile: expected true or false, got 'maybe'"),
        (["--growth.layers", "3"], "growth.layers: expected a list of integers or null, got '3'"),
        (
            ["--clip.mode", "all"],
            "clip.mode: expected one of bucket, before, after, none, got 'all'",
        ),
        (
            ["--config", "no-such-file.yaml"],
            "config: expected a YAML file, got 'no-such-file.yaml'",
        ),
        (["--seed"], "seed: expected a value, got none"),
        (["seed"], "command line: expected --section.key VALUE, got 'seed'"),
    ],
)
def test_what_is_no_option_or_value(arguments, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        read_config([*BASE, *arguments])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {rate: 0.5}", "optimizer.rate: expected an option such as "),
        ("optimizer.rate: 0.5", "optimizer.rate: expected an option such as "),
        ("optimizer: {lr: fast}", "optimizer.lr: expected a number, got 'fast'"),
        ("optimizer: 3", "optimizer: expected options of this section, got 3"),
        ("threads: 3", "threads: expected an option such as "),
        ("a: [", "config: expected YAML, got an error: "),
        ("some text", "config: expected options in YAML, got 'some text'"),
    ],
)
def test_what_is_no_option_or_value_in_a_file(text, message, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^{message}"):
        read_config([*BASE, "--config", str(file)])


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--batching.batch_size_per_rank", "4"], "batching.batch_size_per_rank"),
        (["--batching.global_batch_size", "null"], "batching.global_batch_size"),
        (["--schedule.epochs", "2"], "schedule.epochs"),
        (["--schedule.warmup_steps", "2", "--schedule.warmup_share", "0.1"], "warmup_share"),
        (["--clip.mode", "bucket", "--clip.max_norm", "0"], "clip.max_norm"),
        (["--clip.wire_dtype", "fp16"], "clip.wire_dtype"),
        (["--clip.error_feedback", "true"], "clip.error_feedback"),
        (["--optimizer.betas", "[0.9, 1.0]"], "optimizer.betas"),
        (["--optimizer.lr", "-1"], "optimizer.lr"),
        (["--evaluation.target_accuracy", "72"], "evaluation.target_accuracy"),
        (["--checkpoint.keep_last", "0"], "checkpoint.keep_last"),
        (["--data.max_seq_length", "2"], "data.max_seq_length: expected 5"),
        (["--rank_timeout", "0"], "rank_timeout: expected a number"),
        (["--evaluation.examples", "0", "--evaluation.target_accuracy", "1"], "examples: expected"),
    ],
)
def test_settings_that_do_not_fit(arguments, key):
    with pytest.raises(ConfigError, match=key):
        read_config([*BASE, *arguments])


def _refusals(kind: type, value: object) -> Iterator[tuple[str, ConfigError]]:
    """What every setting that may be such a number, or several, says of a value."""
    config, _ = read_config(BASE)
    sections = {f"{x}.": y for x, y in vars(config).items() if dataclasses.is_dataclass(y)}
    for prefix, section in ({"": config} | sections).items():
        for name, hint in typing.get_type_hints(type(section)).items():
            hints = {hint, *typing.get_args(hint)}
            several = any(
                typing.get_origin(x) in (list, tuple) and kind in typing.get_args(x) for x in hints
            )
            if kind not in hints and not several:
                continue
            before = getattr(section, name)
            object.__setattr__(section, name, [value] if several else value)
            with pytest.raises(ConfigError) as refused:
                config.validate()
            object.__setattr__(section, name, before)
            yield f"{prefix}{name}", refused.value


# Of all settings, so that a new one cannot be forgotten.
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_are_finite(value):
    refusals = dict(_refusals(float, value))
    assert {"optimizer.lr", "optimizer.betas", "growth.shares", "comm.bucket_mb"} <= set(refusals)
    for key, error in refusals.items():
        assert str(error) == f"{key}: expected a finite number, got {value}"


@pytest.mark.parametrize("value", [2**63, 2**64, -(2**63) - 1])
def test_integers_have_64_bits(value):
    refusals = dict(_refusals(int, value))
    assert {"seed", "data.seed", "batching.accumulation", "growth.layers"} <= set(refusals)
    for key, error in refusals.items():
        assert str(error).startswith(f"{key}: expected an integer of at most 64 bits")


def test_numbers_are_checked_where_they_are_read():
    for key, value, message in (
        ("seed", str(2**63), "seed: expected an integer of at most 64 bits"),
        ("optimizer.lr", ".inf", r"optimizer\.lr: expected a finite number, got inf"),
        ("optimizer.lr", "1" + 400 * "0", "expected numbers of 64 bits"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_config([*BASE, f"--{key}", value])


def test_the_greatest_seed_is_allowed():
    config, _ = read_config([*BASE, "--seed", str(2**63 - 1)])
    assert config.seed == 2**63 - 1


@pytest.mark.parametrize("key", ["run_dir", "data.cache_dir"])
@pytest.mark.parametrize("path", ["", " ", "a\0b"])
def test_folders_have_names(key, path):
    with pytest.raises(ConfigError, match=rf"{key}: expected the path of a folder, got "):
        read_config([*BASE, f"--{key}", path])


@pytest.mark.parametrize("content", [b"\x80\x81", b"\x1f\x8b\x08", "seed: 1".encode("utf-16")])
def test_a_binary_file_is_no_configuration(content, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="config: expected a YAML file in UTF-8"):
        read_config([*BASE, "--config", str(file)])


def test_a_folder_whose_sizes_are_damaged(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(ConfigError, match=r"^model\.preset: expected a config\.json, got .*: "):
        ModelConfig(preset=str(tmp_path)).resolve(1000)


def test_model_sizes():
    large = ModelConfig(preset="bert-large", hidden_dropout_prob=0.0).resolve(vocab_size=1000)
    assert (large.hidden_size, large.num_hidden_layers, large.vocab_size) == (1024, 24, 1000)
    assert large.hidden_dropout_prob == 0.0
    with pytest.raises(ConfigError, match=r"^model\.preset: expected one of albert-base, "):
        ModelConfig(preset="bert-huge").resolve(1000)
    with pytest.raises(ConfigError, match="num_attention_heads"):
        ModelConfig(num_attention_heads=7).resolve(1000)


@pytest.mark.parametrize("preset", PRESETS)
def test_dropout_of_attention_weights_in_every_family(preset):
    given = ["--model.preset", preset, "--data.objective", "mlm"]
    config, _ = read_config([*BASE, *given, "--model.attention_probs_dropout_prob", "0.07"])
    sizes = config.model.resolve(1000, config.data)
    assert sizes.attention_probs_dropout_prob == 0.07


def test_presets_of_other_families():
    sizes = ModelConfig(preset="albert-base", num_hidden_layers=6).resolve(vocab_size=1000)
    assert (sizes.model_type, sizes.vocab_size, sizes.embedding_size) == ("albert", 1000, 128)
    assert (sizes.num_hidden_layers, sizes.num_hidden_groups) == (6, 1)
    with pytest.raises(ConfigError, match=r"model\.preset: heads: expected one of .*roberta"):
        ModelConfig(preset="roberta-base").resolve(1000)  # has no head for pairs of sentences


def test_a_preset_may_be_a_file(tmp_path):
    path = tmp_path / "sizes.json"
    BertConfig(hidden_size=64, num_attention_heads=2, hidden_act="gelu_new").to_json(path)
    given = ModelConfig(preset=str(path), num_hidden_layers=3)
    sizes = given.resolve(vocab_size=1000)
    assert (sizes.hidden_size, sizes.hidden_act, sizes.num_hidden_layers) == (64, "gelu_new", 3)
    assert sizes.vocab_size == BertConfig.vocab_size
    assert given.weights is None
    with pytest.raises(
        ConfigError, match=r"model\.preset: expected a vocab_size of at least .* 40000"
    ):
        given.resolve(40_000)
    BertConfig(type_vocab_size=1).to_json(path)
    with pytest.raises(ConfigError, match=r"model\.preset: expected a type_vocab_size .*, got 1"):
        ModelConfig(preset=str(path)).resolve(1000)


def test_global_batch_must_split_evenly():
    config, _ = read_config(BASE)
    assert config.batching.per_rank(4) == 2
    with pytest.raises(ConfigError, match=r"batching\.global_batch_size"):
        config.batching.per_rank(3)


RECIPES = sorted(CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(recipe):
    config, _ = read_config(["--config", str(recipe)])
    assert config.run_dir == f"runs/{recipe.stem}"
    warmup_updates(config.schedule, config.schedule.total_steps)
    if config.model.weights is None:
        sizes = config.model.resolve(config.data.vocab_size, config.data)
        assert sizes.max_position_embeddings >= config.data.max_seq_length


def test_a_model_goes_on_with_fewer_heads(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = BertForPreTraining(BertConfig(vocab_size=64, intermediate_size=32, **sizes))
    whole.save_pretrained(tmp_path)
    given = ["--schedule.total_steps", "1", "--batching.global_batch_size", "1"]
    given += ["--model.preset", str(tmp_path), "--data.objective", "mlm"]
    model = build_model(read_config(given)[0], 64, 32)
    assert model.config.heads == ("mlm",)
    weights = whole.state_dict()
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())


def test_a_tokenizer_that_is_not_the_models(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = EncoderConfig(**PRESETS["esm2-8m"] | sizes | {"intermediate_size": 32})
    EncoderForPreTraining(config).save_pretrained(tmp_path)
    given = ["--schedule.total_steps", "1", "--batching.global_batch_size", "1"]
    given += ["--model.preset", str(tmp_path), "--data.objective", "mlm"]
    with pytest.raises(ConfigError, match=r"data\.tokenizer: expected the model's, whose \[MASK\]"):
        build_model(read_config(given)[0], 33, 32, 0, 4)


def test_ids_of_padding_that_leave_too_few_positions():
    given = ["--schedule.total_steps", "1", "--batching.global_batch_size", "1"]
    given += ["--model.preset", "roberta-base", "--data.objective", "mlm"]
    with pytest.raises(
        ConfigError, match=r"expected at least 50796, for the tokens of .* 50284 ro"
    ):
        build_model(read_config(given)[0], 50_300, 512, 50_283)
