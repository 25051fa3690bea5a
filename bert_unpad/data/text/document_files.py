"""Which files hold documents, and in which format: their names say that.

A compressed file has one more ending.
"""

from __future__ import annotations

from pathlib import Path

from bert_unpad.data.compressed import ENDINGS

TEXT_SUFFIXES = ("", ".txt", ".text", ".md", ".rst")
FORMATS: dict[str, tuple[str, ...]] = {
    "text": TEXT_SUFFIXES,
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "mediawiki": (".xml",),
}
"""The formats, and the endings of their files."""
_AMBIGUOUS = ".json"  # in a folder it is rather about the data than the data


def format_of(path: Path) -> str | None:
    """Returns the format that a file's name says; None if it says none."""
    name = Path(path.name.lower())
    if name.suffix in ENDINGS:
        name = name.with_suffix("")
    suffix = name.suffix.partition("-p")[0]  # Wikipedia has parts NAME.xml-p1p41242.bz2
    return next((kind for kind, endings in FORMATS.items() if suffix in endings), None)


def find_files(path: Path, wanted: str | None = None) -> list[tuple[Path, str]]:
    """Returns a file, or the files of documents below a folder in the order of their paths.

    Args:
        path: a file or a folder.
        wanted: take this format; None for all, by the files' names.

    Returns:
        Files and their formats; none for a folder without such files.
    """
    if path.is_file():
        return [(path, wanted or format_of(path) or "text")]
    found = []
    for file in sorted(path.rglob("*")):
        kind = format_of(file)
        named = file.suffix.lower() != _AMBIGUOUS if wanted is None else kind == wanted
        shown = not any(part.startswith(".") for part in file.relative_to(path).parts)
        if kind is not None and named and shown and file.is_file():
            found.append((file, kind))
    return found


def is_plain(path: Path, kind: str, wanted: str = "text") -> bool:
    """Whether a file has a format, plain text unless said otherwise, and is not compressed."""
    return kind == wanted and path.suffix.lower() not in ENDINGS
