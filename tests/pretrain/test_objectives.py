"""Whole runs of each objective: what they learn and report, and going on with the same bits."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from bert_unpad.data import DataConfig
from bert_unpad.nn import BertConfig
from bert_unpad.pretrain import main
from bert_unpad.pretrain.config import ConfigError, ModelConfig, PretrainConfig, read_config
from bert_unpad.pretrain.losses import TASKS, averages
from bert_unpad.pretrain.model import build_model
from tests.support.pretrain_runs import (
    finish,
    go_back,
    log_lines,
    make_folder,
    run_in_turn,
    start,
    uses,
)

STEPS = 24
COMMON = (
    *("--schedule.epochs", "null", "--schedule.total_steps", str(STEPS)),
    *("--checkpoint.every", "6", "--checkpoint.keep_last", "9", "--logging.progress", "lines"),
)
RUNS = {
    "mlm": ["--data.objective", "mlm"],
    "joined": [
        *("--data.objective", "mlm", "--data.documents", "joined"),
        *("--model.preset", "modernbert-base", "--model.attention_probs_dropout_prob", "0.1"),
    ],
    "packed": [
        *("--data.objective", "mlm", "--batching.strategy", "packed", "--data.tokenizer", "bpe"),
        *("--data.vocab_size", "300", "--data.mask_unit", "word"),
    ],
    "mlm_sop": [
        *("--data.objective", "mlm_sop", "--batching.strategy", "exchange"),
        *("--model.preset", "albert-base", "--model.hidden_dropout_prob", "0.1"),
    ],
    "rtd": [
        *("--data.objective", "rtd", "--data.documents", "joined"),
        *("--model.preset", "electra-small", "--batching.accumulation", "2"),
    ],
}
WEIGHTS = {name: {"mlm": 1} for name in RUNS}
WEIGHTS |= {"mlm_sop": {"mlm": 1, "sop": 1}, "rtd": {"mlm": 1, "rtd": 50}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("objectives")
    make_folder(path)
    run_in_turn(path, 2, RUNS, COMMON)
    (path / "runs.log.0").rename(path / "printed.log")  # other runs write one of that name
    return path


def _tasks(line: dict) -> set[str]:
    ends = ("_loss", "_accuracy")
    return {name.rpartition("_")[0] for name in line if name.endswith(ends)}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_reports_are_of_what_is_learned(folder, name):
    lines, wanted = log_lines(folder / name), WEIGHTS[name]
    assert len(lines) == STEPS
    summary = json.loads((folder / name / "summary.json").read_text())
    for line in (*lines, *log_lines(folder / name, "evaluation"), summary["held_out"]):
        assert _tasks(line) == set(wanted)
        parts = [weight * line[f"{task}_loss"] for task, weight in wanted.items()]
        assert line["loss"] == pytest.approx(sum(parts))
        assert all(part > 0 for part in parts)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (folder / name / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_what_is_printed(folder):
    output = (folder / "printed.log").read_text()
    assert "next-sentence" not in output
    assert "nsp" not in output
    assert output.count("held out: masked-token accuracy") == len(RUNS)
    assert output.count("held out: sentence-order accuracy") == 1
    assert output.count("held out: replaced-token accuracy") == 1
    assert output.count("Held-out text:  [CLS]") == 2 * len(RUNS)


@pytest.mark.slow
def test_joined_examples_are_full(folder):
    """Each but the last has 32 tokens, or a few less where a document ends at its edge."""
    joined, apart = (log_lines(folder / name)[-1] for name in ("joined", "mlm"))
    assert joined["fill"] > 0.95 > apart["fill"]
    assert log_lines(folder / "packed")[-1]["fill"] > 0.9
    assert set(uses(folder / "joined")[0].values()) == {1}


@pytest.mark.slow
def test_runs_go_on_with_the_same_bits(folder):
    names = ("joined", "mlm_sop", "rtd")
    for name in names:
        shutil.copytree(folder / name, folder / f"{name}_resumed")
        (folder / f"{name}_resumed" / "summary.json").unlink()
        for checkpoint in (folder / f"{name}_resumed" / "checkpoints").glob("step-*"):
            if not checkpoint.name.endswith("12"):
                shutil.rmtree(checkpoint)
    run_in_turn(folder, 2, {f"{name}_resumed": RUNS[name] for name in names}, COMMON)
    for name in names:
        ours, theirs = (log_lines(path) for path in (folder / f"{name}_resumed", folder / name))
        for a, b in zip(ours, theirs, strict=True):
            same = [key for key in a if key.endswith(("_loss", "_accuracy", "_norm"))]
            assert [a[key] for key in same] == [b[key] for key in same]


@pytest.mark.slow
def test_what_replaced_tokens_leave(folder):
    """A discriminator and a generator for transformers; and a run that goes on from both."""
    transformers = pytest.importorskip("transformers")
    saved = folder / "rtd" / "model"
    model = transformers.ElectraForPreTraining.from_pretrained(saved)
    generator = transformers.ElectraForMaskedLM.from_pretrained(saved / "generator")
    assert (model.config.hidden_size, generator.config.hidden_size) == (16, 8)
    words = [x.get_input_embeddings().weight for x in (model.electra, generator.electra)]
    assert torch.equal(*words)
    settings = yaml.safe_load((folder / "run.yaml").read_text())
    del settings["model"]
    (folder / "further.yaml").write_text(yaml.safe_dump(settings))
    given = ["--config", str(folder / "further.yaml"), "--run_dir", str(folder / "further")]
    given += ["--model.preset", str(saved), "--schedule.epochs", "null"]
    assert main([*given, "--data.objective", "rtd", "--schedule.total_steps", "2"]) == 0
    first, last = (log_lines(folder / name, "train") for name in ("further", "rtd"))
    assert first[0]["mlm_loss"] < 0.9 * last[0]["mlm_loss"]


@pytest.mark.slow
def test_replaced_tokens_with_everything_shared_out(folder):
    """As without shards to rounding, and a run that goes on has the same bits."""
    shards = {"rtd_overlap": ["overlap", "--comm.bucket_mb", "0.01"], "rtd_fsdp": ["fsdp"]}
    runs = {name: [*RUNS["rtd"], "--optimizer.shard", *more] for name, more in shards.items()}
    run_in_turn(folder, 2, runs, COMMON)
    again = {go_back(folder, name, 12): more for name, more in runs.items()}
    run_in_turn(folder, 2, again, COMMON)
    want = load_file(folder / "rtd" / "model" / "generator" / "model.safetensors")
    for name, resumed in zip(runs, again, strict=True):
        ours, theirs, plain = (log_lines(folder / run) for run in (name, resumed, "rtd"))
        for a, b, c in zip(ours, theirs, plain, strict=True):
            same = [key for key in a if key.endswith(("_loss", "_accuracy", "_norm"))]
            assert [a[key] for key in same] == [b[key] for key in same]
            assert a["loss"] == pytest.approx(c["loss"], rel=1e-3)
        got = load_file(folder / name / "model" / "generator" / "model.safetensors")
        assert got.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, rtol=1e-2, atol=1e-3)


BASE = ["--batching.global_batch_size", "8", "--schedule.total_steps", "9"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--model.generator_share", "0.5"],
            "generator_share: expected 0.25 with data.objective m",
        ),
        (
            ["--data.objective", "rtd", "--cuda_graphs", "true"],
            "cuda_graphs: expected false with data.objective rtd, which draws tokens",
        ),
        (
            ["--data.objective", "rtd", "--growth.name", "stacking"],
            "growth.name: expected none or lengths with data.objective rtd, of whose two encoders",
        ),
        (
            ["--data.objective", "rtd", "--model.generator_share", "0"],
            "generator_share: expected a number > 0 and <= 1",
        ),
    ],
)
def test_what_replaced_tokens_exclude(given, message):
    with pytest.raises(ConfigError, match=message):
        read_config([*BASE, *given])


def test_a_model_without_a_detector():
    config, _ = read_config([*BASE, "--data.objective", "rtd"])
    with pytest.raises(
        ConfigError, match=r"model\.preset: heads: expected .*in a model of type bert"
    ):
        config.model.resolve(100, config.data)


@pytest.mark.slow
def test_a_model_of_one_segment(folder, capsys):
    """RoBERTa's type_vocab_size; it cannot learn of two segments."""
    settings = yaml.safe_load((folder / "run.yaml").read_text())
    sizes = {"vocab_size": 120, "type_vocab_size": 1, **settings.pop("model")}
    BertConfig(**sizes).to_json(folder / "sizes.json")
    (folder / "one.yaml").write_text(yaml.safe_dump(settings))
    given = ["--model.preset", str(folder / "sizes.json"), "--schedule.epochs", "null"]
    given += ["--schedule.total_steps", "2", "--run_dir", str(folder / "one")]
    command = ["--config", str(folder / "one.yaml"), *given]
    assert main([*command, "--data.objective", "mlm"]) == 0
    assert main(command) == 2
    assert "model.preset: expected a type_vocab_size of at least 2" in capsys.readouterr().err


def test_a_fresh_model_notes_the_tokenizers_padding(tmp_path):
    """RoBERTa's positions begin after the id of padding, in transformers too."""
    sizes = {"vocab_size": 90, "hidden_size": 16, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 40}
    for preset, pads in (({"model_type": "roberta"}, ((1, 2), (0, 1))), ({}, ((0, 0), (3, 0)))):
        own = {"type_vocab_size": 1} if preset else {}
        config = BertConfig.from_dict(sizes | own | preset)
        config.to_json(tmp_path / "sizes.json")
        run = PretrainConfig(model=ModelConfig(preset=str(tmp_path / "sizes.json")))
        run.data = DataConfig(objective="mlm")
        for pad, offset in pads:
            found = build_model(run, 80, 32, pad).config
            assert (found.pad_token_id, found.position_offset) == (pad, offset)
        assert build_model(run, 80, 32).config.pad_token_id == config.pad_token_id


@pytest.mark.slow
def test_finished_examples_without_their_pairs(folder):
    pytest.importorskip("h5py")
    from tests.support.hdf5_files import LONGEST, raw_examples, write_folder
    from tests.support.imported import imported

    write_folder(folder / "hdf5", raw_examples(), "variable")
    source = imported(f"hdf5:{folder / 'hdf5'}", folder / "shards")
    given = ["--data.source", source, "--data.max_seq_length", str(LONGEST)]
    given += ["--evaluation.examples", "0"]
    given += ["--model.max_position_embeddings", str(LONGEST), "--data.objective"]
    codes, output = finish(folder, "pairs", start(folder, "pairs", 1, *COMMON, *given, "mlm"))
    assert codes == [0], output
    assert all(_tasks(line) == {"mlm"} for line in log_lines(folder / "pairs"))
    codes, output = finish(folder, "sop", start(folder, "sop", 1, *COMMON, *given, "mlm_sop"))
    assert codes == [2]
    assert "got mlm_sop (in_order_or_swapped)" in output


@pytest.mark.parametrize("objective", TASKS)
def test_averages_are_of_the_objectives_tasks(objective):
    sums = {"mlm_loss": 6.0, "mlm_correct": 1.0, "second_loss": 2.0, "second_correct": 3.0}
    found = averages(sums | {"masked": 4.0, "pairs": 8.0, "tokens": 16.0}, objective)
    names = [task.name for task in TASKS[objective]]
    assert list(found) == ["loss", *(f"{n}_{x}" for n in names for x in ("loss", "accuracy"))]
    assert (found["mlm_loss"], found["mlm_accuracy"]) == (1.5, 0.25)
    second = {"mlm_nsp": 0.25, "mlm": 0.0, "mlm_sop": 0.25, "rtd": 50 * 0.125}[objective]
    assert found["loss"] == 1.5 + second
    none = averages(sums | {"masked": 0.0, "pairs": 0.0, "tokens": 0.0}, objective)
    assert none.pop("loss") == 0
    assert set(none.values()) == {None}
