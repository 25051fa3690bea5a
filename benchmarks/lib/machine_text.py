"""Real English text that a Linux machine has: documentation, manual pages, changelogs, comments.

Each kind becomes one file of documents with blank lines between them and none within.
"""

from __future__ import annotations

import ast
import gzip
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

_DOC = Path("/usr/share/doc")
_MAN = Path("/usr/share/man")
_INCLUDE = Path("/usr/include")
_LARGEST = 20_000_000  # bytes of a file
_BLANK = re.compile(r"\n\s*\n")
_ROFF = re.compile(r"^[.'].*\n|\\f.|\\[&/,]", re.M)
_COMMENT = re.compile(r"/\*(.*?)\*/", re.S)


def _text(path: Path) -> str:
    if path.stat().st_size > _LARGEST:
        return ""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return data.decode("utf-8", "ignore")


def _files(root: Path, pattern: str) -> Iterator[Path]:
    return (
        path for path in sorted(root.rglob(pattern)) if path.is_file() and not path.is_symlink()
    )


def _changelogs() -> Iterator[str]:
    for path in _files(_DOC, "*hangelog*"):
        yield from re.split(r"\n(?=\S)", _text(path))


def _documentation() -> Iterator[str]:
    names = re.compile(r"(readme|news|copyright|.*\.(txt|md|rst))(\.gz)?", re.I)
    for root in (_DOC, Path(sysconfig.get_path("purelib"))):
        yield from (_text(path) for path in _files(root, "*") if names.fullmatch(path.name.lower()))


def _manual_pages() -> Iterator[str]:
    for path in _files(_MAN, "*.gz"):
        if re.fullmatch(r"man\d", path.parent.name) and path.parent.parent == _MAN:
            yield _ROFF.sub("", _text(path)).replace("\\-", "-")


def _docstrings() -> Iterator[str]:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for name in ("stdlib", "purelib"):
        for path in _files(Path(sysconfig.get_path(name)), "*.py"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    tree = ast.parse(path.read_bytes())
                except (SyntaxError, ValueError, RecursionError):
                    continue
            found = (ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, documented))
            yield "\n".join(text for text in found if text)


def _comments() -> Iterator[str]:
    for root in (_INCLUDE, Path(sysconfig.get_path("purelib"))):
        for path in _files(root, "*.h"):
            found = _COMMENT.findall(_text(path))
            yield re.sub(r"^\s*\*+ ?", "", "\n".join(found), flags=re.M)


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "changelogs": _changelogs,
    "documentation": _documentation,
    "manual pages": _manual_pages,
    "docstrings": _docstrings,
    "comments": _comments,
}


def gather(folder: Path, most: int) -> dict[str, int]:
    """Writes at most `most` bytes of text, each kind its share of what is left.

    Returns:
        Bytes of each kind.
    """
    folder.mkdir(parents=True)
    sizes: dict[str, int] = {}
    for place, (kind, read) in enumerate(KINDS.items()):
        room = (most - sum(sizes.values())) // (len(KINDS) - place)
        size, seen = 0, set()
        with (folder / f"{kind.replace(' ', '_')}.txt").open("wb") as file:
            for document in read():
                text = _BLANK.sub("\n", document).strip()
                if not text or (key := hash(text)) in seen:
                    continue
                seen.add(key)
                data = f"{text}\n\n".encode("utf-8", "ignore")
                size += file.write(data)
                if size >= room:
                    break
        sizes[kind] = size
    return sizes
