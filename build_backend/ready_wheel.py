"""Compiled modules out of a wheel that is there already, in place of compiling them.

$BERT_UNPAD_WHEEL names the wheel. It has to be made from the sources of this tree: wheels hold a
digest of theirs, and any difference is an error.
"""

import hashlib
import os
import platform
import zipfile
from pathlib import Path

RECORD = "bert_unpad/compiled_from.txt"
"""The file of a wheel with the digest of what it was compiled from."""


def digest(root: Path) -> str:
    """SHA-256 of all that decides what is compiled: names and contents."""
    found = hashlib.sha256()
    for folder in ("build_backend", "csrc"):
        for path in sorted((root / folder).rglob("*.*")):
            if path.suffix != ".pyc":
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                found.update(f"{path.relative_to(root)} {content}\n".encode())
    return found.hexdigest()


def find_wheel() -> Path | None:
    """The wheel that $BERT_UNPAD_WHEEL names, if it is set.

    Raises:
        SystemExit: there is no such file, or it is for another processor.
    """
    name = os.environ.get("BERT_UNPAD_WHEEL")
    if not name:
        return None
    wheel, machine = Path(name).absolute(), platform.machine()
    if not (wheel.is_file() and wheel.name.endswith(f"{machine}.whl")):
        raise SystemExit(f"BERT_UNPAD_WHEEL: expected a wheel for {machine}, got {name}")
    return wheel


def modules_of(wheel: Path, root: Path) -> list[str]:
    """The files of the compiled modules in a wheel, such as `bert_unpad/_C.abi3.so`.

    Raises:
        SystemExit: the wheel was made from other sources than those of the tree.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        made_from = archive.read(RECORD).decode() if RECORD in names else "unknown ones"
    if made_from != digest(root):
        raise SystemExit(
            f"BERT_UNPAD_WHEEL: expected a wheel of the sources {digest(root)}, got {wheel} of "
            f"{made_from}; unset it to compile, or make the wheel again"
        )
    return [name for name in names if name.endswith(".so")]
