"""Opens sources of text: what a `DataConfig.source` names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl

from bert_unpad.data.text.document_files import find_files, is_plain
from bert_unpad.data.text.file_source import FileSource
from bert_unpad.data.text.sources import HuggingFaceSource, Source, StdlibSource, TextSource


def open_source(source: str, *, cache_dir: Path) -> Source:
    """Makes a `Source` from the `source` of a `DataConfig`.

    Args:
        source: `stdlib`, `hf:NAME?...` (see `HuggingFaceSource`), or `PATH` or
            `PATH?option=value&...` with the options `file_per_document`, `format` and `column` (see
            `TextSource`, and `FileSource` for files that are not plain text).
        cache_dir: folder where a source may keep documents that are slow to collect.

    Raises:
        FileNotFoundError, ImportError, ValueError: see the class of the source.
    """
    if source == "stdlib":
        return StdlibSource(cache_dir / "documents")
    if source.startswith("hf:"):
        return HuggingFaceSource(source.removeprefix("hf:"))
    if not source:
        raise ValueError("source: expected 'stdlib', 'hf:NAME' or a path, got an empty string")
    path, _, query = source.partition("?")
    if not query or Path(source).expanduser().exists():  # a name may have a question mark
        return _open_files(Path(source).expanduser(), {})
    options = dict(parse_qsl(query, keep_blank_values=True))
    wrong = {
        name
        for name, value in options.items()
        if not value or (value not in _FILE_OPTIONS.get(name, ()) and name != "column")
    }
    if not options or wrong:
        forms = "&".join(f"{name}={'|'.join(values)}" for name, values in _FILE_OPTIONS.items())
        raise ValueError(f"source: expected PATH or PATH?{forms}, got {source!r}")
    return _open_files(Path(path).expanduser(), options)


_FILE_OPTIONS = {
    "file_per_document": ("true", "false"),
    "format": ("text", "jsonl", "mediawiki"),
    "column": ("NAME",),
}


def _open_files(path: Path, options: dict[str, str]) -> Source:
    """A source of plain text files, which can be cut anywhere, or of files of other formats."""
    whole, wanted = options.get("file_per_document") == "true", options.get("format")
    files = find_files(path, wanted)
    if wanted is not None and path.exists() and not files:
        raise FileNotFoundError(f"source: expected files of format {wanted} below {path}, got none")
    if "column" in options and not any(kind == "jsonl" for _, kind in files):
        raise ValueError(f"source: expected JSON Lines at {path} with the option column, got none")
    if all(is_plain(file, kind) for file, kind in files):
        return TextSource(path, whole, [file for file, _ in files])
    return FileSource(path, files, whole, options.get("column", "text"))
