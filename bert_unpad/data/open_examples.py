"""Opens sources of examples: `shards:PATH[?validation=PATH]`.

PATH is a folder that `python -m bert_unpad.data prepare` or `import` has written, or a folder of
shards, `train` and perhaps `validation` and `tokenizer`, or a shard. No text is prepared. The
vocabulary is that of the `tokenizer` folder, unless `vocab_file` or `tokenizer` names one.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl

from bert_unpad.data.config import DataConfig
from bert_unpad.data.formats import refuse_foreign_files
from bert_unpad.data.objective import SECOND_SEGMENTS
from bert_unpad.data.prepared import SHARDS, is_prepared, open_prepared
from bert_unpad.data.store.dataset import ExampleDataset, NoExamples, WithoutPairLabels
from bert_unpad.data.store.manifest import MANIFEST
from bert_unpad.data.store.shards import ShardDataset
from bert_unpad.data.text.json_tokenizer import tokenizer_beside
from bert_unpad.data.text.tokenizer import TextTokenizer


def open_examples(
    config: DataConfig, check: bool = True
) -> tuple[ExampleDataset, ExampleDataset, TextTokenizer, Path]:
    """Opens the examples that `config.source` names.

    Args:
        config: the source; `objective`, `vocab_file`, `tokenizer`, `lowercase`, `max_seq_length`
            and `verify` are read too.
        check: whether to compare manifests, file sizes and lengths.

    Returns:
        Training examples, held-out examples (perhaps none), the tokenizer, and the folder.

    Raises:
        DamagedDataError: a file is damaged or wrong; the message names it.
        FileNotFoundError: a path does not exist.
        ValueError: an option is unknown, the vocabulary is missing, an example is longer than
            `max_seq_length`, the objective needs other examples, or the files have another format.
    """
    path, held_out_path = _paths(config.source)
    if not path.exists():
        raise FileNotFoundError(f"source: {path} does not exist; expected a folder of shards")
    if is_prepared(path):
        train, held_out, pairs = _open_prepared(config, path, check)
    else:
        _check_objective(config)
        folder = path / "train" if (path / "train").is_dir() else path
        if not (folder / MANIFEST).exists():
            refuse_foreign_files(path, config.import_command)
        train, pairs = ShardDataset(folder, config.verify, sizes=check), True
        if not len(train):
            raise ValueError(f"source: expected at least one example in {folder}, got none")
        held_out = NoExamples(train)
        if held_out_path is None and (path / "validation").is_dir():
            held_out_path = path / "validation"
    tokenizer = config.given_tokenizer() or tokenizer_beside(path)
    if held_out_path is not None:
        held_out = ShardDataset(held_out_path, config.verify, sizes=check)
    for dataset in (train, held_out) if check else ():
        if len(dataset) and dataset.lengths.max() > config.max_seq_length:
            raise ValueError(
                f"max_seq_length: expected at least {dataset.lengths.max()}, the longest example "
                f"of {path}, got {config.max_seq_length}"
            )
    if SECOND_SEGMENTS[config.objective] is None and pairs:
        train, held_out = WithoutPairLabels(train), WithoutPairLabels(held_out)
    return train, held_out, tokenizer, path


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


def _check_objective(config: DataConfig) -> None:
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


def _open_prepared(
    config: DataConfig, path: Path, check: bool
) -> tuple[ExampleDataset, ExampleDataset, bool]:
    """Opens what `python -m bert_unpad.data prepare` or `import` has written.

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
    return train, held_out, made is not None
