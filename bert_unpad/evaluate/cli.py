"""The command line of `python -m bert_unpad.evaluate`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_unpad._arguments import (
    above_zero,
    not_below_zero,
    not_negative,
    positive,
    share_or_zero,
)
from bert_unpad._commands import run_command
from bert_unpad._extras import packages_of
from bert_unpad._files import read_json_object, write_text
from bert_unpad.evaluate.features import answers_of, features_of, predictions_of
from bert_unpad.evaluate.fine_tune import FineTuning, fine_tune, score
from bert_unpad.evaluate.metrics import METRICS
from bert_unpad.evaluate.tasks import TASKS, read_rows

_LENGTHS = {"squad": 384}  # of features; others have 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for bad arguments or files."""
    parser = _parser()
    return run_command(parser, parser.parse_args(arguments))


def _evaluate(options: argparse.Namespace) -> None:
    results: dict[str, list[dict[str, float]]] = {}
    for name in options.tasks:
        for seed in options.seeds:
            results.setdefault(name, []).append(_result(options, name, seed))
    table = _table(results)
    print(table)
    write_text(options.output / "table.md", table + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bert_unpad.evaluate",
        description="Fine-tunes a model on GLUE and SQuAD, and measures it on held-out examples.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="folder in Hugging Face's layout, with tokenizer")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["cola", "mrpc", "rte"])
    parser.add_argument(
        "--seeds", nargs="+", type=not_negative, default=[0], help="a fine-tuning for each"
    )
    parser.add_argument("--data", type=Path, help="local files: TASK/train.jsonl and so on")
    parser.add_argument("--output", type=Path, default=Path("runs/evaluate"))
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument("--batch-size", type=positive, default=32)
    parser.add_argument("--lr", type=above_zero, default=2e-5)
    parser.add_argument("--warmup-share", type=share_or_zero, default=0.1)
    parser.add_argument("--weight-decay", type=not_below_zero, default=0.01)
    parser.add_argument("--max-length", type=positive, help="tokens (default: 128, for squad 384)")
    parser.add_argument(
        "--stride", type=not_negative, default=128, help="tokens that features share (squad)"
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=_device, default=device)
    parser.add_argument("--padded", action="store_true", help="compute padding too")
    parser.set_defaults(run=_evaluate)
    return parser


def _device(text: str) -> torch.device:
    try:
        return torch.empty(0, device=text).device
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(
            f"expected a device of this machine such as cpu or cuda:0, got {text!r} ({reason})"
        ) from error


def _files(options: argparse.Namespace, name: str) -> dict[str, list[int]]:
    """Size and time of change of each file that a result depends on."""
    paths = sorted(options.model.glob("*"))  # the tokenizer's too
    if options.data is not None:
        paths += sorted((options.data / name).glob("*"))
    found = {str(path.resolve()): path.stat() for path in paths if path.is_file()}
    return {path: [stat.st_size, stat.st_mtime_ns] for path, stat in found.items()}


def _result(options: argparse.Namespace, name: str, seed: int) -> dict[str, float]:
    """The measures of one fine-tuning: from its file if it is there, else made now."""
    names = (field.name for field in dataclasses.fields(FineTuning))
    length = options.max_length
    if length is None:
        length = _LENGTHS.get(name, 128)
    settings = FineTuning(**{n: getattr(options, n) for n in names} | {"max_length": length})
    noted = dataclasses.asdict(settings) | {
        "model": str(options.model.resolve()),
        "data": None if options.data is None else str(options.data.resolve()),
        "files": _files(options, name),
    }
    path = options.output / name / f"seed-{seed}.json"
    if path.is_file():
        found = read_json_object(path)
        if found.get("settings") != noted:
            raise ValueError(
                f"{path}: expected a result with these settings and files, got one with others: "
                f"give another --output, or delete it"
            )
        return found["metrics"]
    begin = time.perf_counter()
    metrics = _measure(options, name, seed, settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"metrics": metrics, "seconds": time.perf_counter() - begin, "settings": noted}
    write_text(path, json.dumps(found, indent=2) + "\n")
    print(f"{name}, seed {seed}: {_words(metrics)}", flush=True)
    return metrics


def _measure(
    options: argparse.Namespace, name: str, seed: int, settings: FineTuning
) -> dict[str, float]:
    task = TASKS[name]
    tokenizer, model = _load(options, name, seed)
    lengths = (settings.max_length, settings.stride)
    train = features_of(task, read_rows(name, "train", options.data), tokenizer, *lengths)
    held_out = {split: read_rows(name, split, options.data) for split in task.validation}
    fine_tune(model, tokenizer, task, train, settings, seed)
    metrics: dict[str, float] = {}
    for split, rows in held_out.items():
        features = features_of(task, rows, tokenizer, *lengths)
        scores = score(model, tokenizer, task, features, settings)
        if task.classes:
            found: Any = predictions_of(task, np.stack(scores))
            labels: Any = np.array([row["label"] for row in rows])
        else:
            found = answers_of(rows, features, scores)
            labels = [row["answers"]["text"] for row in rows]
        ending = split.removeprefix("validation")
        metrics |= {f"{metric}{ending}": METRICS[metric](found, labels) for metric in task.metrics}
    return metrics


def _load(options: argparse.Namespace, name: str, seed: int) -> tuple[Any, torch.nn.Module]:
    """The tokenizer, and the model with a fresh head by the seed."""
    with packages_of("hf"):
        import transformers

        from bert_unpad import hf
    classes = TASKS[name].classes
    if not (options.model / "config.json").is_file():
        raise FileNotFoundError(f"model: expected a folder with config.json, got {options.model}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    torch.manual_seed(seed)
    kind: Any = transformers.AutoModelForQuestionAnswering
    heads = {"num_labels": classes} if classes else {}
    if classes:
        kind = transformers.AutoModelForSequenceClassification
    # Weights train in float32; transformers would take the dtype that they were saved in.
    model = kind.from_pretrained(options.model, dtype=torch.float32, **heads)
    if not options.padded:
        hf.unpad(model)
    return tokenizer, model.to(options.device)


def _words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * value:.1f}" for name, value in metrics.items())


def _table(results: dict[str, list[dict[str, float]]]) -> str:
    """Means over the seeds, in percent, and standard deviations where there are several."""
    lines = ["| task | measure | mean | deviation | seeds |", "|---|---|---|---|---|"]
    for name, runs in results.items():
        for metric in runs[0]:
            values = [100 * run[metric] for run in runs]
            deviation = f"{statistics.stdev(values):.2f}" if len(values) > 1 else ""
            lines.append(
                f"| {name} | {metric} | {statistics.fmean(values):.2f} | {deviation} | "
                f"{len(values)} |"
            )
    return "\n".join(lines)
