"""Real English text that a Linux machine has: comments, documentation, manual pages, changelogs.

Most is from Debian packages and Python wheels. Each kind becomes one file of documents with blank
lines between them and none within.
"""

from __future__ import annotations

import gzip
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

_DOC = Path("/usr/share/doc")
_MAN = Path("/usr/share/man")
_INCLUDE = Path("/usr/include")
_WHEELS = Path(sysconfig.get_path("purelib"))
_LARGEST = 20_000_000  # bytes of a file
_BLANK = re.compile(r"\n\s*\n")
_TEXTS = re.compile(r"(readme|news|copyright|license|metadata|.*\.(txt|md|rst|html?))(\.gz)?", re.I)
_TAG = re.compile(r"<(script|style).*?</\1>|<[^<>]+>", re.S)
_FONT = re.compile(r"^\.[BIR]{1,2} |\\f.|\\[&/,]", re.M)
_MACRO = re.compile(r"^[.'].*\n", re.M)
_STRING = re.compile(r'(^[ \t]*[rR]?)?"""(.*?)"""', re.M | re.S)
_COMMENT = re.compile(r"/\*(.*?)\*/|((?:^[ \t]*//[^\n]*\n)+)", re.M | re.S)
_COMMENT_SIGN = re.compile(r"^\s*(//+!?|\*+)", re.M)


def _text(path: Path) -> str:
    if path.stat().st_size > _LARGEST:
        return ""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return data.decode("utf-8", "ignore")


def _files(root: Path, pattern: str) -> Iterator[Path]:
    return (
        path for path in sorted(root.rglob(pattern)) if path.is_file() and not path.is_symlink()
    )


def _comments() -> Iterator[str]:
    for root in (_INCLUDE, _WHEELS):
        for path in _files(root, "*.h"):
            found = "\n".join(one or other for one, other in _COMMENT.findall(_text(path)))
            yield _COMMENT_SIGN.sub("", found)


def _docstrings() -> Iterator[str]:
    for root in (Path(sysconfig.get_path("stdlib")), _WHEELS):
        for path in _files(root, "*.py"):
            # Those that a line begins with: others are values.
            found = (one[2] for one in _STRING.finditer(_text(path)) if one[1] is not None)
            yield "\n".join(found)


def _documentation() -> Iterator[str]:
    for root in (_DOC, _WHEELS):
        for path in _files(root, "*"):
            if _TEXTS.fullmatch(path.name):
                text = _text(path)
                yield _TAG.sub("", text) if ".htm" in path.name.lower() else text


def _manual_pages() -> Iterator[str]:
    for path in _files(_MAN, "*.gz"):
        if re.fullmatch(r"man\d", path.parent.name) and path.parent.parent == _MAN:
            yield _MACRO.sub("", _FONT.sub("", _text(path))).replace("\\-", "-")


def _changelogs() -> Iterator[str]:
    for path in _files(_DOC, "*hangelog*"):
        yield from re.split(r"\n(?=\S)", _text(path))


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "comments in headers": _comments,
    "docstrings": _docstrings,
    "documentation": _documentation,
    "manual pages": _manual_pages,
    "changelogs": _changelogs,
}
"""The scarcest first: what one kind leaves of its share, the next ones fill."""


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


def first_half(text: Path, folder: Path) -> int:
    """Writes the first half of each file of `gather`, in whole documents; returns all bytes."""
    folder.mkdir(parents=True)
    total = 0
    for path in sorted(text.iterdir()):
        data = path.read_bytes()
        total += (folder / path.name).write_bytes(
            data[: data.rfind(b"\n\n", 0, len(data) // 2) + 2]
        )
    return total
