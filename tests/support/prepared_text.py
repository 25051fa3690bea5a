"""Text to prepare, and what was prepared, for comparing."""

import random
from pathlib import Path

WORDS = ("the", "of", "packed", "token", "batch", "model", "reads", "every", "then", "learns", "a")


def write_corpus(folder: Path, rng: random.Random, documents: int = 400) -> list[str]:
    """Writes documents into text files of very different sizes; some occur twice.

    Returns:
        The documents, in the order of the files.
    """
    texts = [_document(number, rng) for number in range(documents)]
    for _ in range(documents // 10):
        texts[rng.randrange(documents)] = texts[rng.randrange(documents)]
    folder.mkdir(parents=True, exist_ok=True)
    first, number = 0, 0
    while first < documents:
        count = rng.choice([1, 2, 30, 150])
        path = folder / f"{number:03}.txt"
        path.write_text("\n\n".join(texts[first : first + count]) + "\n" * rng.randint(0, 3))
        first, number = first + count, number + 1
    return texts


def _document(number: int, rng: random.Random) -> str:
    sentences = []
    for _ in range(rng.randint(1, 12)):
        words = rng.choices(WORDS, k=rng.randint(2, 14))
        sentences.append(f"N{number} {' '.join(words)}\u00e9.")
    return "\n".join(sentences)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their paths in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
