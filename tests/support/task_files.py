"""Made-up files of GLUE and SQuAD, in the formats of the real ones."""

import csv
import json
import random
from pathlib import Path

from tests.support.seeds import derived

WORDS = ["kalo", "mitu", "soka", "lumi", "tesa", "rano", "pilu", "demo"]


def sentence(rng: random.Random, words: list[str], longest: int = 9) -> str:
    return " ".join(rng.choice(words) for _ in range(rng.randint(1, longest)))


def single(count: int, seed: int) -> list[dict]:
    """Sentences; those of class 1 have the word kalo."""
    rng, rows = random.Random(derived(seed)), []
    for index in range(count):
        words = [*sentence(rng, WORDS[1:]).split(), *["kalo"] * (index % 2)]
        rng.shuffle(words)
        rows.append({"sentence": " ".join(words), "label": index % 2, "idx": index})
    return rows


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        quoted = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), **quoted)
            writer.writeheader()
            writer.writerows(rows)


def squad(count: int, seed: int, longest: int) -> dict:
    """SQuAD's own layout: the answer is the word after the one that is asked for."""
    rng, paragraphs = random.Random(derived(seed)), []
    for index in range(count):
        words = [rng.choice(WORDS) for _ in range(rng.randint(4, longest))]
        place = rng.randrange(len(words) - 1)
        text = " ".join(words)
        start = len(" ".join(words[: place + 1])) + 1
        question = {
            "id": str(index),
            "question": f"{words[place]} ?",
            "answers": [{"text": words[place + 1], "answer_start": start}],
        }
        paragraphs.append({"context": text, "qas": [question]})
    return {"version": "1.1", "data": [{"title": "made up", "paragraphs": paragraphs}]}
