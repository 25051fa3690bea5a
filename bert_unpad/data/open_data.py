"""What training opens: shards that were made before, or the cache of a corpus.

`shards:PATH[?validation=PATH]` names a folder that `python -m bert_unpad.data prepare` or `import`
has written, or a folder of shards, `train` and perhaps `validation` and `tokenizer`, or a shard.
The vocabulary is that of the `tokenizer` folder, unless `vocab_file` or `tokenizer` names one.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np

from bert_unpad.data.collate import PackedCollator
from bert_unpad.data.config import DataConfig
from bert_unpad.data.formats import refuse_foreign_files
from bert_unpad.data.formats.hugging_face import HuggingFaceSource
from bert_unpad.data.mixture import Joined, Mixture
from bert_unpad.data.objective import SECOND_SEGMENTS
from bert_unpad.data.preparation.cached import open_cached
from bert_unpad.data.prepared import (
    SHARDS,
    SPLITS,
    holds_examples,
    is_prepared,
    is_streamed,
    open_prepared,
)
from bert_unpad.data.store.dataset import ExampleDataset, NoExamples
from bert_unpad.data.store.manifest import MANIFEST
from bert_unpad.data.store.shards import ShardDataset
from bert_unpad.data.streams.stream import ShardStream
from bert_unpad.data.streams.text_stream import TextStream, parse_streamed
from bert_unpad.data.text.json_tokenizer import load_tokenizer, tokenizer_beside
from bert_unpad.data.text.tokenizer import TextTokenizer


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
    sample is prepared. Larger corpora are better prepared by `python -m bert_unpad.data prepare`.

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
    path, train, validation, manifest = open_cached(config, progress, check)
    tokenizer = load_tokenizer(path / "tokenizer")
    return PreparedData(train, validation, tokenizer, path, config, manifest["statistics"])


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
    first = parts[0]
    for source, part in zip(sources, parts, strict=True):
        if part.tokenizer.identity() != first.tokenizer.identity():
            raise ValueError(
                f"mixture: expected sources with one vocabulary, got another with {source} than "
                f"with {sources[0]}"
            )
    train = Mixture([part.train for part in parts], [weights[name] for name in sources])
    validation = Joined([part.validation for part in parts])
    names = set.intersection(*(set(part.statistics) for part in parts))
    statistics = {name: sum(part.statistics[name] for part in parts) for name in sorted(names)}
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


def _open_examples(config: DataConfig, check: bool) -> PreparedData:
    """Opens `shards:PATH`."""
    path, held_out_path = _paths(config.source)
    if not path.exists():
        raise FileNotFoundError(f"source: {path} does not exist; expected a folder of shards")
    held_out: ShardDataset | NoExamples
    if is_prepared(path):
        train, held_out, manifest = open_prepared(path, check, config.verify)
        made = manifest["settings"].get("objective")
        _check_made(config, path, made, manifest["settings"].get("documents"))
    else:
        _check_objective(config)
        folder = path / "train" if (path / "train").is_dir() else path
        if not (folder / MANIFEST).exists():
            refuse_foreign_files(path, config.import_command)
        train = ShardDataset(folder, config.verify, sizes=check)
        if not len(train):
            raise ValueError(f"source: expected at least one example in {folder}, got none")
        held_out = NoExamples(train)
        if held_out_path is None and (path / "validation").is_dir():
            held_out_path = path / "validation"
    tokenizer = config.given_tokenizer() or tokenizer_beside(path)
    if held_out_path is not None:
        held_out = ShardDataset(held_out_path, config.verify, sizes=check)
    statistics: dict[str, int] = {}
    for split, dataset in zip(SPLITS, (train, held_out), strict=True):
        if check and len(dataset) and dataset.lengths.max() > config.max_seq_length:
            raise ValueError(
                f"max_seq_length: expected at least {dataset.lengths.max()}, the longest example "
                f"of {path}, got {config.max_seq_length}"
            )
        statistics[f"{split}_examples"] = len(dataset)
        statistics[f"{split}_tokens"] = int(dataset.lengths.sum(dtype=np.int64))
        dataset.pair_labels = SECOND_SEGMENTS[config.objective] is not None
    return PreparedData(train, held_out, tokenizer, path, config, statistics)


def _paths(source: str) -> tuple[Path, Path | None]:
    """Returns the folder that a source names, and that of held-out examples if it names one."""
    text, _, query = source.removeprefix(SHARDS).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not text or set(options) - {"validation"}:
        raise ValueError(
            f"source: expected shards:PATH or shards:PATH?validation=PATH, got {source!r}"
        )
    held_out = options.get("validation")
    return Path(text).expanduser(), Path(held_out).expanduser() if held_out is not None else None


def _check_made(config: DataConfig, path: Path, made: str | None, documents: str | None) -> None:
    """Raises a ValueError if prepared data has other examples than a configuration wants."""
    wanted = SECOND_SEGMENTS[config.objective]
    if wanted is not None and made != wanted:
        raise ValueError(
            f"objective: expected one whose examples are those of {path} (second segment: {made}), "
            f"got {config.objective} ({wanted})"
        )
    if config.documents not in ("apart", documents):
        raise ValueError(
            f"documents: expected {documents}, as the examples of {path} were made, got "
            f"{config.documents}"
        )


def _check_objective(config: DataConfig) -> None:
    """Raises a ValueError if shards whose making is not known cannot be what is wanted."""
    if config.documents != "apart":
        raise ValueError(
            f"documents: expected apart with source {SHARDS}, whose examples are made already, got "
            f"{config.documents}"
        )
    if config.objective == "mlm_sop":
        raise ValueError(
            f"objective: expected mlm_nsp, mlm or rtd with source {SHARDS}, whose examples are "
            f"made already, got {config.objective}"
        )
