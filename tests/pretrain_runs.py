"""Whole runs of the trainer in processes of their own, on a tiny model and made-up text."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import yaml
from mp import start_ranks

from bert_unpad.data import DataConfig, prepare
from bert_unpad.pretrain import main
from bert_unpad.pretrain.metrics import read_json_lines

__all__ = [
    "GLOBAL_BATCH",
    "finish",
    "losses",
    "make_folder",
    "run",
    "settings",
    "start",
    "uses",
    "wait_for_step",
]

TIMEOUT = 60
GLOBAL_BATCH = 12


def settings(folder: Path) -> dict:
    """A tiny model on made-up text, two passes over it, on whatever number of ranks."""
    return {
        "seed": 11,
        "device": "cpu",
        "threads": 1,
        "recompute": "gelu",
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
        },
        "data": {
            "source": str(folder / "corpus.txt"),
            "cache_dir": str(folder / "cache"),
            "max_seq_length": 32,
            "vocab_size": 120,
            "validation_share": 0.1,
        },
        "batching": {"global_batch_size": GLOBAL_BATCH},
        "optimizer": {"lr": 1e-3},
        "schedule": {"epochs": 2, "warmup_share": 0.1},
        "checkpoint": {"every": 4, "keep_last": 2},
        "evaluation": {"every": 0, "examples": 20},
        "logging": {"every": 1, "examples": True, "plots": False},
    }


def make_folder(path: Path) -> None:
    """Prepares a corpus, its data and a configuration, `run.yaml`."""
    words = ["".join(pair) for pair in itertools.product(["ka", "lo", "mi", "tu"], repeat=2)]
    documents = [
        "\n".join(
            " ".join(words[(d * 7 + s * 5 + w * w) % 16] for w in range(2 + (d + s) % 9)) + "."
            for s in range(2 + d % 4)
        )
        + f" d{d}."
        for d in range(150)
    ]
    (path / "corpus.txt").write_text("\n\n".join(documents) + "\n")
    values = settings(path)
    (path / "run.yaml").write_text(yaml.safe_dump(values))
    prepare(DataConfig(**values["data"]), progress=False)


def start(folder: Path, name: str, world_size: int, *arguments: str) -> list[BaseProcess]:
    """Starts a run in `folder/name`; the arguments come after `run.yaml` and so win."""
    command = ["--config", str(folder / "run.yaml"), "--run_dir", str(folder / name), *arguments]
    return start_ranks(main, world_size, command, log=folder / f"{name}.log")


def finish(
    folder: Path, name: str, processes: list[BaseProcess], runs: int = 1
) -> tuple[list[int], str]:
    """Exit codes, and the output of rank 0, of processes that make so many runs."""
    deadline = time.monotonic() + TIMEOUT * runs
    for process in processes:
        process.join(timeout=max(deadline - time.monotonic(), 0))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    output = (folder / f"{name}.log.0").read_text()
    assert not late, f"{len(late)} of {len(processes)} ranks did not end:\n{output}"
    return [process.exitcode for process in processes], output


def run(folder: Path, name: str, world_size: int, *arguments: str) -> str:
    """A run that must finish; returns the output of rank 0."""
    codes, output = finish(folder, name, start(folder, name, world_size, *arguments))
    assert codes == [0] * world_size, output
    return output


def wait_for_step(
    run_dir: Path, processes: list[BaseProcess], enough: Callable[[int], bool]
) -> None:
    """Waits until the number of the step logged last is enough."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        lines = [x for x in read_json_lines(run_dir / "metrics.jsonl") if x["kind"] == "train"]
        if lines and enough(lines[-1]["step"]):
            return
        if not all(process.is_alive() for process in processes):
            break
        time.sleep(0.005)
    raise AssertionError(f"{run_dir} did not get that far")


def losses(run_dir: Path) -> dict[int, tuple[float, ...]]:
    """What must be the same bits, by step; each step must be there once."""
    train = [x for x in read_json_lines(run_dir / "metrics.jsonl") if x["kind"] == "train"]
    names = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "lr", "gradient_norm", "tokens")
    assert [line["step"] for line in train] == list(range(1, len(train) + 1))
    return {line["step"]: tuple(line[name] for name in names) for line in train}


def uses(run_dir: Path) -> dict[int, Counter]:
    """How often each example was used, by epoch, over all ranks."""
    found: dict[int, Counter] = {}
    for path in run_dir.glob("examples.rank*.jsonl"):
        for line in read_json_lines(path):
            found.setdefault(line["epoch"], Counter()).update(line["examples"])
    return found
