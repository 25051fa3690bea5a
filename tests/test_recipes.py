"""Recipes of configs/ train: two updates of a tiny model at the recipe's own lengths and settings.

One that starts with fresh weights, and from its model one that starts from a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from mp import start_ranks

from bert_unpad.pretrain import main
from bert_unpad.pretrain.metrics import read_json_lines

CONFIGS = Path(__file__).parents[1] / "configs"
TINY = {
    "model": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    },
    "data": {"vocab_size": 150, "validation_share": 0.2},
    "batching": {"global_batch_size": 4},
    "schedule": {"total_steps": 2},
    "evaluation": {"examples": 4, "batch_size": 4},
    "logging": {"every": 1},
}


def _train(recipe: Path, folder: Path, start: Path | None = None) -> Path:
    """Runs it on made-up text, from the model in `start` if it needs one; the run's folder."""
    words = ["cat", "dog", "mat", "rain", "red", "sat", "ran", "fell", "the", "a"]
    documents = []
    for d in range(20):
        lines = (" ".join(words[(d * s + w) % 10] for w in range(5 + s)) for s in range(1, 25))
        documents.append("\n".join([f"Number {d}.", *lines]))
    (folder / "corpus.txt").write_text("\n\n".join(documents) + "\n")
    settings = yaml.safe_load(recipe.read_text())
    for section, values in TINY.items():
        settings[section] = settings.get(section, {}) | values
    settings["data"] |= {
        "source": str(folder / "corpus.txt"),
        "cache_dir": str(folder / "cache"),
    }
    settings |= {"run_dir": str(folder / "run"), "device": "cpu"}
    if start is not None and "vocab_file" in settings["data"]:
        settings["model"]["preset"] = str(start)
        settings["data"]["vocab_file"] = str(start / "vocab.txt")
    if "warmup_steps" in settings["schedule"]:
        settings["schedule"]["warmup_steps"] = 1
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    arguments = ["--config", str(folder / "tiny.yaml")]
    (process,) = start_ranks(main, 1, arguments, log=folder / "log")
    process.join(timeout=60)
    assert process.exitcode == 0, (folder / "log.0").read_text()
    return folder / "run"


def _check(run: Path) -> None:
    lines = read_json_lines(run / "metrics.jsonl")
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train] == [1, 2]
    for line in train:
        assert 0 < line["loss"] < 10
        assert line["gradient_norm"] > 0
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [2]


def test_recipes_train(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    first = _train(CONFIGS / "bert_base_phase1.yaml", folders[0])
    _check(first)
    _check(_train(CONFIGS / "bert_large_mlperf.yaml", folders[1], first / "model"))
