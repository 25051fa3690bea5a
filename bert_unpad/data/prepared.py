"""A folder of prepared data: training and held-out examples, the tokenizer, and a manifest.

The manifest has the digests of the files that describe the others, and its own. So looking at a few
small files and at the sizes of all others tells whether the data is what was written; `check` also
reads all contents.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bert_unpad._files import file_sha256, read_json_object, write_text
from bert_unpad.data.store.manifest import (
    MANIFEST,
    DamagedDataError,
    check_digest,
    count_of,
    read_manifest,
)
from bert_unpad.data.store.shards import ShardDataset
from bert_unpad.data.text.json_tokenizer import JsonTokenizer
from bert_unpad.data.text.tokenizer import WordPieceTokenizer

SHARDS = "shards:"
"""What sources of prepared examples begin with."""
STREAM = "stream:"
"""What sources of text that is read during training begin with."""
FORMAT = "bert_unpad prepared data, version 3"
SPLITS = ("train", "validation")


def is_streamed(source: str) -> bool:
    """Whether a `DataConfig.source` names text that is read during training."""
    return source.startswith(STREAM)


def is_prepared(folder: Path) -> bool:
    """Whether a folder holds prepared data, perhaps damaged or of another version."""
    try:
        found = read_json_object(folder / MANIFEST).get("format")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return False
    except ValueError:  # reading it says what is wrong
        return True
    return str(found).startswith(FORMAT.partition(",")[0])


def write_prepared(
    folder: Path,
    *,
    source: str,
    settings: dict[str, Any],
    statistics: dict[str, int],
    tokenizer_files: Sequence[str],
) -> None:
    """Writes the manifest, which makes a folder complete."""
    names = _described(tokenizer_files)
    manifest = {
        "format": FORMAT,
        "source": source,
        "settings": settings,
        "statistics": statistics,
        "sha256": {name: file_sha256(folder / name) for name in names},
    }
    manifest["checksum"] = _checksum(manifest)
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def read_prepared(folder: Path, check: bool = True) -> dict[str, Any]:
    """Reads the manifest of prepared data; with `check`, looks at the files that it describes too.

    Raises:
        DamagedDataError: a file is missing or was altered; the message names it.
    """
    manifest = read_manifest(folder / MANIFEST, FORMAT)
    try:
        for name in {*manifest["statistics"], "validation_examples"}:
            count_of(manifest["statistics"], name, sys.maxsize)
        digests = manifest["sha256"]
        dict(manifest["settings"])
        files = JsonTokenizer.files
        if f"tokenizer/{files[0]}" not in digests:
            files = WordPieceTokenizer.files
        expected = {name: digests[name] for name in _described(files)}
        checksum = manifest["checksum"]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedDataError(
            f"{folder / MANIFEST} is damaged; expected an entry {error}"
        ) from error
    if check:
        if _checksum(manifest) != checksum:
            raise DamagedDataError(f"{folder / MANIFEST} was altered: expected checksum {checksum}")
        for name, digest in expected.items():
            check_digest(folder / name, digest)
    return manifest


def open_prepared(
    folder: Path, check: bool = True, verify: bool = False
) -> tuple[ShardDataset, ShardDataset, dict[str, Any]]:
    """Opens prepared data.

    Args:
        folder: the data.
        check: whether to compare the manifest's checksum and the sizes of all files. One process a
            machine is enough.
        verify: whether to compare the digests of all files, which reads them.

    Returns:
        Training examples, held-out examples, and the manifest.
    """
    manifest = read_prepared(folder, check or verify)
    train, held_out = (ShardDataset(folder / split, verify, sizes=check) for split in SPLITS)
    return train, held_out, manifest


def _described(tokenizer_files: Sequence[str]) -> list[str]:
    """The files whose digests the manifest has."""
    of_splits = (f"{split}/{MANIFEST}" for split in SPLITS)
    return [*(f"tokenizer/{name}" for name in tokenizer_files), *of_splits]


def _checksum(manifest: dict[str, Any]) -> str:
    """The digest of everything in a manifest but itself."""
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def holds_examples(source: str) -> bool:
    """Whether a `DataConfig.source` names examples that are made already."""
    return source.startswith(SHARDS)


def may_have_pairs(source: str) -> bool:
    """Whether examples of a source of shards may have two segments; looks at the manifest."""
    path = Path(source.removeprefix(SHARDS).partition("?")[0]).expanduser()
    if not is_prepared(path):
        return True
    try:
        return read_prepared(path, check=False)["settings"].get("objective") is not None
    except DamagedDataError:  # opening the data says what is wrong
        return True
