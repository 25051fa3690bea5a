"""The cache of prepared data.

Its key is a digest of the corpus and of every setting that changes the examples. So a changed
corpus or setting never reads stale data, and settings that change only masks share one entry. An
entry is made in a folder of its own that is renamed at the end; a build that was killed is
continued.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from bert_unpad._files import write_text
from bert_unpad._full_disk import named_if_full
from bert_unpad.data.config import DataConfig
from bert_unpad.data.formats import refuse_foreign_files
from bert_unpad.data.formats.sources import Source, TextFiles, format_of, open_source
from bert_unpad.data.preparation.blocks import BLOCK_BYTES, check_outside
from bert_unpad.data.preparation.build import example_settings
from bert_unpad.data.preparation.engines import InProcess
from bert_unpad.data.preparation.join import join_parts
from bert_unpad.data.preparation.locks import cache_lock
from bert_unpad.data.preparation.pipeline import Pipeline
from bert_unpad.data.prepared import FORMAT, SPLITS, is_prepared, open_prepared
from bert_unpad.data.store.cache import check_not_noted, chosen_cache_dir
from bert_unpad.data.store.manifest import DamagedDataError
from bert_unpad.data.store.shards import ShardDataset

logger = logging.getLogger(__name__)

_STALE_SECONDS = 7 * 24 * 3600
_JUST_NOW = 2 * 10**9  # nanoseconds: a file may change again without a new time


def open_cached(
    config: DataConfig, progress: bool | None, check: bool
) -> tuple[Path, ShardDataset, ShardDataset, dict[str, Any]]:
    """Opens the entry of a configuration; makes it first if it is missing or damaged.

    Arguments and errors as of `prepare`.

    Returns:
        Its folder, training examples, held-out examples, and the manifest.
    """
    cache = chosen_cache_dir(config.cache_dir)
    tokenizer = config.given_tokenizer()
    source = _open_text(config, cache)
    check_outside("cache_dir", cache, source)
    settings = example_settings(config, tokenizer)
    content = _fingerprint(source, cache / "fingerprints")
    settings |= {"format": FORMAT, "block_bytes": BLOCK_BYTES, "corpus": content}
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
    path = cache / "prepared" / key

    def opened() -> tuple[Path, ShardDataset, ShardDataset, dict[str, Any]]:
        if check:
            check_not_noted(path)
        return path, *open_prepared(path, check, config.verify)

    if path.exists():
        # What is damaged is reported by the process that gets the lock first.
        with contextlib.suppress(DamagedDataError):
            return opened()
    with cache_lock(cache / "locks" / f"{key}.lock"):
        if path.exists():
            try:
                return opened()
            except DamagedDataError as error:
                logger.warning("rebuilding damaged data: %s", error)
                aside = path.with_name(f".{key}.{uuid.uuid4().hex}")
                os.replace(path, aside)  # processes that have it open keep its files
                shutil.rmtree(aside)
        _build(config, source, path, cache / "building" / key, progress, content)
        return opened()


def _open_text(config: DataConfig, cache: Path) -> Source:
    path = Path(config.source.partition("?")[0]).expanduser()
    # A folder of examples may have its vocabulary beside them, which is no text.
    if (path / "tokenizer").is_dir() or (path.is_file() and format_of(path) is None):
        refuse_foreign_files(path, config.import_command)
    try:
        return open_source(config.source, cache_dir=cache)
    except FileNotFoundError:
        refuse_foreign_files(path, config.import_command)
        raise


def _fingerprint(source: Source, folder: Path) -> str:
    """The fingerprint of a source, remembered as long as its files keep their sizes and times."""
    if not isinstance(source, TextFiles):
        return source.fingerprint()
    about = source.identity()
    path = folder / about
    if path.is_file():
        return path.read_text("utf-8")
    newest = max((file.stat().st_mtime_ns for file in source.paths), default=0)
    fingerprint = source.fingerprint()
    if newest < time.time_ns() - _JUST_NOW and source.identity() == about:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, fingerprint)
    return fingerprint


def _build(
    config: DataConfig,
    source: Source,
    path: Path,
    building: Path,
    progress: bool | None,
    content: str,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(building)
    try:
        if is_prepared(building):
            try:
                join_parts(building)  # which was killed before it had removed `work`
            except DamagedDataError as error:
                logger.warning("building damaged data again: %s", error)
                shutil.rmtree(building)
        if not is_prepared(building):
            with named_if_full(building):
                statistics = Pipeline(
                    *(building, config, source, InProcess()), progress=progress, content=content
                ).run()
            for split in SPLITS:
                counts = (statistics[f"{split}_{x}"] for x in ("documents", "examples", "tokens"))
                logger.info("%s: %d documents, %d examples, %d tokens", split, *counts)
        os.replace(building, path)
    except OSError:
        if not path.is_dir():
            raise
        # Locks may not work between machines: then another one has finished the same data.
        logger.info("%s was built by another process meanwhile", path)
    except (DamagedDataError, ValueError):  # it would fail again
        shutil.rmtree(building, ignore_errors=True)
        raise


def _remove_leftovers(building: Path) -> None:
    """Deletes what killed builds of other data have left long ago."""
    for folder in building.parent.glob("*"):
        if folder != building and time.time() - _last_change(folder) > _STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _last_change(folder: Path) -> float:
    """When a file below a folder was last changed, which may change meanwhile; see `time.time`."""
    newest = 0.0
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, path.stat().st_mtime)
    return newest
