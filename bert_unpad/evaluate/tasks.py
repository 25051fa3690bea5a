"""The tasks: what their files have, what a model learns, and what is measured.

GLUE: Wang et al. (2018, arXiv:1804.07461). SQuAD 1.1: Rajpurkar et al. (2016, arXiv:1606.05250).
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_unpad._extras import packages_of

__all__ = ["TASKS", "Task", "read_rows"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One row of the table."""

    columns: tuple[str, ...]
    """Names of the columns of text: one, or two that make a pair."""
    metrics: tuple[str, ...]
    """What is measured: names of `metrics.METRICS`."""
    classes: int = 2
    """Labels are 0 to classes - 1; 1: labels are numbers; 0: answers in the second text."""
    validation: tuple[str, ...] = ("validation",)
    """Splits that are measured."""

    @property
    def label(self) -> str:
        """The column of what is learned."""
        return "label" if self.classes else "answers"


TASKS: dict[str, Task] = {
    "cola": Task(("sentence",), ("matthews",)),
    "sst2": Task(("sentence",), ("accuracy",)),
    "mrpc": Task(("sentence1", "sentence2"), ("accuracy", "f1")),
    "stsb": Task(("sentence1", "sentence2"), ("pearson", "spearman"), classes=1),
    "qqp": Task(("question1", "question2"), ("accuracy", "f1")),
    "mnli": Task(
        *(("premise", "hypothesis"), ("accuracy",), 3),
        ("validation_matched", "validation_mismatched"),
    ),
    "qnli": Task(("question", "sentence"), ("accuracy",)),
    "rte": Task(("sentence1", "sentence2"), ("accuracy",)),
    "wnli": Task(("sentence1", "sentence2"), ("accuracy",)),
    "squad": Task(("question", "context"), ("exact_match", "answer_f1"), classes=0),
}

_TABLES: dict[str, dict[str, Any]] = {
    ".csv": {},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},
}
_ENDINGS = (".jsonl", ".json", *_TABLES, ".parquet")


def read_rows(name: str, split: str, folder: Path | None) -> list[Row]:
    """The labelled rows of a split.

    Args:
        name: of the task.
        split: train, or one of `Task.validation`.
        folder: holds <task>/<split> with an ending of JSON lines, CSV, TSV or Parquet, or SQuAD's
            own .json; None: the data set of the `datasets` library.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there are several, a column is missing, or a label or answer is not of the task.
    """
    task = TASKS[name]
    if folder is None:
        place = ("rajpurkar/squad",) if name == "squad" else ("nyu-mll/glue", name)
        where, rows = f"{'/'.join(place)}, {split}", _hub_rows(*place, split=split)
    else:
        path = _file(folder / name, split)
        where, rows = str(path), _local_rows(path)
    wanted = {*task.columns, task.label}
    for row in rows or [{}]:
        if missing := wanted - set(row if isinstance(row, dict) else ()):
            raise ValueError(
                f"{where}: expected rows with {', '.join(sorted(wanted))}, got one without "
                f"{', '.join(sorted(missing))}"
            )
        if task.classes:
            row["label"] = _number(row["label"], task, where)
        if task.classes > 1 and row["label"] not in range(task.classes):
            raise ValueError(
                f"{where}: label: expected 0 to {task.classes - 1}, got {row['label']!r}"
            )
        if task.classes == 0:
            _check_answers(row["answers"], where)
    return rows


def _number(label: Any, task: Task, where: str) -> float:
    """A label as the task has it, of whatever a file has: a table has texts."""
    try:
        value = float(label)
    except (OverflowError, TypeError, ValueError):
        value = math.nan
    whole = task.classes != 1
    if not (value.is_integer() if whole else math.isfinite(value)):
        kind = "an integer" if whole else "a number"
        raise ValueError(f"{where}: label: expected {kind}, got {label!r}")
    return int(value) if whole else value


def _check_answers(answers: Any, where: str) -> None:
    lists = answers if isinstance(answers, dict) else {}
    texts, starts = lists.get("text"), lists.get("answer_start")
    if not (
        isinstance(texts, list)
        and isinstance(starts, list)
        and len(texts) == len(starts)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(start, int) for start in starts)
    ):
        raise ValueError(
            f"{where}: answers: expected an object with the lists text and answer_start, of one "
            f"length, which no CSV or TSV can have, got {answers!r}"
        )
    if not texts:
        raise ValueError(f"{where}: answers: expected one at least for each question, got none")


def _file(folder: Path, split: str) -> Path:
    found = [path for ending in _ENDINGS if (path := folder / f"{split}{ending}").is_file()]
    if not found:
        names = ", ".join(f"{split}{ending}" for ending in _ENDINGS)
        raise FileNotFoundError(f"{folder}: expected one of {names}, got none")
    if len(found) > 1:
        raise ValueError(
            f"{folder}: expected one file of {split}, got {', '.join(p.name for p in found)}"
        )
    return found[0]


def _hub_rows(*place: str, **options: Any) -> list[Row]:
    with packages_of("datasets"):
        import datasets
    return list(datasets.load_dataset(*place, **options))


def _local_rows(path: Path) -> list[Row]:
    if path.suffix == ".parquet":
        return _hub_rows("parquet", data_files=str(path), split="train")
    try:
        if path.suffix in _TABLES:
            with path.open(encoding="utf-8", newline="") as file:
                return list(csv.DictReader(file, **_TABLES[path.suffix]))
        text = path.read_text("utf-8")
        if path.suffix == ".json" and (rows := _squad(text)):
            return rows
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path}: expected rows as GLUE or SQuAD 1.1 has them, got {type(error).__name__}: "
            f"{error}"
        ) from error


def _squad(text: str) -> list[Row]:
    """The rows of a file in SQuAD's own nested layout; none if it has another."""
    try:
        whole = json.loads(text)
    except ValueError:
        return []  # JSON lines
    if not isinstance(whole, dict) or not isinstance(whole.get("data"), list):
        return []
    return [
        {
            "id": question["id"],
            "context": paragraph["context"],
            "question": question["question"],
            "answers": {
                "text": [answer["text"] for answer in question["answers"]],
                "answer_start": [answer["answer_start"] for answer in question["answers"]],
            },
        }
        for article in whole["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
