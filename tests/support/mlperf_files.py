"""MLPerf's benchmark BERT at toy size: its folder of files, settings of a run, lines of a log."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_unpad import convert
from bert_unpad.nn import BertConfig, BertForPreTraining
from tests.support.hdf5_files import raw_examples, write_folder
from tests.support.imported import imported
from tests.support.masked_examples import LONGEST, PREDICTIONS, VOCAB
from tests.support.seeds import derived
from tests.support.tf_records import example, features_of, write_records

__all__ = ["BATCH", "SIZES", "read_log", "toy_settings", "write_benchmark", "write_benchmark_data"]

BATCH = 12
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
_FREQUENT, _SHARE = 7, 0.85  # of all masked tokens, so that any model learns to predict it


def _examples(seed: int) -> list:
    rng = np.random.default_rng(derived(seed))
    return [
        (ids, segments, positions, np.where(rng.random(len(labels)) < _SHARE, _FREQUENT, labels), n)
        for ids, segments, positions, labels, n in raw_examples(seed)
    ]


def write_benchmark_data(folder: Path, train: str, evaluation: str) -> list:
    """Writes vocab.txt, train/ and eval/, and both as shards/; returns the evaluation examples.

    Args:
        folder: to write to.
        train, evaluation: fixed or variable (HDF5), or both tfrecord.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    held_out = _examples(2)
    for name, layout, examples in (("train", train, _examples(1)), ("eval", evaluation, held_out)):
        if layout == "tfrecord":
            records = [example(features_of(raw)) for raw in examples]
            write_records(folder / name / "part-00000-of-00001", records)
        else:
            write_folder(folder / name, examples, layout)
    kind = "tfrecord" if train == "tfrecord" else "hdf5"
    source = f"{kind}:{folder / 'train'}?validation={folder / 'eval'}"
    imported(source, folder / "shards")
    return held_out


def write_benchmark(folder: Path) -> None:
    """Writes the whole folder, with a TensorFlow checkpoint to start from."""
    write_benchmark_data(folder, "tfrecord", "tfrecord")
    torch.manual_seed(derived(3))
    BertForPreTraining(BertConfig(vocab_size=len(VOCAB), **SIZES)).save_pretrained(folder / "hf")
    prefix = folder / "tf1_ckpt" / "model.ckpt-28252"
    assert convert.main([str(folder / "hf"), str(prefix), "--to", "google"]) == 0
    shutil.move(prefix.with_name("bert_config.json"), folder / "bert_config.json")
    shutil.rmtree(folder / "hf")


def toy_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run on `write_benchmark_data`'s files; of a section, `changes` are added."""
    values: dict[str, Any] = {
        "device": "cpu",
        "seed": int.from_bytes(os.urandom(4), "little"),
        "model": dict(SIZES),
        "data": {
            "source": f"shards:{folder / 'shards'}",
            "cache_dir": str(folder / "cache"),
            "max_seq_length": LONGEST,
            "max_predictions_per_seq": PREDICTIONS,
        },
        "batching": {"strategy": "exchange", "global_batch_size": BATCH},
        "optimizer": {"name": "lamb", "lr": 0.02, "weight_decay": 0.01},
        "schedule": {
            "total_steps": 40,
            "warmup_steps": 4,
            "start_warmup_step": -1,
            "decay_from": "start",
        },
        "evaluation": {"every_samples": 2 * BATCH - 1, "target_accuracy": 0.72},
        "logging": {"every": 3},
    }
    for name, change in changes.items():
        values[name] = values.get(name, {}) | change if isinstance(change, dict) else change
    return values


def read_log(path: Path) -> list[tuple[str, Any, dict[str, Any], str]]:
    """The lines of a log, as (key, value, metadata, kind)."""
    lines = []
    for text in path.read_text().splitlines():
        token, _, line = text.partition(" ")
        assert token == ":::MLLOG"
        line = json.loads(line)
        lines.append((line["key"], line["value"], line["metadata"], line["event_type"]))
    return lines
