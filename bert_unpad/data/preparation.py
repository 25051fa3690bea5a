"""From a corpus to a checked cache of training and validation shards.

The cache key is a digest of the corpus and of every setting that changes the examples. So a changed
corpus or setting never reads stale data, and settings that change only masks share one cache. A
build first writes the corpus to a spool file, one sentence per line, so that a stream is read only
once. Then it removes duplicates and splits by document, trains the vocabulary on the training part,
converts sentences to ids, and makes examples. Everything is written under a temporary name and
renamed at the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bert_unpad.data.collate import PackedCollator
from bert_unpad.data.config import DataConfig
from bert_unpad.data.objective import SECOND_SEGMENTS
from bert_unpad.data.store.cache import cache_lock, default_cache_dir
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.store.manifest import (
    MANIFEST,
    DamagedDataError,
    check_digest,
    count_of,
    read_manifest,
    write_synced,
)
from bert_unpad.data.store.open_examples import holds_examples, open_examples
from bert_unpad.data.store.shards import ShardDataset, ShardWriter
from bert_unpad.data.streams.stream import ShardStream
from bert_unpad.data.streams.text_stream import TextStream, is_streamed, parse_streamed
from bert_unpad.data.text.corpus import Spool, tokenize
from bert_unpad.data.text.examples import make_examples, write_examples
from bert_unpad.data.text.json_tokenizer import JsonTokenizer, given_tokenizer, load_tokenizer
from bert_unpad.data.text.pairs import SPECIAL_PER_PAIR
from bert_unpad.data.text.sources import HuggingFaceSource, Source, file_sha256, open_source
from bert_unpad.data.text.tokenizer import TextTokenizer, WordPieceTokenizer
from bert_unpad.data.text.train_tokenizer import train_tokenizer

logger = logging.getLogger(__name__)

FORMAT = "bert_unpad prepared data, version 2"
_STALE_SECONDS = 24 * 3600
_SPLITS = ("train", "validation")
_MANIFESTS = tuple(f"{split}/{MANIFEST}" for split in _SPLITS)
_MASKING_SETTINGS = ("masked_lm_prob", "mask_unit", "max_predictions_per_seq")
_PLACES = ("source", "cache_dir", "vocab_file", "verify")


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
        if split not in _SPLITS:
            raise ValueError(f"split: expected one of {', '.join(_SPLITS)}, got {split!r}")
        return PackedCollator(
            getattr(self, split),
            self.tokenizer,
            masked_lm_prob=self.config.masked_lm_prob,
            mask_unit=self.config.mask_unit,
            always_mask=self.config.objective == "rtd",
            max_predictions_per_seq=self.config.max_predictions_per_seq,
            seed=self.config.seed if seed is None else seed,
        )


def prepare(config: DataConfig, progress: bool | None = None) -> PreparedData:
    """Opens the cache for a configuration; builds it first if it is missing or damaged.

    A source of finished examples (`hdf5:`, `shards:`) is opened without a cache. For a `stream:`
    source, only the sample is prepared.

    Many processes (all ranks of a run) can call this at once: one builds, the others wait.

    Args:
        config: corpus and settings.
        progress: whether building shows progress bars; None shows them if stderr is a terminal.

    Raises:
        DamagedDataError: a file of a source of finished examples is wrong.
        FileNotFoundError: `source`, `vocab_file` or `tokenizer` does not exist.
        ImportError: the source needs a package that is not installed.
        ValueError: a setting does not fit the source, the corpus has no text, the vocabulary lacks
            special tokens, or `vocab_size` is too small for the corpus's letters.
    """
    if holds_examples(config.source):
        return _open_examples(config, progress)
    if is_streamed(config.source):
        return _open_streamed(config, progress)
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()
    tokenizer = given_tokenizer(config)
    source = open_source(config.source, cache_dir=cache)
    settings = _settings(config, source, tokenizer)
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]
    path = cache / "prepared" / key
    if path.exists():
        try:
            return _open(path, config)
        except DamagedDataError:
            pass  # the process that gets the lock first checks again, and reports it
    with cache_lock(cache / "locks" / f"{key}.lock"):
        if path.exists():
            try:
                return _open(path, config)
            except DamagedDataError as error:
                logger.warning("rebuilding damaged data: %s", error)
                aside = path.with_name(f".{key}.{uuid.uuid4().hex}")
                os.replace(path, aside)  # processes that have it open keep its files
                shutil.rmtree(aside)
        _build(config, source, settings, tokenizer, path, progress)
        return _open(path, config)


def _open_examples(config: DataConfig, progress: bool | None) -> PreparedData:
    train, validation, tokenizer, path = open_examples(config, progress)
    statistics = {}
    for split, dataset in zip(_SPLITS, (train, validation), strict=True):
        statistics |= {
            f"{split}_examples": len(dataset),
            f"{split}_tokens": int(dataset.lengths.sum(dtype=np.int64)),
        }
    return PreparedData(train, validation, tokenizer, path, config, statistics)


def _open_streamed(config: DataConfig, progress: bool | None) -> PreparedData:
    if config.dupe_factor != 1:
        raise ValueError(
            f"dupe_factor: expected 1 for {config.source}, which reads documents once per epoch, "
            f"got {config.dupe_factor}"
        )
    whole, sample = parse_streamed(config.source)
    data = prepare(dataclasses.replace(config, source=f"hf:{sample}"), progress)
    held_out = data.statistics["validation_documents"]
    # `Spool.held_out` may have chosen a single one because it needs at least one, not by its text.
    if config.validation_share > 0 and held_out < 2:
        raise ValueError(
            f"validation_share: expected at least 2 held-out documents in the sample of "
            f"{config.source}, got {held_out}; raise it or the option sample, or set it to 0"
        )
    return dataclasses.replace(data, config=config, streamed=HuggingFaceSource(whole))


def _settings(
    config: DataConfig, source: Source, tokenizer: TextTokenizer | None
) -> dict[str, Any]:
    """Returns everything that determines the content of the shards."""
    settings = dataclasses.asdict(config)
    for name in (*_MASKING_SETTINGS, *_PLACES):
        del settings[name]
    settings["lowercase"] = config.lowercases
    # Objectives with the same examples share a cache.
    settings["objective"] = SECOND_SEGMENTS[config.objective]
    settings |= {"format": FORMAT, "corpus": source.fingerprint()}
    if tokenizer is not None:
        settings |= {"vocab_size": None, "tokenizer": tokenizer.identity()}
    return settings


def _open(path: Path, config: DataConfig) -> PreparedData:
    manifest = read_manifest(path / MANIFEST, FORMAT)
    try:
        statistics = dict(manifest["statistics"])
        for name in statistics.keys() | {"validation_documents"}:
            count_of(statistics, name, sys.maxsize)
        files = JsonTokenizer.files
        if f"tokenizer/{files[0]}" not in manifest["sha256"]:
            files = WordPieceTokenizer.files
        digests = {name: manifest["sha256"][name] for name in _proven(files)}
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedDataError(
            f"{path / MANIFEST} is damaged; expected an entry {error}"
        ) from error
    for name, digest in digests.items():
        check_digest(path / name, digest)
    train, validation = (ShardDataset(path / split, config.verify) for split in _SPLITS)
    tokenizer = load_tokenizer(path / "tokenizer")
    return PreparedData(train, validation, tokenizer, path, config, statistics)


def _build(
    config: DataConfig,
    source: Source,
    settings: dict[str, Any],
    tokenizer: TextTokenizer | None,
    path: Path,
    progress: bool | None,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        # The spool of a stream survives an interrupted build; it has its own key.
        streamed = isinstance(source, HuggingFaceSource) and source.streaming
        spools = path.parent.parent / "spools" / path.name if streamed else temporary / "work"
        _fill(config, source, settings, tokenizer, temporary, spools, progress)
        try:
            os.replace(temporary, path)
        except OSError:
            if not path.is_dir():
                raise
            # Locks may not work between machines: then another one has finished the same data.
            logger.info("%s was built by another process meanwhile", path)
        shutil.rmtree(spools, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(path: Path) -> None:
    """Deletes old folders of killed builds; recent ones may belong to another machine."""
    for folder in path.parent.glob(f".{path.name}.*"):
        if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _fill(
    config: DataConfig,
    source: Source,
    settings: dict[str, Any],
    tokenizer: TextTokenizer | None,
    folder: Path,
    spools: Path,
    progress: bool | None,
) -> None:
    """Builds everything in a new folder; reads the documents into the folder `spools`."""
    work = folder / "work"
    work.mkdir()
    spools.mkdir(parents=True, exist_ok=True)
    with _bar(f"reading {source.name}", "documents", None, progress) as bar:
        spool = Spool(spools / "spool.txt", source, bar.update)
    if not spool.documents:
        raise ValueError(f"source: {source.name} holds no text; expected at least one document")
    held_out = spool.held_out(config.validation_share)
    if config.validation_share > 0 and not held_out.any():
        logger.warning("%s is a single document: the validation part is empty", source.name)
    if tokenizer is None:
        logger.info("training a vocabulary of up to %d tokens", config.vocab_size)
        tokenizer = train_tokenizer(
            config.tokenizer,
            lambda: spool.sample(~held_out, config.vocab_sample_mb),
            *(config.vocab_size, config.lowercases, config.alphabet_size),
        )
    tokenizer.save(folder / "tokenizer")
    statistics = {"documents": spool.documents, "duplicates": spool.duplicates}
    for split, which in zip(_SPLITS, (~held_out, held_out), strict=True):
        sentences = int(spool.sentences[which].sum())
        with _bar(f"tokenizing {split}", "sentences", sentences, progress) as bar:
            corpus = tokenize(
                spool.read(which),
                tokenizer,
                work / f"{split}.bin",
                longest=config.max_seq_length - SPECIAL_PER_PAIR,
                advance=bar.update,
            )
        if split == "train" and not corpus.documents:
            raise ValueError(
                f"source: {source.name} holds no text that the tokenizer knows; expected at least "
                "one word"
            )
        passes = config.dupe_factor if split == "train" else 1
        with (
            ShardWriter(
                folder / split,
                vocab_size=tokenizer.vocab_size,
                unmaskable_ids=tokenizer.unmaskable_ids,
                max_seq_length=config.max_seq_length,
            ) as writer,
            _bar(f"making {split}", "documents", passes * corpus.documents, progress) as bar,
        ):
            examples = make_examples(
                corpus,
                tokenizer,
                objective=config.objective,
                documents=config.documents,
                max_seq_length=config.max_seq_length,
                short_seq_prob=config.short_seq_prob,
                dupe_factor=passes,
                seed=f"{config.seed}, {split}",
            )
            write_examples(examples, writer, bar.update)
        dataset = ShardDataset(folder / split, verify=False)
        statistics |= {
            f"{split}_documents": corpus.documents,
            f"{split}_examples": len(dataset),
            f"{split}_tokens": len(dataset.tokens),
        }
        logger.info(
            "%s: %d documents, %d examples, %d tokens, %.1f %% of %d-token rows",
            *(split, corpus.documents, len(dataset), len(dataset.tokens)),
            *(100 * dataset.fill, config.max_seq_length),
        )
    shutil.rmtree(work)
    manifest = {
        "format": FORMAT,
        "source": source.name,
        "settings": settings,
        "statistics": statistics,
        "sha256": {name: file_sha256(folder / name) for name in _proven(tokenizer.files)},
    }
    write_synced(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def _proven(tokenizer_files: Sequence[str]) -> list[str]:
    """The files whose digests the manifest has."""
    return [*(f"tokenizer/{name}" for name in tokenizer_files), *_MANIFESTS]


def _bar(title: str, unit: str, total: int | None, progress: bool | None) -> tqdm:
    disable = None if progress is None else not progress  # None: only on a terminal
    return tqdm(desc=title, total=total, unit=f" {unit}", disable=disable, leave=False)
