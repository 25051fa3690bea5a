"""What pretraining is worth: GLUE's format on texts that pretraining has not seen.

    python -m benchmarks.downstream runs/quickstart/model      # 15 minutes on two cores

The docstrings of PyTorch make two tasks in files of GLUE's columns: whether two words beside each
other have been exchanged in a sentence (`cola`'s columns), and whether a sentence follows another
in its docstring or is from elsewhere (`rte`'s). `python -m bert_unpad.evaluate` fine-tunes the
model, and one of its configuration with random weights, for each seed, and measures both on
docstrings of other files. Writes benchmarks/results/cpu/downstream.json.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import harness
from bert_unpad._extras import packages_of
from bert_unpad.data.formats.stdlib import StdlibSource
from bert_unpad.evaluate import cli

PRETRAINED, RANDOM = "pretrained", "random weights"
TASKS = {"cola": "which sentences have words exchanged", "rte": "which sentence follows"}
WORDS = range(6, 25)
Rows = list[dict[str, Any]]


def sentences(text: str) -> list[str]:
    """Those of plain words: a capital first, a period last."""
    found = re.split(r"(?<=[.])\s+", " ".join(text.split()))
    plain = re.compile(r"[A-Z][\w' -]*[a-z,;:]? (?:[\w'-]+[,;:]? )+[\w'-]+\.")
    return [text for text in found if len(text.split()) in WORDS and plain.fullmatch(text)]


def exchanged(text: str, rng: random.Random) -> str:
    """A sentence of which two different words beside each other, not the ends, change places."""
    words = text.split()
    places = [i for i in range(1, len(words) - 2) if words[i] != words[i + 1]]
    if places:
        i = rng.choice(places)
        words[i], words[i + 1] = words[i + 1], words[i]
    return " ".join(words)


def rows_of(documents: list[list[str]], rng: random.Random) -> dict[str, Rows]:
    """The rows of both tasks, half of them of each class."""
    single = sorted({text for document in documents for text in document})
    pairs = {pair for document in documents for pair in pairwise(document)}
    found: dict[str, Rows] = {"cola": [], "rte": []}
    for text in rng.sample(single, len(single)):
        label = len(found["cola"]) % 2
        found["cola"].append({"sentence": text if label else exchanged(text, rng), "label": label})
    for first, second in rng.sample(sorted(pairs), len(pairs)):
        label = len(found["rte"]) % 2  # GLUE's 0 is entailment
        second = rng.choice(single) if label else second
        found["rte"].append({"sentence1": first, "sentence2": second, "label": label})
    return found


def write_tasks(folder: Path, examples: int, rng: random.Random) -> dict[str, dict[str, int]]:
    """Writes both tasks; the number of rows of each split."""
    source = StdlibSource(folder, root=Path(torch.__file__).parent)
    by_file: dict[Path, list[list[str]]] = {}
    for path, text in source.by_file():
        by_file.setdefault(path, []).append(sentences(text))
    files = sorted(by_file)
    rng.shuffle(files)
    held_out = len(files) // 4
    counts: dict[str, dict[str, int]] = {name: {} for name in TASKS}
    seen: set[str] = set()  # of sentences: methods repeat those of the class they come from
    for split, members in (("train", files[held_out:]), ("validation", files[:held_out])):
        documents = [document for path in members for document in by_file[path]]
        documents = [[text for text in document if text not in seen] for document in documents]
        seen |= {text for document in documents for text in document}
        for name, rows in rows_of(documents, rng).items():
            rows = rows[: examples if split == "train" else examples // 3]
            path = folder / name / f"{split}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            counts[name][split] = len(rows)
    return counts


def write_random(model: Path, folder: Path) -> None:
    """Writes a model of the same configuration with random weights, and the tokenizer."""
    with packages_of("evaluate"):
        from transformers import AutoConfig, AutoModelForMaskedLM
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(folder)


def results_of(folder: Path) -> Iterator[tuple[str, list[float]]]:
    """Each task, and the share of right answers (cola: Matthews correlation) of each seed."""
    for name in TASKS:
        runs = sorted((folder / name).glob("seed-*.json"))
        measures = [json.loads(path.read_text())["metrics"] for path in runs]
        yield name, [next(iter(found.values())) for found in measures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder of a pretrained model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--examples", type=int, default=6000, help="rows to learn from at most")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-4, 1e-3])
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    args = parser.parse_args()
    torch.manual_seed(0)
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        counts = write_tasks(folder, args.examples, random.Random(0))
        print(counts)
        write_random(args.model, folder / "random")
        for contender, model in ((PRETRAINED, args.model), (RANDOM, folder / "random")):
            for lr in args.lr:
                out = folder / f"{contender} {lr}"
                print(f"{contender}, lr {lr:g}", flush=True)
                seeds = [str(seed) for seed in range(args.seeds)]
                command = [str(model), "--tasks", *TASKS, "--seeds", *seeds, "--lr", str(lr)]
                command += ["--data", str(folder), "--output", str(out), "--cpu"]
                if cli.main([*command, "--epochs", str(args.epochs), "--max-length", "96"]):
                    raise SystemExit(1)
                results += [
                    {"contender": contender, "task": task, "lr": lr, "seeds": values}
                    for task, values in results_of(out)
                ]
    report = {"rows": counts, "epochs": args.epochs, "results": results}
    if not args.dry:
        print(f"written to {harness.save('downstream', 'cpu', harness.command(), report)}")


if __name__ == "__main__":
    main()
