"""Opens sources that hold finished examples: HDF5 files, and shards written by a converter.

    hdf5:PATH[?validation=PATH]      shards:PATH[?validation=PATH]

PATH is a folder that holds `train` and perhaps `validation` and `tokenizer` (as converters and
`python -m bert_unpad.data prepare` write it), or the training examples: an HDF5 file, a folder of
such files, or a shard. No text is prepared. The vocabulary is that of the `tokenizer` folder,
unless `vocab_file` or `tokenizer` names one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from bert_unpad.data.objective import SECOND_SEGMENTS
from bert_unpad.data.store.cache import default_cache_dir
from bert_unpad.data.store.dataset import ExampleDataset, NoExamples, WithoutPairLabels
from bert_unpad.data.store.prepared import is_prepared, open_prepared
from bert_unpad.data.store.shards import ShardDataset
from bert_unpad.data.text.json_tokenizer import given_tokenizer, load_tokenizer
from bert_unpad.data.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from bert_unpad.data.config import DataConfig


def holds_examples(source: str) -> bool:
    """Whether a `DataConfig.source` names finished examples."""
    return source.startswith(("hdf5:", "shards:"))


def open_examples(
    config: DataConfig, progress: bool | None = None, check: bool = True
) -> tuple[ExampleDataset, ExampleDataset, TextTokenizer, Path]:
    """Opens the examples that `config.source` names.

    Args:
        config: the source; `objective`, `vocab_file`, `lowercase`, `max_seq_length`, `cache_dir`
            and `verify` are read too.
        progress: whether indexing HDF5 files shows a bar; None shows it if stderr is a terminal.
        check: whether to compare the manifests and file sizes of shards.

    Returns:
        Training examples, held-out examples (perhaps none), the tokenizer, and the folder.

    Raises:
        DamagedDataError: a file is damaged or wrong; the message names it.
        FileNotFoundError: a path does not exist.
        ImportError: `h5py` is needed and not installed.
        ValueError: an option is unknown, the vocabulary is missing, an example is longer than
            `max_seq_length`, or the objective needs other examples.
    """
    kind, _, specification = config.source.partition(":")
    text, _, query = specification.partition("?")
    path = Path(text).expanduser()
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not text or set(options) - {"validation"}:
        raise ValueError(
            f"source: expected {kind}:PATH or {kind}:PATH?validation=PATH, got {config.source!r}"
        )
    if kind == "shards" and is_prepared(path):
        return _open_prepared(config, path, options, check)
    if config.objective == "mlm_sop" or config.documents != "apart":
        name = "documents" if config.documents != "apart" else "objective"
        wanted = {"documents": "apart", "objective": "mlm_nsp, mlm or rtd"}[name]
        raise ValueError(
            f"{name}: expected {wanted} with source {kind}:, whose examples are made already, got "
            f"{getattr(config, name)}"
        )
    if not path.exists():
        raise FileNotFoundError(f"source: {path} does not exist; expected a file or folder")
    splits = {"train": path / "train" if (path / "train").is_dir() else path}
    if "validation" in options:
        splits["validation"] = Path(options["validation"]).expanduser()
    elif (path / "validation").is_dir():
        splits["validation"] = path / "validation"
    tokenizer = _tokenizer(config, path)
    open_split = (
        _hdf5_opener(config, tokenizer, progress) if kind == "hdf5" else _shards(config, check)
    )
    train = open_split(splits["train"])
    if not len(train):
        raise ValueError(f"source: expected at least one example in {splits['train']}, got none")
    held_out = open_split(splits["validation"]) if "validation" in splits else NoExamples(train)
    if SECOND_SEGMENTS[config.objective] is None:
        train, held_out = WithoutPairLabels(train), WithoutPairLabels(held_out)
    return train, held_out, tokenizer, path


def _tokenizer(config: DataConfig, path: Path) -> TextTokenizer:
    if (given := given_tokenizer(config)) is not None:
        return given
    if not (path / "tokenizer").is_dir():
        raise ValueError(
            f"vocab_file: expected the vocabulary that the examples of {config.source} were made "
            f"with, because there is no folder {path / 'tokenizer'}"
        )
    return load_tokenizer(path / "tokenizer")


def _hdf5_opener(
    config: DataConfig, tokenizer: TextTokenizer, progress: bool | None
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


def _shards(config: DataConfig, check: bool) -> Callable[[Path], ExampleDataset]:
    def opener(path: Path) -> ExampleDataset:
        dataset = ShardDataset(path, config.verify, sizes=check)
        _check_longest(config, path, dataset)
        return dataset

    return opener


def _check_longest(config: DataConfig, path: Path, dataset: ExampleDataset) -> None:
    if len(dataset) and dataset.lengths.max() > config.max_seq_length:
        raise ValueError(
            f"max_seq_length: expected at least {dataset.lengths.max()}, the longest example "
            f"of {path}, got {config.max_seq_length}"
        )


def _open_prepared(
    config: DataConfig, path: Path, options: dict[str, str], check: bool
) -> tuple[ExampleDataset, ExampleDataset, TextTokenizer, Path]:
    """Opens what `python -m bert_unpad.data prepare` has written."""
    train, held_out, manifest = open_prepared(path, check, config.verify)
    if "validation" in options:
        held_out = _shards(config, check)(Path(options["validation"]).expanduser())
    settings = manifest["settings"]
    made, wanted = settings.get("objective"), SECOND_SEGMENTS[config.objective]
    if wanted is not None and made != wanted:
        raise ValueError(
            f"objective: expected one whose examples are those of {path} (second segment: {made}), "
            f"got {config.objective} ({wanted})"
        )
    if config.documents not in ("apart", settings.get("documents")):
        raise ValueError(
            f"documents: expected {settings.get('documents')}, as the examples of {path} were "
            f"made, got {config.documents}"
        )
    for dataset in (train, held_out):
        _check_longest(config, path, dataset)
    if wanted is None and made is not None:
        return WithoutPairLabels(train), WithoutPairLabels(held_out), _tokenizer(config, path), path
    return train, held_out, _tokenizer(config, path), path
