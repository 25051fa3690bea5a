"""Importers of the formats that other tools write, of finished examples or of token ids alone.

    FORMAT:PATH[?option=value&validation=PATH&...]

A format is a row of `FORMATS` and a module with the row's name. The module has one function,
`examples(path, setting)`, which reads a file from begin to end and yields its examples in order, or
raises a DamagedDataError that names the file and what was expected. `python -m bert_unpad.data
import` writes them to shards, which are what training opens. Formats of text are in `sources.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from urllib.parse import parse_qsl

_TOKEN_OPTIONS = {"add": ("none", "cls", "sep", "cls,sep"), "long": ("error", "cut", "split")}
_COLUMN_OPTIONS = {**_TOKEN_OPTIONS, "column": ("NAME",)}


@dataclass(frozen=True)
class Format:
    """How the files of a format are found and what can be said about them."""

    patterns: tuple[str, ...]
    """Names of its files."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options of a source with their values; a single value stands for any text."""
    package: str | None = None
    """A package that reading needs."""
    extra: str | None = None
    """The extra of this package that installs it."""
    finished: bool = False
    """Whether examples have masks, two segments and next-sentence labels; otherwise a file has
    token ids alone."""
    beside: str | None = None
    """The ending of a file that is read with each."""
    named_by_index: bool = False
    """Whether `patterns` find an index; the module's `files_of` returns the files that it names."""


FORMATS: dict[str, Format] = {
    # MLPerf's packed files have names such as output_00042.
    "hdf5": Format(
        ("*.hdf5", "*.h5", "output_[0-9][0-9][0-9][0-9][0-9]"),
        package="h5py",
        extra="hdf5",
        finished=True,
    ),
    "megatron": Format(
        ("*.idx",), {**_TOKEN_OPTIONS, "unit": ("document", "sequence")}, beside=".bin"
    ),
    "parquet": Format(("*.parquet",), _COLUMN_OPTIONS, package="pyarrow", extra="parquet"),
    "mds": Format(
        ("index.json",),
        {**_COLUMN_OPTIONS, "dtype": ("uint16", "int32", "uint32", "int64")},
        named_by_index=True,
    ),
    # MLPerf's files have names such as part-00000-of-00500.
    "tfrecord": Format(("*.tfrecord", "*.tfrecords", "part-*-of-*"), finished=True),
}


@dataclass(frozen=True)
class Setting:
    """What an importer has to know besides the file."""

    vocab_size: int
    unmaskable_ids: tuple[int, ...]
    cls_id: int
    sep_id: int
    pad_id: int | None
    max_seq_length: int
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the source."""


@dataclass(frozen=True)
class ForeignSource:
    """What `FORMAT:PATH?...` names.

    Attributes:
        kind: row of `FORMATS`.
        path: file or folder; training files may be in its folder `train`.
        options: options of the format.
        held_out: file or folder of held-out examples; None where there is none.
    """

    kind: str
    path: Path
    options: Mapping[str, str]
    held_out: Path | None

    @classmethod
    def parse(cls, source: str) -> ForeignSource:
        """Parses and checks a source."""
        kind, _, specification = source.partition(":")
        if kind not in FORMATS:
            names = ", ".join(f"{name}:PATH" for name in FORMATS)
            raise ValueError(f"source: expected one of {names}, got {source!r}")
        text, _, query = specification.partition("?")
        known = {"validation": ("PATH",), **FORMATS[kind].options}
        options = dict(parse_qsl(query, keep_blank_values=True))
        wrong = set(options) - set(known) or {
            name
            for name, value in options.items()
            if len(known[name]) > 1 and value not in known[name]
        }
        if not text or wrong:
            forms = "&".join(f"{name}={'|'.join(values)}" for name, values in known.items())
            raise ValueError(f"source: expected {kind}:PATH or {kind}:PATH?{forms}, got {source!r}")
        path = _index_of(kind, Path(text).expanduser())
        given = options.pop("validation", None)
        held_out: Path | None = path / "validation"
        if given:
            held_out = _index_of(kind, Path(given).expanduser())
        elif not (path / "validation").is_dir():
            held_out = None
        for place in (path, held_out or path):
            if not place.exists():
                raise FileNotFoundError(
                    f"source: {place} does not exist; expected a file or folder"
                )
        return cls(kind, path, options, held_out)

    def files(self) -> tuple[list[Path], list[Path]]:
        """Returns the files of training and of held-out examples; errors as of `find_files`."""
        folder = self.path / "train" if (self.path / "train").is_dir() else self.path
        held_out = [] if self.held_out is None else find_files(self.held_out, self.kind)
        return find_files(folder, self.kind, self.held_out), held_out


def _index_of(kind: str, path: Path) -> Path:
    """The index of a file that a user may name instead."""
    return path.with_suffix(".idx") if path.suffix == FORMATS[kind].beside else path


def load_format(kind: str) -> ModuleType:
    """Imports the module of a row of `FORMATS`.

    Raises:
        ImportError: the package that reads the files is not installed.
    """
    about = FORMATS[kind]
    try:
        return importlib.import_module(f"{__name__}.{kind}")
    except ModuleNotFoundError as error:
        if about.package is None or (error.name or "").partition(".")[0] != about.package:
            raise
        raise ImportError(
            f"source {kind}: needs the package `{about.package}`: "
            f"pip install 'bert_unpad[{about.extra}]'"
        ) from error


def refuse_foreign(name: str, sources: Iterable[str], command: Callable[[str], str]) -> None:
    """Raises a ValueError that prints the command of the import if a source is a foreign format."""
    for source in sources:
        if ":" in source and source.partition(":")[0] in FORMATS:
            raise _refused(name, source, command)


def refuse_foreign_files(path: Path, command: Callable[[str], str]) -> None:
    """Raises a ValueError that prints the command of the import if a path has files of a format."""
    for kind, about in FORMATS.items():
        if any(_matches(path, about.patterns)):
            raise _refused("source", f"{kind}:{path}", command)


def _refused(name: str, source: str, command: Callable[[str], str]) -> ValueError:
    return ValueError(
        f"{name}: expected text or shards:PATH, got {source}; shards:OUTPUT opens it after "
        f"{command(source)}"
    )


def find_files(path: Path, kind: str, without: Path | None = None) -> list[Path]:
    """Returns a file, or the files of a format below a folder in the order of their paths.

    Hidden files, and those below `without`, are left out.
    """
    module, patterns = load_format(kind), FORMATS[kind].patterns
    files = [path] if path.is_file() else sorted(set(_matches(path, patterns)))
    files = _left_after(files, path, without)
    if not files:
        raise FileNotFoundError(
            f"source: expected a file, or a folder with files {' or '.join(patterns)}, at {path}"
        )
    if not FORMATS[kind].named_by_index:
        return files
    return [file for index in files for file in module.files_of(index)]


def _matches(path: Path, patterns: tuple[str, ...]) -> Iterable[Path]:
    if path.is_file():
        return [path] if any(path.match(pattern) for pattern in patterns) else []
    return (
        found
        for pattern in patterns
        for found in path.rglob(pattern)
        if found.is_file() and not any(part[0] == "." for part in found.relative_to(path).parts)
    )


def _left_after(files: list[Path], path: Path, without: Path | None) -> list[Path]:
    """Returns the files below a folder that are not `without`, nor below it."""
    if without is None or path.is_file():
        return files
    top = path.resolve()
    # A link counts as the place where it is, and as the place where it leads.
    places = {without.resolve(), without.parent.resolve() / without.name}
    places = {place for place in places if top in place.parents}
    within = {file: top / file.relative_to(path) for file in files}
    return [file for file in files if not places & {within[file], *within[file].parents}]
