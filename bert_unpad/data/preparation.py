"""From a corpus to a cache of training and validation examples.

The cache key is a digest of the corpus and of every setting that changes the examples. So a changed
corpus or setting never reads stale data, and settings that change only masks share one cache.
`data.building` makes the examples, in a folder of its own that is renamed at the end; a build that
was killed is continued. Larger corpora are better prepared by `python -m bert_unpad.data prepare`,
whose folders a source of `shards:FOLDER` opens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_unpad._files import write_text
from bert_unpad._full_disk import named_if_full
from bert_unpad.data.building.blocks import BLOCK_BYTES, check_outside
from bert_unpad.data.building.build import example_settings
from bert_unpad.data.building.engines import InProcess
from bert_unpad.data.building.join import join_parts
from bert_unpad.data.building.pipeline import Pipeline
from bert_unpad.data.collate import PackedCollator
from bert_unpad.data.config import DataConfig
from bert_unpad.data.formats import refuse_foreign_files
from bert_unpad.data.formats.hugging_face import HuggingFaceSource
from bert_unpad.data.formats.sources import Source, TextFiles, format_of, open_source
from bert_unpad.data.mixture import Joined, Mixture
from bert_unpad.data.open_examples import open_examples
from bert_unpad.data.prepared import (
    FORMAT,
    SPLITS,
    holds_examples,
    is_prepared,
    open_prepared,
)
from bert_unpad.data.store.cache import cache_lock, check_not_noted, chosen_cache_dir
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.store.manifest import DamagedDataError
from bert_unpad.data.streams.stream import ShardStream
from bert_unpad.data.streams.text_stream import TextStream, is_streamed, parse_streamed
from bert_unpad.data.text.json_tokenizer import load_tokenizer
from bert_unpad.data.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

_COUNTED = ("documents", "examples", "tokens")
_STALE_SECONDS = 7 * 24 * 3600
_JUST_NOW = 2 * 10**9  # nanoseconds: a file may change again without a new time


@dataclass(frozen=True)
class PreparedData:
    """Examples and how they were made, from an opened cache or a source of finished examples.

    Attributes:
        train, validation: the examples; no document occurs in both. `validation` is empty if
            `validation_share` is 0 or the corpus is a single document. For a `stream:` source,
            both come from its sample.
        tokenizer: the tokenizer that the examples were made with.
        path: folder of this cache entry, or of the source.
        config: the configuration that `prepare` was called with.
        statistics: numbers of examples and tokens, as `train_...` and `validation_...`. Data made
            from a corpus also has numbers of documents, and of the corpus's duplicates.
        streamed: the text to train on, which `open_stream` reads; None to train on `train`.
    """

    train: ExampleDataset
    validation: ExampleDataset
    tokenizer: TextTokenizer
    path: Path
    config: DataConfig
    statistics: dict[str, int]
    streamed: HuggingFaceSource | None = None

    def open_stream(
        self, rank: int, num_ranks: int, *, seed: int = 0, shuffle_buffer: int = 8192
    ) -> ShardStream | TextStream:
        """Opens one rank's part of the training examples, in its own order.

        Args:
            rank, num_ranks, seed, shuffle_buffer: see `ShardStream` and `TextStream`.
        """
        if self.streamed is None:
            return ShardStream(
                self.train, rank, num_ranks, seed=seed, shuffle_buffer=shuffle_buffer
            )
        return TextStream(
            self.streamed.load(),
            self.tokenizer,
            rank,
            num_ranks,
            column=self.streamed.column,
            objective=self.config.objective,
            documents=self.config.documents,
            max_seq_length=self.config.max_seq_length,
            short_seq_prob=self.config.short_seq_prob,
            held_out_share=self.config.validation_share,
            pair_seed=self.config.seed,
            seed=seed,
            shuffle_buffer=shuffle_buffer,
            name=self.streamed.name,
        )

    def collator(self, split: str = "train", seed: int | None = None) -> PackedCollator:
        """Makes a collator for one split, with the configuration's masking.

        Args:
            split: `train` or `validation`.
            seed: seed of the masks; None takes the configuration's.
        """
        if split not in SPLITS:
            raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
        return PackedCollator(
            getattr(self, split),
            self.tokenizer,
            masked_lm_prob=self.config.masked_lm_prob,
            mask_unit=self.config.mask_unit,
            always_mask=self.config.objective == "rtd",
            max_predictions_per_seq=self.config.max_predictions_per_seq,
            seed=self.config.seed if seed is None else seed,
        )


def prepare(config: DataConfig, progress: bool | None = None, check: bool = True) -> PreparedData:
    """Opens the cache for a configuration; builds it first if it is missing or damaged.

    A source of examples (`shards:`) is opened without a cache. For a `stream:` source, only the
    sample is prepared.

    Many processes (all ranks of a run) can call this at once: one builds, the others wait.

    Args:
        config: corpus and settings.
        progress: whether building shows progress bars; None shows them if stderr is a terminal.
        check: whether to compare manifests and the sizes of all files, which one process of a
            machine should do. Others may open the same data without.

    Raises:
        DamagedDataError: a file of a source of examples is wrong.
        FileNotFoundError: `source`, `vocab_file` or `tokenizer` does not exist.
        ImportError: the source needs a package that is not installed.
        ValueError: a setting does not fit the source, the corpus has no text, the vocabulary lacks
            special tokens, or `vocab_size` is too small for the corpus's letters.
    """
    if config.mixture is not None:
        return _open_mixture(config, progress, check)
    if holds_examples(config.source):
        return _open_examples(config, check)
    if is_streamed(config.source):
        return _open_streamed(config, progress, check)
    cache = chosen_cache_dir(config.cache_dir)
    tokenizer = config.given_tokenizer()
    source = _open_text(config, cache)
    check_outside("cache_dir", cache, source)
    settings = example_settings(config, tokenizer)
    settings |= {
        "format": FORMAT,
        "block_bytes": BLOCK_BYTES,
        "corpus": _fingerprint(source, cache / "fingerprints"),
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
    path = cache / "prepared" / key
    if path.exists():
        try:
            return _open(path, config, check)
        except DamagedDataError:
            pass  # the process that gets the lock first checks again, and reports it
    with cache_lock(cache / "locks" / f"{key}.lock"):
        if path.exists():
            try:
                return _open(path, config, check)
            except DamagedDataError as error:
                logger.warning("rebuilding damaged data: %s", error)
                aside = path.with_name(f".{key}.{uuid.uuid4().hex}")
                os.replace(path, aside)  # processes that have it open keep its files
                shutil.rmtree(aside)
        _build(config, source, path, cache / "building" / key, progress, settings["corpus"])
        return _open(path, config, check)


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


def _open_examples(config: DataConfig, check: bool) -> PreparedData:
    train, validation, tokenizer, path = open_examples(config, check)
    statistics: dict[str, int] = {}
    for split, dataset in zip(SPLITS, (train, validation), strict=True):
        statistics |= {
            f"{split}_examples": len(dataset),
            f"{split}_tokens": int(dataset.lengths.sum(dtype=np.int64)),
        }
    return PreparedData(train, validation, tokenizer, path, config, statistics)


def _open_mixture(config: DataConfig, progress: bool | None, check: bool) -> PreparedData:
    weights = config.mixture or {}
    sources = sorted(weights)  # whatever the order in which they are named
    texts = [source for source in sources if not holds_examples(source)]
    if texts and config.given_tokenizer() is None:
        raise ValueError(
            f"vocab_file: expected one vocabulary (or tokenizer) for the mixture with {texts[0]}, "
            "got null, with which each source would have its own"
        )
    parts = [
        prepare(dataclasses.replace(config, source=source, mixture=None), progress, check)
        for source in sources
    ]
    for source, part in zip(sources, parts, strict=True):
        if part.tokenizer.identity() != parts[0].tokenizer.identity():
            raise ValueError(
                f"mixture: expected sources with one vocabulary, got another with {source} than "
                f"with {sources[0]}"
            )
    train = Mixture([part.train for part in parts], [weights[name] for name in sources])
    validation = Joined([part.validation for part in parts])
    names = set.intersection(*(set(part.statistics) for part in parts))
    statistics = {name: sum(part.statistics[name] for part in parts) for name in sorted(names)}
    first = parts[0]
    return PreparedData(train, validation, first.tokenizer, first.path, config, statistics)


def _open_streamed(config: DataConfig, progress: bool | None, check: bool) -> PreparedData:
    if config.dupe_factor != 1:
        raise ValueError(
            f"dupe_factor: expected 1 for {config.source}, which reads documents once per epoch, "
            f"got {config.dupe_factor}"
        )
    whole, sample = parse_streamed(config.source)
    data = prepare(dataclasses.replace(config, source=f"hf:{sample}"), progress, check)
    held_out = data.statistics["validation_documents"]
    # A single one may have been chosen because at least one is needed, not by its text.
    if config.validation_share > 0 and held_out < 2:
        raise ValueError(
            f"validation_share: expected at least 2 held-out documents in the sample of "
            f"{config.source}, got {held_out}; raise it or the option sample, or set it to 0"
        )
    return dataclasses.replace(data, config=config, streamed=HuggingFaceSource(whole))


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


def _open(path: Path, config: DataConfig, check: bool) -> PreparedData:
    if check:
        check_not_noted(path)
    train, validation, manifest = open_prepared(path, check, config.verify)
    tokenizer = load_tokenizer(path / "tokenizer")
    return PreparedData(train, validation, tokenizer, path, config, manifest["statistics"])


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
                counts = (statistics[f"{split}_{what}"] for what in _COUNTED)
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
