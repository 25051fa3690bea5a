"""Imports files of other formats to shards: once, in parallel, a piece for each file.

The pieces are joined at the end, as those of a preparation are. What was killed goes on with the
same command: finished pieces are kept.
"""

import hashlib
import json
from pathlib import Path

from tqdm import tqdm

from bert_unpad._files import sync_folder
from bert_unpad._full_disk import named_if_full
from bert_unpad.data.formats import FORMATS, ForeignSource, Setting, load_format
from bert_unpad.data.objective import SECOND_SEGMENTS
from bert_unpad.data.preparation.build import begin_work, check_settings
from bert_unpad.data.preparation.engines import Engine
from bert_unpad.data.preparation.join import count_split, join_split, remove_work
from bert_unpad.data.preparation.locks import build_lock
from bert_unpad.data.prepared import SPLITS, is_prepared, read_prepared, write_prepared
from bert_unpad.data.store.shard_writer import ShardWriter
from bert_unpad.data.text.json_tokenizer import tokenizer_beside
from bert_unpad.data.text.tokenizer import TextTokenizer


def import_piece(
    kind: str, file: Path | None, shard: Path, setting: Setting, unmask: bool
) -> dict[str, int]:
    """Writes the examples of a file as a shard; None makes one without examples."""
    with ShardWriter(
        shard,
        vocab_size=setting.vocab_size,
        unmaskable_ids=setting.unmaskable_ids,
        max_seq_length=setting.max_seq_length,
        has_masks=FORMATS[kind].finished and not unmask,
    ) as writer:
        for batch in () if file is None else load_format(kind).examples(file, setting):
            writer.append(
                batch.true_tokens() if unmask else batch.tokens,
                batch.lengths,
                batch.second_starts,
                batch.next_sentence_labels,
                None if unmask else batch.masks,
            )
    return {"bytes": _size(kind, file)}


def _size(kind: str, file: Path | None) -> int:
    return sum(path.stat().st_size for path in _read_with(kind, file)) if file else 0


def _read_with(kind: str, file: Path) -> list[Path]:
    """A file, and the one beside it that is read with it."""
    beside = file.with_suffix(FORMATS[kind].beside or file.suffix)
    return [file, beside] if beside != file and beside.exists() else [file]


def import_data(
    source: str,
    output: Path,
    engine: Engine,
    *,
    max_seq_length: int,
    tokenizer: TextTokenizer | None = None,
    unmask: bool = False,
    progress: bool | None = None,
) -> dict[str, int]:
    """Imports a source to a folder that `shards:OUTPUT` opens.

    Args:
        source: `FORMAT:PATH?...`, see `bert_unpad.data.formats`.
        output: the folder to make.
        engine: runs the jobs.
        max_seq_length: longest allowed example, in tokens.
        tokenizer: that of the examples; None takes the one in the folder `tokenizer` of the source.
        unmask: store the true tokens of examples that come with masks.
        progress: whether to show a bar; None shows it if stderr is a terminal.

    Returns:
        Counts of examples and tokens of each split.

    Raises:
        BlockingIOError: another process is at work in the folder.
        DamagedDataError: a file is damaged or wrong; the message names it.
        FileNotFoundError: there are no files at a path.
        ImportError: a package that reads the files is not installed.
        ValueError: an option does not fit the files, the vocabulary is missing, an example is too
            long, or the folder has other files, or work that was begun with something else.
    """
    foreign = ForeignSource.parse(source)
    _check_outside(output, foreign)
    tokenizer = tokenizer or tokenizer_beside(foreign.path)
    files = dict(zip(SPLITS, foreign.files(), strict=True))
    about = {
        "source": source,
        "content": _content(foreign.kind, files),
        "format": foreign.kind,
        "options": dict(foreign.options),
        "max_seq_length": max_seq_length,
        "unmask": unmask,
        "tokenizer": tokenizer.identity(),
        "objective": SECOND_SEGMENTS["mlm_nsp" if FORMATS[foreign.kind].finished else "mlm"],
        "documents": "apart",
    }
    if is_prepared(output):
        manifest = read_prepared(output)
        check_settings(output, {"source": source, **manifest["settings"]}, about)
        remove_work(output)
        return manifest["statistics"]
    begin_work(output, about)
    setting = Setting(
        tokenizer.vocab_size,
        tokenizer.unmaskable_ids,
        tokenizer.cls_id,
        tokenizer.sep_id,
        tokenizer.pad_id,
        max_seq_length,
        foreign.options,
    )
    pieces = {
        split: [
            (foreign.kind, file, output / "work" / split / f"{number:06}", setting, unmask)
            for number, file in enumerate(files[split] or [None])
        ]
        for split in SPLITS
    }
    with named_if_full(output), build_lock(output / "work", alone=True):
        _write_pieces(output, pieces, engine, progress)
        if _content(foreign.kind, files) != about["content"]:
            raise ValueError(
                f"source: expected files of {source} that stay as they are while they are read, "
                f"but some have changed; remove {output} and begin again"
            )
        statistics: dict[str, int] = {}
        for split in SPLITS:
            join_split(output, split, [shard for _, _, shard, *_ in pieces[split]])
            statistics |= count_split(output, split)
        if not statistics["train_examples"]:
            raise ValueError(f"source: expected at least one example in {source}, got none")
        tokenizer.save(output / "tokenizer")
        write_prepared(
            output,
            source=source,
            settings={name: value for name, value in about.items() if name != "source"},
            statistics=statistics,
            tokenizer_files=tokenizer.files,
        )
        sync_folder(output)
        remove_work(output)
    return statistics


def _write_pieces(
    output: Path, pieces: dict[str, list[tuple]], engine: Engine, progress: bool | None
) -> None:
    left = [
        piece
        for split in SPLITS
        if not (output / split).exists()
        for piece in pieces[split]
        if not piece[2].exists()
    ]
    total = sum(_size(kind, file) for kind, file, *_ in left)
    disable = None if progress is None else not progress
    options = {"unit": "B", "unit_scale": True, "disable": disable, "leave": False}
    with tqdm(desc="importing", total=total, **options) as bar:
        for done in engine.run(import_piece, left):
            bar.update(done["bytes"])


def _check_outside(output: Path, foreign: ForeignSource) -> None:
    place = output.resolve()
    for path in (foreign.path, foreign.held_out or foreign.path):
        if path.resolve() in (place, *place.parents):
            raise ValueError(
                f"output: expected a folder outside of {path}, whose files are read, got {output}"
            )


def _content(kind: str, files: dict[str, list[Path]]) -> str:
    """Changes when a file does: a digest of paths, sizes and times."""
    about = [
        [split, str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
        for split in SPLITS
        for file in files[split]
        for path in _read_with(kind, file)
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()
