"""One whole run, from the command line to the report, and what a second start of it says."""

import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from bert_unpad.data import WordPieceTokenizer
from bert_unpad.nn import BertForPreTraining, EncoderConfig
from bert_unpad.pretrain import main
from bert_unpad.pretrain.config import ConfigError, DataConfig, LoggingConfig, PretrainConfig
from bert_unpad.pretrain.output import matmul_peak
from bert_unpad.pretrain.output.display import Display
from bert_unpad.pretrain.output.matmul_peak import MatmulPeak, measure_matmul_peak
from bert_unpad.pretrain.output.metrics import read_json_lines
from bert_unpad.pretrain.output.model_card import write_model_card
from bert_unpad.pretrain.output.run_folder import save_settings
from bert_unpad.pretrain.ranks import threads_per_process
from tests.support.processes import TIMEOUT, start_ranks

TEXT = ["The cat sat on the mat.", "A dog ran after the cat.", "The mat was red.", "Rain fell."]


def _main_with_plots(arguments: list[str]) -> int:
    del sys.modules["matplotlib"]  # which `start_ranks` hides
    return main(arguments)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A finished run of one rank in bf16, two passes per update, and a second start of it."""
    folder = tmp_path_factory.mktemp("report")
    documents = ["\n".join([*TEXT[d % 3 :], f"Number {d}."]) for d in range(60)]
    (folder / "corpus.txt").write_text("\n\n".join(documents) + "\n")
    settings = {
        "run_dir": str(folder / "run"),
        "device": "cpu",
        "rank_timeout": TIMEOUT,
        "precision": "bf16",
        "recompute": "layer",
        "model": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
        "data": {
            "source": str(folder / "corpus.txt"),
            "cache_dir": str(folder / "cache"),
            "max_seq_length": 24,
            "vocab_size": 150,
            "validation_share": 0.2,
        },
        "batching": {"batch_size_per_rank": 4, "accumulation": 2},
        "optimizer": {"lr": 5e-3},
        "schedule": {"total_steps": 25, "warmup_steps": 5},
        "evaluation": {"every": 10},
        "logging": {"every": 5},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    for log in ("first", "second"):
        arguments = ["--config", str(folder / "run.yaml")]
        (process,) = start_ranks(_main_with_plots, 1, arguments, log=folder / log)
        process.join(timeout=TIMEOUT)
        assert process.exitcode == 0, (folder / f"{log}.0").read_text()
    return folder / "run"


def test_metrics_and_summary(run_dir):
    lines = read_json_lines(run_dir / "metrics.jsonl")
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train] == [5, 10, 15, 20, 25]
    assert [x["step"] for x in lines if x["kind"] == "evaluation"] == [10, 20, 25]
    assert train[-1]["loss"] < train[0]["loss"] - 0.5
    assert [line["lr"] for line in train][:2] == [5e-3, pytest.approx(5e-3 * 16 / 20)]
    for line in train:
        assert 0 < line["fill"] <= 1
        assert line["straggler_efficiency"] == 1
        assert line["measured_efficiency"] is None
        assert line["work_variation"] > 0
        assert 0 < line["mfu"] < 1
        assert line["gradient_norm"] > 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 25
    assert summary["sequences"] == train[-1]["sequences"]
    assert summary["padding_avoided"] == pytest.approx(
        1 - summary["tokens"] / (summary["sequences"] * 24)
    )
    assert summary["held_out"]["mlm_accuracy"] == lines[-1]["mlm_accuracy"]
    assert 0 < summary["most_frequent_token_rate"] < 1


def test_what_is_shown(run_dir):
    first, second = ((run_dir.parent / f"{name}.0").read_text() for name in ("first", "second"))
    for shown in ("step 25/25", "most frequent token", "Held-out text:", "[MASK]", "ETA"):
        assert shown in first
    assert "nothing to do: all 25 steps are done" in second
    assert "step 25/25" not in second


def test_exported_files(run_dir):
    assert (run_dir / "training.png").read_bytes().startswith(b"\x89PNG")
    model = BertForPreTraining.from_pretrained(run_dir / "model")
    tokenizer = WordPieceTokenizer.load(run_dir / "model")
    assert model.config.vocab_size == tokenizer.vocab_size
    assert model.config.hidden_size == 32
    about = json.loads((run_dir / "model" / "tokenizer_config.json").read_text())
    assert about["model_max_length"] == 24
    assert model.config.extra["cls_token_id"] == tokenizer.cls_id
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert saved["optimizer"]["lr"] == 5e-3
    assert saved["batching"]["strategy"] == "stratified"


def test_the_model_card_says_data_recipe_metrics_and_licence(run_dir):
    summary = json.loads((run_dir / "summary.json").read_text())
    card = ModelCard.load(run_dir / "model" / "README.md")
    assert (card.data.license, card.data.library_name) == ("unknown", "transformers")
    assert (card.data.pipeline_tag, card.data.datasets) == ("fill-mask", None)
    found = {result.metric_name: result.metric_value for result in card.data.eval_results}
    names = ("loss", "mlm_accuracy", "nsp_accuracy")
    assert found == {name: summary["held_out"][name] for name in names}
    assert {result.dataset_name for result in card.data.eval_results} == {"held out of corpus.txt"}
    for shown in ("25 updates", "adamw, learning rate 0.005", "24 tokens", "bf16", "## Licence"):
        assert shown in card.text
    assert str(run_dir.parent) not in card.content  # nothing of this machine is published


def test_a_model_card_names_data_sets_of_the_hub(tmp_path):
    model = BertForPreTraining(
        EncoderConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
            intermediate_size=8,
        )
    )  # fmt: skip
    config = PretrainConfig()
    config.data = DataConfig(
        mixture={"hf:org/texts?split=train": 2.0, "stdlib": 1.0}, tokenizer=str(tmp_path)
    )
    counts = dict.fromkeys(("parameters", "steps", "sequences", "tokens", "seconds"), 3)
    summary = counts | {"held_out": None, "ranks": 1, "device": "cpu"}
    write_model_card(tmp_path, config, model, summary)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.datasets == ["org/texts"]
    assert card.data.eval_results is None
    assert "text: org/texts, docstrings of Python's standard library" in card.text
    assert "no example was held out" in card.text


DAMAGED_SETTINGS = {
    "empty": b"",
    "binary": bytes(range(128, 256)),
    "list": b"[1, 2]",
    "foreign tag": b"seed: !!python/object/apply:os.getcwd []",
    "nested": b"[" * 1000,
    "its own part": b"model: &model {model: *model}",
}


@pytest.mark.parametrize("damage", [*DAMAGED_SETTINGS, "folder", "device"])
def test_damaged_settings_are_set_aside(tmp_path, caplog, damage):
    path = tmp_path / "config.yaml"
    if damage == "folder":
        path.mkdir()
    elif damage == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(DAMAGED_SETTINGS[damage])
    save_settings(tmp_path, "seed: 1\n")
    assert path.read_text() == "seed: 1\n"
    assert f"{path} is damaged and now called config.yaml.damaged-1: " in caplog.text


@pytest.mark.parametrize(
    "log", [b"", b'{"kind": "start", "step": 0}\n{"kind": "train", "step": 5}\n']
)
def test_a_report_of_a_damaged_log_says_what_is_missing(
    run_dir, tmp_path, log, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    (copy / "metrics.jsonl").write_bytes(log)
    (copy / "summary.json").write_text("[]")
    arguments = ["--config", str(run_dir.parent / "run.yaml"), "--run_dir", str(copy)]
    assert main(arguments) == 0
    assert json.loads((copy / "summary.json").read_text())["steps"] == 25
    assert re.search(r"training loss at the end +not in the log", capsys.readouterr().out)


def test_peak_is_measured():
    peak = measure_matmul_peak(torch.device("cpu"), torch.float32)
    assert 1e8 < peak.flops_per_second < 1e15
    assert "float32 matmul 1024" in str(peak)


def test_peak_is_that_of_the_products_that_are_made(monkeypatch):
    rates = {torch.bfloat16: 5e10, torch.float32: 2e11}
    monkeypatch.setattr(
        matmul_peak, "_measure", lambda _device, dtype, _threads: MatmulPeak(rates[dtype], 8, dtype)
    )
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        assert measure_matmul_peak(torch.device(device), torch.bfloat16).dtype == dtype
    rates[torch.bfloat16] = 4e11
    assert measure_matmul_peak(torch.device("cpu"), torch.bfloat16).dtype == torch.bfloat16
    assert measure_matmul_peak(torch.device("cpu"), torch.float32).dtype == torch.float32


def test_tensorboard_shows_every_step_once(tmp_path):
    """Of a run that was killed after step 4 and resumed from the checkpoint of step 2."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = LoggingConfig(tracker="tensorboard", progress="none")
    line = {"kind": "train", "loss": 1.0, "mlm_accuracy": None, "tokens_per_second": 1.0}
    line |= {"fill": 0.5, "straggler_efficiency": 1.0, "mfu": 0.5, "lr": 1e-3}
    for done, last in ((0, 4), (2, 3)):
        display = Display(config, tmp_path, step=done, total=9, silent=False)
        for step in range(done + 1, last + 1):
            display.update(line | {"step": step, "loss": 10.0 * last + step}, 0.0)
        display.close()
    read = events.EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(1, 41), (2, 42), (3, 33)]
    assert "train/mlm_accuracy" not in read.Tags()["scalars"]


@pytest.mark.parametrize(
    ("tracker", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")]
)
def test_a_missing_tracker_is_an_error(monkeypatch, tmp_path, tracker, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"logging\.tracker.*bert_unpad\[{tracker}\]"):
        Display(LoggingConfig(tracker=tracker), tmp_path, step=0, total=1, silent=False)


class FakeWandb(SimpleNamespace):
    """What is used of the package."""

    def init(self, **arguments):
        self.runs.append(arguments)
        return SimpleNamespace(
            log=lambda figures, step: self.logged.append((step, figures)),
            finish=lambda: self.logged.append("finished"),
        )


def test_a_resumed_run_goes_on_with_its_run_of_wandb(monkeypatch, tmp_path, caplog):
    wandb = FakeWandb(runs=[], logged=[])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "encoders")
    line = {"kind": "train", "step": 1, "loss": 2.0, "lr": 1.25e-3, "mlm_accuracy": None}
    line |= dict.fromkeys(("tokens_per_second", "fill", "straggler_efficiency", "mfu"), 0.5)
    config = LoggingConfig(tracker="wandb", progress="lines")
    run_dir = tmp_path / "one"
    run_dir.mkdir()
    with caplog.at_level(logging.INFO):
        for done in (0, 1, 0):
            Display(config, run_dir, done, 9, silent=True, settings={"a": 1}).close()
            display = Display(config, run_dir, done, 9, silent=False, settings={"a": 1})
            display.update(line, 0.0)
            display.evaluated({"step": 1, "loss": 3.0, "mlm_accuracy": 0.25})
            display.close()
    first, resumed, anew = wandb.runs
    assert first == resumed
    assert first["id"] != anew["id"]
    assert (first["project"], first["name"], first["config"]) == ("encoders", "one", {"a": 1})
    (step, train), (_, evaluation), end = wandb.logged[:3]
    assert (step, train["train/lr"], end) == (1, 1.25e-3, "finished")
    assert "train/mlm_accuracy" not in train
    assert evaluation == {"evaluation/loss": 3.0, "evaluation/mlm_accuracy": 0.25}
    assert "lr 1.25e-03" in caplog.text


def test_threads_per_process(monkeypatch):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert threads_per_process(1) == cores
    assert threads_per_process(2 * cores) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_per_process(1) == 1
    # torchrun sets 1 where the user has set nothing, so under torchrun 1 means nothing.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert threads_per_process(1) == cores
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_process(1) == 3
