"""Recipes of configs/ train: two updates of a tiny model at the recipe's own lengths and settings.

One that starts with fresh weights, and from its model one that starts from a checkpoint.
"""

from pathlib import Path

import pytest
import torch
import yaml

from bert_unpad.pretrain import main
from bert_unpad.pretrain.config import read_config
from bert_unpad.pretrain.gradients.cuda_graphs import check_graphs
from bert_unpad.pretrain.output.metrics import read_json_lines
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.update.check import check_optimizer
from bert_unpad.pretrain.update.schedule import lr_factor, warmup_updates
from tests.support.paths import CONFIGS
from tests.support.pretrain_runs import log_lines
from tests.support.processes import TIMEOUT, start_ranks

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
    "evaluation": {"examples": 4},
    "logging": {"every": 1},
}


def _train(
    recipe: Path, folder: Path, start: Path | None = None, ranks: int = 1, more: tuple = ()
) -> Path:
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
    settings |= {"run_dir": str(folder / "run"), "device": "cpu", "rank_timeout": TIMEOUT}
    settings["cuda_graphs"] = False
    if start is not None and "vocab_file" in settings["data"]:
        settings["model"]["preset"] = str(start)
        settings["data"]["vocab_file"] = str(start / "vocab.txt")
    if "warmup_steps" in settings["schedule"]:
        settings["schedule"]["warmup_steps"] = 1
    if "warmup_steps" in settings["batching"]:
        settings["batching"] |= {"warmup_batch_size": 2, "warmup_steps": 1}
    if "accumulation" in settings["batching"]:
        settings["batching"]["accumulation"] = 2
    (folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    arguments = ["--config", str(folder / "tiny.yaml"), *more]
    processes = start_ranks(main, ranks, arguments, log=folder / "log")
    for process in processes:
        process.join(timeout=TIMEOUT)
    codes = [process.exitcode for process in processes]
    assert codes == [0] * ranks, (folder / "log.0").read_text()
    return folder / "run"


def _check(run: Path) -> None:
    lines = read_json_lines(run / "metrics.jsonl")
    train = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train] == [1, 2]
    for line in train:
        assert 0 < line["mlm_loss"] < 10
        assert line["gradient_norm"] > 0
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [2]


def test_recipes_train(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "cluster", "adam")]
    for folder in folders:
        folder.mkdir()
    first = _train(CONFIGS / "bert_base_phase1.yaml", folders[0])
    _check(first)
    _check(_train(CONFIGS / "bert_large_mlperf.yaml", folders[1], first / "model"))
    _check(_train(CONFIGS / "cluster_fp16.yaml", folders[2]))
    # Each rank's part of a large batch in several passes, clipped bucket by bucket.
    clip = ("--clip.max_norm", "1.0", "--batching.accumulation", "2", "--comm.bucket_mb", "0.01")
    adam = CONFIGS / "bert_large_adam_16384.yaml"
    run = _train(adam, folders[3], first / "model", ranks=2, more=clip)
    _check(run)
    lines = log_lines(run)
    assert all(0 < line["clipped_share"] <= 1 for line in lines)


@pytest.mark.parametrize(
    "name", ["roberta_base", "albert_base", "electra_small", "modernbert_base", "esm2_8m"]
)
def test_recipes_of_other_families_train_and_go_on(name: str, tmp_path: Path) -> None:
    more = ("--data.vocab_size", "300")
    run = _train(
        CONFIGS / f"{name}.yaml", tmp_path, more=(*more, "--model.num_attention_heads", "4")
    )
    _check(run)
    # Another run continues from the model in Hugging Face's layout, which has the sizes.
    for key in TINY["model"]:
        more = (*more, f"--model.{key}", "null")
    more = (*more, "--model.preset", str(run / "model"), "--run_dir", str(tmp_path / "again"))
    _train(CONFIGS / f"{name}.yaml", tmp_path, more=more)
    _check(tmp_path / "again")


@pytest.mark.parametrize("mode", ["bucket", "before", "after", "none"])
@pytest.mark.parametrize("more", [(), ("--optimizer.shard", "node"), ("--cuda_graphs", "false")])
def test_the_adam_recipe_takes_every_clip_mode(mode: str, more: tuple) -> None:
    path = CONFIGS / "bert_large_adam_16384.yaml"
    config, _ = read_config(["--config", str(path), "--clip.mode", mode, *more])
    ranks = Ranks(0, 1024, torch.device("cuda"), None)
    assert config.batching.per_pass(ranks.world_size) == 16
    check_graphs(config, ranks)
    check_optimizer(config, torch.device("cpu"))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_for_gpus_take_graphs_on_any_number_of_ranks(path: Path) -> None:
    """Where they may: a generator draws tokens within a pass; in fp32 a recipe is for CPUs."""
    config, _ = read_config(["--config", str(path)])
    assert config.cuda_graphs == (config.precision != "fp32" and config.data.objective != "rtd")
    for ranks in (1, 32):
        check_graphs(config, Ranks(0, ranks, torch.device("cuda"), None))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_a_valid_configuration(path: Path) -> None:
    config, _ = read_config(["--config", str(path)])
    schedule = config.schedule
    warmup = warmup_updates(schedule, schedule.total_steps)
    rates = [
        config.optimizer.lr
        * lr_factor(step, schedule, total_steps=schedule.total_steps, warmup_steps=warmup)
        for step in (0, warmup + schedule.start_warmup_step, schedule.total_steps)
    ]
    assert rates[1] == pytest.approx(config.optimizer.lr, rel=0.05)
    if path.stem == "bert_large_adam_16384":
        # Update 1 is the 17th of the warm-up's 82.
        assert rates[0] == pytest.approx(3.92994e-4 * 17 / 82)
        assert rates[2] == pytest.approx(4.94549e-5, rel=1e-4)
