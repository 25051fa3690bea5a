"""Python's standard library as text: the default source, as every machine that runs this has it.

Its files are parsed, not imported, because importing would run their code.
"""

import ast
import hashlib
import json
import logging
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from bert_unpad._files import read_json_object, write_text

logger = logging.getLogger(__name__)

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class StdlibSource:
    """Docstrings of Python's standard library and the topics of its help system.

    Each docstring or topic is one document. Tests (whose docstrings are fixtures) and installed
    packages are left out. Parsing takes seconds, so `cache_dir` keeps the documents.
    """

    name = "stdlib"

    def __init__(self, cache_dir: Path, root: Path | None = None) -> None:
        self.root = root or Path(sysconfig.get_paths()["stdlib"])
        self.cache_dir = cache_dir
        self._fingerprint: str | None = None

    def files(self) -> list[Path]:
        """Returns the source files (*.py) in a fixed order."""
        found = []
        for folder, subfolders, names in os.walk(self.root):
            subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted(found)

    def by_file(self) -> Iterator[tuple[Path, str]]:
        """Yields (source file, document) for every document, without the cache."""
        for path in self.files():
            for text in _texts_of_module(path):
                yield path, text

    def fingerprint(self) -> str:
        if self._fingerprint is None:
            digest = hashlib.sha256(b"docstrings and topics, version 1")
            for path in self.files():
                digest.update(path.relative_to(self.root).as_posix().encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def documents(self) -> Iterator[str]:
        cached = self.cache_dir / f"stdlib-{self.fingerprint()[:32]}.json"
        documents = _read_document_cache(cached)
        if documents is None:
            documents = [text for _, text in self.by_file()]
            _write_document_cache(cached, documents)
        if not documents:
            raise ValueError(
                f"source='stdlib': no docstring found below {self.root}; expected the sources of "
                "Python's standard library there (is only the bytecode installed?)"
            )
        yield from documents


def _texts_of_module(path: Path) -> Iterator[str]:
    """Returns a module's docstrings in the order of the file, or the texts of the help topics."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old modules have invalid escapes; not ours to report
        try:
            tree = ast.parse(path.read_bytes(), filename=str(path))
        except SyntaxError:  # templates and deliberately broken files exist in the library
            logger.debug("not parsed: %s", path)
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                yield from ast.literal_eval(node.value).values()


def _read_document_cache(path: Path) -> list[str] | None:
    if not path.exists():
        return None
    try:
        stored = read_json_object(path)
        documents = stored["documents"]
        intact = isinstance(documents, list) and all(isinstance(text, str) for text in documents)
        intact = intact and stored["sha256"] == _documents_sha256(documents)
    except (ValueError, KeyError):
        intact = False
    if not intact:
        logger.warning("%s is damaged (its digest does not fit): collecting it again", path)
        return None
    return documents


def _write_document_cache(path: Path, documents: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = {"sha256": _documents_sha256(documents), "documents": documents}
    write_text(path, json.dumps(stored))


def _documents_sha256(documents: list[str]) -> str:
    return hashlib.sha256(json.dumps(documents).encode()).hexdigest()
