"""The command line of `python -m bert_unpad.evaluate`."""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

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
from bert_unpad.evaluate.tasks import TASKS

_SETTINGS = (
    *("epochs", "batch_size", "lr", "warmup_share", "weight_decay", "max_length", "stride"),
    *("precision", "padded"),
)
"""Options that a result depends on."""


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
    parser.add_argument("--cpu", action="store_true", help="no GPU (which: CUDA_VISIBLE_DEVICES)")
    parser.add_argument("--padded", action="store_true", help="compute padding too")
    parser.set_defaults(run=_evaluate)
    return parser


def _files(options: argparse.Namespace, name: str) -> dict[str, list[int]]:
    """Size and time of change of each file that a result depends on."""
    paths = sorted(options.model.glob("*"))  # the tokenizer's too
    if options.data is not None:
        paths += sorted((options.data / name).glob("*"))
    found = {str(path.resolve()): path.stat() for path in paths if path.is_file()}
    return {path: [stat.st_size, stat.st_mtime_ns] for path, stat in found.items()}


def _result(options: argparse.Namespace, name: str, seed: int) -> dict[str, float]:
    """The measures of one fine-tuning: from its file if it is there, else made now."""
    settings = {key: getattr(options, key) for key in _SETTINGS}
    settings["max_length"] = options.max_length or TASKS[name].max_length
    settings["files"] = _files(options, name)
    path = options.output / name / f"seed-{seed}.json"
    if path.is_file():
        found = read_json_object(path)
        if found.get("settings") != settings:
            raise ValueError(
                f"{path}: expected a result with these settings and files, got one with others: "
                f"give another --output, or delete it"
            )
        return found["metrics"]
    with packages_of("evaluate"):
        from bert_unpad.evaluate.fine_tune import measure
    begin = time.perf_counter()
    metrics = measure(options, name, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"metrics": metrics, "seconds": time.perf_counter() - begin, "settings": settings}
    write_text(path, json.dumps(found, indent=2) + "\n")
    print(f"{name}, seed {seed}: {_words(metrics)}", flush=True)
    return metrics


def _words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {100 * value:.1f}" for name, value in metrics.items())


def _table(results: dict[str, list[dict[str, float]]]) -> str:
    """Means over the seeds, in percent, and standard deviations where there are several."""
    lines = ["| task | measure | mean | deviation | seeds |", "|---|---|---|---|---|"]
    for name, runs in results.items():
        for metric in runs[0]:
            values = [100 * run[metric] for run in runs]
            deviation = f"{np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
            lines.append(
                f"| {name} | {metric} | {np.mean(values):.2f} | {deviation} | {len(values)} |"
            )
    return "\n".join(lines)
