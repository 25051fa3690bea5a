"""The end of a run: the model in Hugging Face's layout, a summary, plots, and a look at its words.

`AutoTokenizer` alone gives the trainer's ids, and `AutoModelForMaskedLM` its loss. What training
knows without files is written down for that: the tokens around each text, how long a text may be,
and whether the model has token types.

Everything is worked out from metrics.jsonl and the model, so a run that is killed after its last
step gets the same report when it is started again. summary.json is written last and says that the
report is complete.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bert_unpad._files import read_json_object, write_text
from bert_unpad.data import PreparedData, most_frequent_token_rate
from bert_unpad.data.text.tokenizer import TextTokenizer
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.losses import TASKS, Task
from bert_unpad.pretrain.output.energy import joules_per_sequence
from bert_unpad.pretrain.output.metrics import numbers, read_json_lines
from bert_unpad.pretrain.output.model_card import write_model_card
from bert_unpad.pretrain.output.plots import draw_run
from bert_unpad.pretrain.run import Progress, Run

_FILLED_EXAMPLES = 2
_SHOWN_GUESSES = 12


def is_reported(run_dir: Path, step: int) -> bool:
    """Whether the folder holds the complete report of a run that ended at `step`."""
    try:
        return read_json_object(run_dir / "summary.json").get("steps") == step
    except (OSError, ValueError):  # none, or a damaged one, which is made again
        return False


def write_report(run: Run, data: PreparedData) -> None:
    """Writes model/, training.png and summary.json into the run's folder, and prints them.

    Call it on rank 0 alone.
    """
    run_dir, model = run.dir, run.model
    model_dir = run_dir / "model"
    export(model, data.tokenizer, model_dir, run.config.data.max_seq_length)
    lines = read_json_lines(run_dir / "metrics.jsonl")
    held_out = len(data.validation) > 0
    most_frequent = most_frequent_token_rate(data.validation) if held_out else None
    summary = _summary(lines, data, model, run.progress, most_frequent)
    write_model_card(model_dir, run.config, model, summary)
    if plotted := importlib.util.find_spec("matplotlib") is not None:
        draw_run(run_dir / "training.png", lines, most_frequent)
    print(_table(summary, TASKS[run.config.data.objective]))
    if held_out:
        for filled in fill_masks(model, data, _FILLED_EXAMPLES):
            print(_sample(filled))
    print(f"\nModel, plots and metrics: {run_dir}")
    if not plotted:
        print("No plot was drawn: matplotlib is not installed (pip install 'bert_unpad[pretrain]')")
    write_text(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")


def _summary(
    lines: list[dict[str, Any]],
    data: PreparedData,
    model: EncoderForPreTraining,
    progress: Progress,
    most_frequent: float | None,
) -> dict[str, Any]:
    # Of a log that was damaged, some of these may be missing.
    last = {line.get("kind"): line for line in lines}
    start, evaluation = last.get("start", {}), last.get("evaluation")
    train = [line for line in lines if line.get("kind") == "train"]
    balance = numbers(train, "straggler_efficiency")
    measured = numbers(train, "measured_efficiency")
    state = last.get("optimizer", {}).get("state_bytes", [])
    peak = start.get("peak_flops")
    return {
        "steps": progress.step,
        # How many examples streamed text makes is not known.
        "epochs": None if data.streamed is not None else progress.sequences / len(data.train),
        "sequences": progress.sequences,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "tokens_per_second": progress.tokens / progress.seconds,
        "sequences_per_second": progress.sequences / progress.seconds,
        "mfu": progress.flops / progress.seconds / peak if peak else None,
        "joules": progress.joules,
        "joules_per_sequence": joules_per_sequence(progress.joules, progress.sequences),
        "energy_missing": start.get("energy_missing", {}),
        "comm": _without(last["comm"], "kind") if "comm" in last else None,
        "padding_avoided": 1 - progress.tokens / progress.padded,
        "straggler_efficiency": statistics.fmean(balance) if balance else None,
        "measured_efficiency": statistics.fmean(measured) if measured else None,
        "skipped_steps": sum(numbers(train, "skipped_steps")),
        "train_loss_last": next(reversed(numbers(train, "loss")), None),
        "held_out": None if evaluation is None else _without(evaluation, "kind", "step"),
        "most_frequent_token_rate": most_frequent,
        "target_reached": progress.target_reached,
        "optimizer_bytes_per_rank": max(state, default=None),
        "parameters": sum(p.numel() for p in model.parameters()),
        "ranks": start.get("ranks"),
        "device": start.get("device"),
        "precision": start.get("precision"),
        "threads_per_rank": start.get("threads"),
        "peak": start.get("peak"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _without(line: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in names}


def _table(summary: dict[str, Any], tasks: Sequence[Task]) -> str:
    rows = [
        ("steps", f"{summary['steps']:,}{_epochs(summary['epochs'])}"),
        ("sequences, real tokens", f"{summary['sequences']:,}, {summary['tokens']:,}"),
        ("training time", f"{summary['seconds']:,.1f} s on {summary['ranks']} rank(s)"),
        ("real tokens/s, sequences/s", _rates(summary)),
        ("MFU", _logged(summary["mfu"], f"{{:.3f}} of {summary['peak']} per rank")),
        ("energy", _energy(summary)),
        ("padding avoided", f"{summary['padding_avoided']:.1%} of the padded batch"),
        ("straggler efficiency", _balance(summary)),
        ("optimizer state", _logged(_megabytes(summary), "{:,.2f} MB on a rank")),
        ("steps left out (not finite)", f"{summary['skipped_steps']:,}"),
        ("training loss at the end", _logged(summary["train_loss_last"], "{:.4f}")),
    ]
    held_out = summary["held_out"]
    if held_out is not None:
        rows.append(("held out: loss", _number(held_out.get("loss"))))
        for task in tasks:
            accuracy = _number(held_out.get(f"{task.name}_accuracy"))
            rows.append((f"held out: {task.title} accuracy", accuracy))
            if task.name == "mlm":
                frequent = _number(summary["most_frequent_token_rate"])
                rows.append(("   always the most frequent token", frequent))
    width = max(len(name) for name, _ in rows)
    return "\n".join(["", *(f"{name:<{width}}  {value}" for name, value in rows)])


def _logged(value: float | None, form: str) -> str:
    return "not in the log" if value is None else form.format(value)


def _megabytes(summary: dict[str, Any]) -> float | None:
    size = summary["optimizer_bytes_per_rank"]
    return None if size is None else size / 1e6


def _epochs(value: float | None) -> str:
    return "" if value is None else f"  ({value:.2f} epochs)"


def _rates(summary: dict[str, Any]) -> str:
    return f"{summary['tokens_per_second']:,.0f}, {summary['sequences_per_second']:,.1f}"


def _balance(summary: dict[str, Any]) -> str:
    planned, measured = summary["straggler_efficiency"], summary["measured_efficiency"]
    by_time = "" if measured is None else f", {measured:.4f} by seconds of computing"
    return f"{_logged(planned, '{:.4f}')}  (mean / max work){by_time}"


def _energy(summary: dict[str, Any]) -> str:
    read = {source: x for source, x in summary["joules"].items() if x is not None}
    parts = [f"{source.upper()} {joules:,.0f} J" for source, joules in read.items()]
    if read:
        parts.append(f"{summary['joules_per_sequence']:.4g} J per sequence")
    parts += [f"{source.upper()} not read: {x}" for source, x in summary["energy_missing"].items()]
    return ", ".join(parts) or "not read"


def _number(value: float | None) -> str:
    return "no labels" if value is None else f"{value:.4f}"


def _sample(filled: FilledText) -> str:
    guesses = (
        f"   {truth!r} -> {guess!r} ({probability:.0%}){' *' if truth == guess else ''}"
        for truth, guess, probability in filled.guesses[:_SHOWN_GUESSES]
    )
    return "\n".join([f"\nHeld-out text:  {filled.text}", *guesses])


def export(
    model: EncoderForPreTraining, tokenizer: TextTokenizer, folder: Path, max_length: int
) -> None:
    """Writes the model and its tokenizer.

    Args:
        model: the trained model; its configuration gets the ids of the special tokens.
        tokenizer: of its data.
        folder: made if it does not exist.
        max_length: longest example that it has been trained on, in tokens.
    """
    for part in (model, getattr(model, "generator", None)):
        if part is not None:
            extra = part.config.extra | _special_ids(tokenizer)
            part.config = dataclasses.replace(part.config, extra=extra)
    model.save_pretrained(folder)
    tokenizer.export(folder, max_length, token_types=model.config.type_vocab_size > 1)


def _special_ids(tokenizer: TextTokenizer) -> dict[str, int]:
    return {
        "cls_token_id": tokenizer.cls_id,
        "sep_token_id": tokenizer.sep_id,
        "bos_token_id": tokenizer.cls_id,
        "eos_token_id": tokenizer.sep_id,
        "mask_token_id": tokenizer.mask_id,
    }


@dataclass(frozen=True)
class FilledText:
    """One example."""

    text: str
    """The text with its masks, as the model has seen it."""
    guesses: tuple[tuple[str, str, float], ...]
    """For each token to predict: what was there, what the model says, its probability."""


@torch.no_grad()
def fill_masks(model: EncoderForPreTraining, data: PreparedData, examples: int) -> list[FilledText]:
    """Fills the masks of held-out examples of about median length.

    The model must be on one device and is left in evaluation mode.
    """
    lengths = data.validation.lengths.astype(np.int64)
    near_median = np.argsort(np.abs(lengths - np.median(lengths)), kind="stable")[:examples]
    device = next(model.parameters()).device
    model.eval()
    collate = data.collator("validation")
    filled = []
    for index in near_median:
        inputs = collate(np.array([index]), 0)
        logits, _ = model.logits(inputs.to(device))
        known = logits[:, : data.tokenizer.vocab_size]  # the model's vocabulary may be larger
        probability, guess = known.float().softmax(-1).max(-1)
        guesses = zip(
            (data.tokenizer.vocabulary[i] for i in inputs.masked_labels.tolist()),
            (data.tokenizer.vocabulary[i] for i in guess.tolist()),
            probability.tolist(),
            strict=True,
        )
        filled.append(FilledText(data.tokenizer.decode(inputs.input_ids.tolist()), tuple(guesses)))
    return filled
