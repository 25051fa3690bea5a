"""Opens sources that hold finished examples or token ids, in the formats of `data.readers`.

    FORMAT:PATH[?validation=PATH&...]      examples:PATH, whose format the files' names say

PATH is a folder that holds `train` and perhaps `validation` and `tokenizer` (as converters and
`python -m bert_unpad.data prepare` write it), or the training examples: a file or a folder of
files. No text is prepared. The vocabulary is that of the `tokenizer` folder, unless `vocab_file` or
`tokenizer` names one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from bert_unpad.data.objective import SECOND_SEGMENTS
from bert_unpad.data.readers import DETECT, READERS, Setting, detect, open_split
from bert_unpad.data.readers.shards import check_longest
from bert_unpad.data.store.cache import chosen_cache_dir
from bert_unpad.data.store.dataset import ExampleDataset, NoExamples, WithoutPairLabels
from bert_unpad.data.store.prepared import is_prepared, open_prepared
from bert_unpad.data.text.json_tokenizer import given_tokenizer, load_tokenizer
from bert_unpad.data.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from bert_unpad.data.config import DataConfig


def holds_examples(source: str) -> bool:
    """Whether a `DataConfig.source` names finished examples or token ids."""
    return source.partition(":")[0] in (*READERS, DETECT) and ":" in source


def open_examples(
    config: DataConfig, progress: bool | None = None, check: bool = True
) -> tuple[ExampleDataset, ExampleDataset, TextTokenizer, Path]:
    """Opens the examples that `config.source` names.

    Args:
        config: the source; `objective`, `vocab_file`, `lowercase`, `max_seq_length`, `cache_dir`
            and `verify` are read too.
        progress: whether indexing files shows a bar; None shows it if stderr is a terminal.
        check: whether to compare the manifests, file sizes and lengths of shards.

    Returns:
        Training examples, held-out examples (perhaps none), the tokenizer, and the folder.

    Raises:
        DamagedDataError: a file is damaged or wrong; the message names it.
        FileNotFoundError: a path does not exist.
        ImportError: a package that reads the files is not installed.
        ValueError: an option is unknown, the vocabulary is missing, an example is longer than
            `max_seq_length`, or the objective needs other examples.
    """
    kind, _, specification = config.source.partition(":")
    text, _, query = specification.partition("?")
    path = Path(text).expanduser()
    if kind == DETECT and text:
        _check_exists(path)
        kind = detect(path)
    options = _options(config.source, kind, text, query)
    prepared = None
    if kind == "shards" and is_prepared(path):
        prepared = _open_prepared(config, path, check)
    else:
        _check_objective(config, kind)
        _check_exists(path)
    tokenizer = _tokenizer(config, path)
    held_out_path = options.pop("validation", None)
    setting = Setting(
        vocab_size=tokenizer.vocab_size,
        unmaskable_ids=tokenizer.unmaskable_ids,
        cls_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        pad_id=tokenizer.pad_id,
        max_seq_length=config.max_seq_length,
        cache_dir=chosen_cache_dir(config.cache_dir),
        verify=config.verify,
        check=check,
        progress=progress,
        options=options,
    )
    validation = path / "validation" if held_out_path is None else Path(held_out_path).expanduser()
    if prepared is not None:
        train, held_out, pairs = prepared
    else:
        folder = path / "train" if (path / "train").is_dir() else path
        train = open_split(kind, folder, dataclasses.replace(setting, without=validation))
        if not len(train):
            raise ValueError(f"source: expected at least one example in {folder}, got none")
        held_out, pairs = NoExamples(train), READERS[kind].finished
    if held_out_path is not None or (prepared is None and validation.is_dir()):
        held_out = open_split(kind, validation, setting)
    if SECOND_SEGMENTS[config.objective] is None and pairs:
        train, held_out = WithoutPairLabels(train), WithoutPairLabels(held_out)
    return train, held_out, tokenizer, path


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"source: {path} does not exist; expected a file or folder")


def _check_objective(config: DataConfig, kind: str) -> None:
    if config.documents != "apart":
        raise ValueError(
            f"documents: expected apart with source {kind}:, whose examples are made already, got "
            f"{config.documents}"
        )
    finished = READERS[kind].finished
    if config.objective == "mlm_sop" or (config.objective == "mlm_nsp" and not finished):
        wanted = "mlm_nsp, mlm or rtd" if finished else "mlm or rtd"
        raise ValueError(
            f"objective: expected {wanted} with source {kind}:, whose examples are made already, "
            f"got {config.objective}"
        )


def _options(source: str, kind: str, path: str, query: str) -> dict[str, str]:
    """Returns the options of a source, after checking them.

    Raises:
        ValueError: the source has no path, or an option or its value is unknown.
    """
    known: dict[str, tuple[str, ...]] = {"validation": ("PATH",)}
    if kind != DETECT:
        known |= READERS[kind].options
    options = dict(parse_qsl(query, keep_blank_values=True))
    wrong = set(options) - set(known) or {
        name for name, value in options.items() if len(known[name]) > 1 and value not in known[name]
    }
    if not path or wrong:
        forms = "&".join(f"{name}={'|'.join(values)}" for name, values in known.items())
        raise ValueError(f"source: expected {kind}:PATH or {kind}:PATH?{forms}, got {source!r}")
    return options


def _tokenizer(config: DataConfig, path: Path) -> TextTokenizer:
    if (given := given_tokenizer(config)) is not None:
        return given
    if not (path / "tokenizer").is_dir():
        raise ValueError(
            f"vocab_file: expected the vocabulary that the examples of {config.source} were made "
            f"with, because there is no folder {path / 'tokenizer'}"
        )
    return load_tokenizer(path / "tokenizer")


def _open_prepared(
    config: DataConfig, path: Path, check: bool
) -> tuple[ExampleDataset, ExampleDataset, bool]:
    """Opens what `python -m bert_unpad.data prepare` has written.

    Returns:
        Training and held-out examples, and whether these are pairs of segments.
    """
    train, held_out, manifest = open_prepared(path, check, config.verify)
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
    for dataset in (train, held_out) if check else ():
        check_longest(dataset, path, config.max_seq_length)
    return train, held_out, made is not None
