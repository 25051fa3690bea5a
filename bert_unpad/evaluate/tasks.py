"""The tasks: what their files have, what a model learns, and what is measured.

GLUE: Wang et al. (2018, arXiv:1804.07461). SQuAD 1.1: Rajpurkar et al. (2016, arXiv:1606.05250).
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_unpad._extras import packages_of

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One row of the table."""

    columns: tuple[str, ...]
    """Names of the columns of text: one, or two that make a pair."""
    metrics: tuple[str, ...]
    """What is measured: names of `fine_tune.METRICS`, for answers those of `answers.measures`."""
    classes: int = 2
    """Labels are 0 to classes - 1; 1: labels are numbers; 0: answers in the second text."""
    validation: tuple[str, ...] = ("validation",)
    """Splits that are measured."""
    max_length: int = 128
    """Most tokens of an example, unless the command says another number."""


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
    "squad": Task(("question", "context"), ("exact_match", "answer_f1"), classes=0, max_length=384),
}

_TABLES: dict[str, dict[str, Any]] = {
    ".csv": {},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},  # GLUE's have lone quotes
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
        ValueError: there are several, one is damaged or has no rows, a column is missing, or a
            text, label or answer is not of the task.
    """
    task = TASKS[name]
    if folder is None:
        place = ("rajpurkar/squad",) if name == "squad" else ("nyu-mll/glue", name)
        with packages_of("evaluate"):
            import datasets
        where = f"{'/'.join(place)}, {split}"
        found = datasets.load_dataset(*place, split=split).to_list()
    else:
        path = _file(folder / name, split)
        where, found = str(path), _local_rows(path, name)
    if not found:
        raise ValueError(f"{where}: expected one row or more, got none")
    return [_row(row, task, where) for row in found]


def _row(given: Any, task: Task, where: str) -> Row:
    """The columns of a row that the task needs."""
    wanted = [*task.columns, "label" if task.classes else "answers"]
    if missing := set(wanted) - set(given if isinstance(given, dict) else ()):
        raise ValueError(
            f"{where}: expected rows with {', '.join(wanted)}, got one without "
            f"{', '.join(sorted(missing))}"
        )
    row = {name: given[name] for name in wanted}
    for name in task.columns:
        if not isinstance(row[name], str):
            raise ValueError(f"{where}: {name}: expected a text, got {row[name]!r}")
    if task.classes:
        row["label"] = _label(row["label"], task.classes, where)
    else:
        _check_answers(row["answers"], where)
    return row


def _label(label: Any, classes: int, where: str) -> float:
    """A label as the task has it, of whatever a file has: JSON may have texts."""
    try:
        value = float(label)
    except (OverflowError, TypeError, ValueError):
        value = float("nan")
    if classes == 1 and abs(value) < float("inf"):
        return value
    if classes > 1 and value in range(classes):
        return int(value)
    kind = "a number" if classes == 1 else f"0 to {classes - 1}"
    raise ValueError(f"{where}: label: expected {kind}, got {label!r}")


def _check_answers(answers: Any, where: str) -> None:
    lists = answers if isinstance(answers, dict) else {}
    texts, starts = lists.get("text"), lists.get("answer_start")
    if not (
        isinstance(texts, list)
        and isinstance(starts, list)
        and len(texts) == len(starts) > 0
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(start, int) for start in starts)
    ):
        raise ValueError(
            f"{where}: answers: expected an object with the lists text and answer_start, of "
            f"texts and integers, of one length, 1 or more, got {answers!r}"
        )


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


def _local_rows(path: Path, name: str) -> list[Any]:
    if path.suffix == ".parquet":
        with packages_of("evaluate"):
            from pyarrow import parquet
    try:
        if path.suffix == ".parquet":
            return parquet.read_table(path).to_pylist()
        if path.suffix in _TABLES:
            with path.open(encoding="utf-8-sig", newline="") as file:
                return list(csv.DictReader(file, **_TABLES[path.suffix]))
        text = path.read_text("utf-8-sig")
        if path.suffix == ".json" and name == "squad":
            return _squad(json.loads(text))
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path}: expected rows as GLUE or SQuAD 1.1 has them, got {type(error).__name__}: "
            f"{error}"
        ) from error


def _squad(whole: Any) -> list[Row]:
    """The rows of a file in SQuAD's own nested layout."""
    return [
        {
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
