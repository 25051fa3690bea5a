"""Readers of finished examples and of token ids in the formats that other tools write.

A format is a row of `READERS` and a module with the row's name. The module has one function,
`open_split(path, setting)`, which returns an `ExampleDataset`: the length of every example is known
without reading it, and `batch(indices)` reads some of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bert_unpad.data.store.dataset import ExampleDataset

DETECT = "examples"
"""The kind of source whose format follows from the names of its files."""
_TOKEN_OPTIONS = {
    "add": ("none", "cls", "sep", "cls,sep"),
    "long": ("error", "cut", "split"),
}


@dataclass(frozen=True)
class Reader:
    """How one format is found and what can be said about it."""

    patterns: tuple[str, ...]
    """Names of its files."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options of a source with their values; a single value stands for any text."""
    package: str | None = None
    """A package that it needs."""
    extra: str | None = None
    """The extra of this package that installs it."""
    finished: bool = False
    """Whether examples may have two segments and next-sentence labels; otherwise a file has token
    ids alone."""


READERS: dict[str, Reader] = {
    "shards": Reader(("manifest.json",), finished=True),
    # The benchmark's packed files have names such as output_00042.
    "hdf5": Reader(
        ("*.hdf5", "*.h5", "output_[0-9][0-9][0-9][0-9][0-9]"),
        package="h5py",
        extra="hdf5",
        finished=True,
    ),
    "megatron": Reader(("*.idx",), {**_TOKEN_OPTIONS, "unit": ("document", "sequence")}),
    "parquet": Reader(
        ("*.parquet",), {**_TOKEN_OPTIONS, "column": ("NAME",)}, package="pyarrow", extra="parquet"
    ),
    "mds": Reader(
        ("index.json",),
        {
            **_TOKEN_OPTIONS,
            "column": ("NAME",),
            "dtype": ("uint16", "int32", "uint32", "int64"),
        },
    ),
    # MLPerf's files have names such as part-00000-of-00500.
    "tfrecord": Reader(("*.tfrecord", "*.tfrecords", "part-*-of-*"), finished=True),
}


@dataclass(frozen=True)
class Setting:
    """What a reader has to know besides the files."""

    vocab_size: int
    unmaskable_ids: tuple[int, ...]
    cls_id: int
    sep_id: int
    pad_id: int | None
    max_seq_length: int
    cache_dir: Path
    verify: bool = True
    """Whether digests that come with the files are compared."""
    check: bool = True
    """Whether manifests and the sizes of files are compared, where a manifest has them."""
    progress: bool | None = None
    """Whether indexing shows a bar; None shows it if stderr is a terminal."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the source."""
    without: Path | None = None
    """A file or folder, perhaps below the path, whose files are left out: the held-out ones."""


def kind_of(source: str) -> str | None:
    """Returns the row of `READERS` that reads a `DataConfig.source`; None where none or several do.

    A source of text has none. Looks at the files of a source `examples:PATH`.
    """
    kind, colon, rest = source.partition(":")
    if not colon or (kind not in READERS and kind != DETECT):
        return None
    if kind != DETECT:
        return kind
    kinds = _kinds_at(Path(rest.partition("?")[0]).expanduser())
    return kinds[0] if len(kinds) == 1 else None


def detect(path: Path) -> str:
    """Returns the row of `READERS` whose files are at a path.

    Raises:
        ValueError: there are files of no format or of several.
    """
    kinds = _kinds_at(path)
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise ValueError(
            f"source: expected files of one format at {path}, got {' and '.join(kinds)} files; "
            f"{' or '.join(f'{kind}:{path}' for kind in kinds)} chooses one"
        )
    names = (f"{', '.join(reader.patterns)} ({kind})" for kind, reader in READERS.items())
    raise ValueError(
        f"source: expected files with one of these names at {path}: {', '.join(names)}"
    )


def _kinds_at(path: Path) -> list[str]:
    return [kind for kind, reader in READERS.items() if any(_matches(path, reader.patterns))]


def find_files(path: Path, kind: str, without: Path | None = None) -> list[Path]:
    """Returns a file, or the files of a format below a folder in the order of their paths.

    Args:
        path: file or folder; hidden files and folders in it are left out.
        kind: row of `READERS`.
        without: see `Setting`.

    Raises:
        FileNotFoundError: there are no such files.
    """
    patterns = READERS[kind].patterns
    files = [path] if path.is_file() else sorted(set(_matches(path, patterns)))
    files = _left_after(files, path, without)
    if not files:
        raise FileNotFoundError(
            f"source: expected a file, or a folder with files {' or '.join(patterns)}, at {path}"
        )
    return files


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


def open_split(kind: str, path: Path, setting: Setting) -> ExampleDataset:
    """Opens the examples of one split.

    Args:
        kind: row of `READERS`.
        path: file or folder.
        setting: what the reader has to know.

    Raises:
        DamagedDataError: a file is damaged or wrong; the message names it.
        FileNotFoundError: there are no files of this format.
        ImportError: a package is not installed.
        ValueError: an option does not fit the files.
    """
    reader = READERS[kind]
    try:
        module = importlib.import_module(f"{__name__}.{kind}")
    except ModuleNotFoundError as error:
        if reader.package is None or (error.name or "").partition(".")[0] != reader.package:
            raise
        raise ImportError(
            f"source={f'{kind}:{path}'!r} needs the package `{reader.package}`: "
            f"pip install 'bert_unpad[{reader.extra}]'"
        ) from error
    return module.open_split(path, setting)
