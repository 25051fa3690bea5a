"""Sources whose examples are made already: HDF5 files, and shards made by a converter.

    hdf5:PATH[?validation=PATH]      shards:PATH[?validation=PATH]

PATH is a folder with `train` and, perhaps, `validation` and `tokenizer` in it (what the converters
write), or the training examples alone: an HDF5 file, a folder of such files, or a shard. Nothing is
prepared then: the vocabulary is `vocab_file`, unless there is a `tokenizer` folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from bert_unpad.data.store.cache import default_cache_dir
from bert_unpad.data.store.dataset import ExampleDataset, NoExamples
from bert_unpad.data.store.shards import ShardDataset
from bert_unpad.data.text.tokenizer import WordPieceTokenizer

if TYPE_CHECKING:
    from bert_unpad.data.config import DataConfig

__all__ = ["is_ready", "open_ready"]


def is_ready(source: str) -> bool:
    """Whether a `DataConfig.source` names examples that are made already."""
    return source.startswith(("hdf5:", "shards:"))


def open_ready(
    config: DataConfig, progress: bool | None = None
) -> tuple[ExampleDataset, ExampleDataset, WordPieceTokenizer, Path]:
    """Opens what `config.source` names.

    Args:
        config: source, and `vocab_file`, `lowercase`, `max_seq_length`, `cache_dir`, `verify`.
        progress: whether indexing HDF5 files shows a bar; None: if stderr is a terminal.

    Returns:
        Training examples, held-out ones (which may be none), the tokenizer, the folder.

    Raises:
        DamagedDataError: a file is damaged or wrong; the message names it.
        FileNotFoundError: there is nothing at a path.
        ImportError: `h5py` is needed and not installed.
        ValueError: an unknown option, no vocabulary, or examples longer than `max_seq_length`.
    """
    kind, _, specification = config.source.partition(":")
    text, _, query = specification.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not text or set(options) - {"validation"}:
        raise ValueError(
            f"source: expected {kind}:PATH or {kind}:PATH?validation=PATH, got {config.source!r}"
        )
    path = Path(text).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"source: {path} does not exist")
    splits = {"train": path / "train" if (path / "train").is_dir() else path}
    if "validation" in options:
        splits["validation"] = Path(options["validation"]).expanduser()
    elif (path / "validation").is_dir():
        splits["validation"] = path / "validation"
    tokenizer = _tokenizer(config, path)
    open_split = _hdf5_opener(config, tokenizer, progress) if kind == "hdf5" else _shards(config)
    train = open_split(splits["train"])
    if not len(train):
        raise ValueError(f"source: {splits['train']} holds no example; expected at least one")
    held_out = open_split(splits["validation"]) if "validation" in splits else NoExamples(train)
    return train, held_out, tokenizer, path


def _tokenizer(config: DataConfig, path: Path) -> WordPieceTokenizer:
    if config.vocab_file is not None:
        return WordPieceTokenizer.from_vocab_file(config.vocab_file, config.lowercase)
    if not (path / "tokenizer").is_dir():
        raise ValueError(
            f"vocab_file: expected the vocabulary that the examples of {config.source} were made "
            f"with, as there is no folder {path / 'tokenizer'}"
        )
    return WordPieceTokenizer.load(path / "tokenizer")


def _hdf5_opener(
    config: DataConfig, tokenizer: WordPieceTokenizer, progress: bool | None
) -> Callable[[Path], ExampleDataset]:
    try:
        from bert_unpad.data.hdf5.dataset import Hdf5Dataset
        from bert_unpad.data.hdf5.index import find_files
    except ModuleNotFoundError as error:
        if error.name != "h5py":
            raise
        raise ImportError(
            f"source={config.source!r} needs the package `h5py`: pip install 'bert_unpad[hdf5]'"
        ) from error
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()

    def opener(path: Path) -> ExampleDataset:
        return Hdf5Dataset(
            find_files(path),
            vocab_size=tokenizer.vocab_size,
            unmaskable_ids=tokenizer.unmaskable_ids,
            max_seq_length=config.max_seq_length,
            cache_dir=cache,
            progress=progress,
        )

    return opener


def _shards(config: DataConfig) -> Callable[[Path], ExampleDataset]:
    def opener(path: Path) -> ExampleDataset:
        dataset = ShardDataset(path, config.verify)
        if len(dataset) and dataset.lengths.max() > config.max_seq_length:
            raise ValueError(
                f"max_seq_length: {path} has examples of {dataset.lengths.max()} tokens, expected "
                f"at most {config.max_seq_length}"
            )
        return dataset

    return opener
