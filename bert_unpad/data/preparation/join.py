"""The last stage: joins the shards of all blocks to one, and makes the folder complete.

Joining copies the small columns, which have some bytes an example, and moves the files of tokens.
"""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bert_unpad._files import read_json_object, sync_folder
from bert_unpad.data.objective import SECOND_SEGMENTS
from bert_unpad.data.preparation.build import ABOUT, Build, open_build
from bert_unpad.data.preparation.locks import LOCK, build_lock
from bert_unpad.data.preparation.parts import to_run
from bert_unpad.data.prepared import SPLITS, is_prepared, read_prepared, write_prepared
from bert_unpad.data.store.manifest import MANIFEST
from bert_unpad.data.store.shard_writer import Column, write_shard_manifest
from bert_unpad.data.store.shards import AT_ONCE, ShardDataset

logger = logging.getLogger(__name__)

_COLUMNS = (
    *("lengths", "second_starts", "next_sentence_labels"),
    *("masked_positions", "masked_labels"),
)
_OFFSETS = ("offsets", "masked_offsets")
_SHOWN = 8  # missing blocks that a message names
_FEW_RANDOM = 0.25  # of the pairs; the next sentence is then easily guessed


def join_parts(folder: Path) -> dict[str, int]:
    """Puts all parts together, and removes what is no longer needed.

    Goes on where an earlier call was killed; does nothing if the folder is complete.

    Returns:
        Counts of documents, duplicates, examples and tokens.

    Raises:
        BlockingIOError: another process works on the parts.
        DamagedDataError: the folder is complete, and a file is missing or was altered.
        ValueError: the folder has no preparation, parts have not finished, or no text had tokens.
    """
    if not (folder / "work" / LOCK).exists():  # nothing to join, or all but `work` is removed
        return join_pieces(folder)
    with build_lock(folder / "work", alone=True):
        return join_pieces(folder)


def join_pieces(folder: Path) -> dict[str, int]:
    """See `join_parts`; for a process that has the lock."""
    if is_prepared(folder):
        statistics = read_prepared(folder)["statistics"]
        remove_work(folder)
        return statistics
    build, about = open_build(folder)
    corpus, source = build.corpus(), about["source"]
    if corpus is None:
        left = to_run(build.work, list(build.not_read()) or [0])  # the first one plans
        raise ValueError(
            f"output: expected parts that have read all of {source} in {folder}; run {left} to the "
            "end"
        )
    statistics = {"documents": corpus.documents, "duplicates": corpus.duplicates}
    for split in SPLITS:
        count = build.pieces(split, corpus.blocks)
        missing = missing_pieces(build, split, count)
        if missing:
            names = ", ".join(str(number) for number in missing[:_SHOWN])
            raise ValueError(
                f"output: expected {count} finished blocks of {split} in {folder}; missing: "
                f"{names}{', ...' if len(missing) > _SHOWN else ''}; run "
                f"{to_run(build.work, missing)} to the end"
            )
    for split in SPLITS:
        count = build.pieces(split, corpus.blocks)
        join_split(folder, split, [build.piece(split, number) for number in range(count)])
        statistics |= count_split(folder, split)
    if not statistics["train_documents"]:
        raise ValueError(
            f"source: {source} holds no text that the tokenizer knows; expected at least one word"
        )
    _check_labels(folder, source, about)
    settings = {name: value for name, value in about.items() if name not in ("source", "content")}
    write_prepared(
        folder,
        source=source,
        settings={**settings, "corpus": corpus.digest},
        statistics=statistics,
        tokenizer_files=build.tokenizer().files,
    )
    sync_folder(folder)
    remove_work(folder)
    return statistics


def _check_labels(folder: Path, source: str, about: dict[str, Any]) -> None:
    """Warns of pairs that hardly ever have a random second segment."""
    if about["objective"] != SECOND_SEGMENTS["mlm_nsp"]:
        return
    labels = ShardDataset(folder / "train", verify=False).next_sentence_labels
    random = sum(
        np.count_nonzero(labels[begin : begin + AT_ONCE] == 1)
        for begin in range(0, len(labels), AT_ONCE)
    )
    share = random / len(labels)
    if share < _FEW_RANDOM:
        logger.warning(
            "%s: only %.0f %% of the pairs have a random second segment, instead of about half, as "
            "most blocks of text are one document: does a blank line end each document?",
            *(source, 100 * share),
        )


def remove_work(folder: Path) -> None:
    """Deletes the intermediate files of a preparation; a `work` of anything else stays.

    What tells it apart goes last, so that a later call can go on where this one is killed.
    """
    work = folder / "work"
    if not (work / ABOUT).is_file():
        return
    for other in work.iterdir():
        if other.is_dir():
            shutil.rmtree(other, ignore_errors=True)
        elif other.name not in (ABOUT, LOCK):
            other.unlink(missing_ok=True)
    (work / LOCK).unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)


def missing_pieces(build: Build, split: str, count: int) -> list[int]:
    """The pieces of a split that are still to be made."""
    if (build.folder / split).exists():
        return []
    return [number for number in range(count) if not build.piece(split, number).exists()]


def join_split(folder: Path, split: str, pieces: Sequence[Path]) -> None:
    """Makes one shard of all pieces of a split; goes on where an earlier call was killed.

    Args:
        folder: where the shard appears, and `work` is.
        split: name of the shard.
        pieces: finished shards in `work`, one or more, in the order of their examples. Their files
            of tokens are moved.
    """
    final = folder / split
    if final.exists():
        return
    joined = folder / "work" / f"{split}.joined"
    joined.mkdir(exist_ok=True)
    for left in joined.glob(".*.tmp"):  # where the call before was killed
        left.unlink()
    manifests = [read_json_object(piece / MANIFEST) for piece in pieces]
    has = {name.removesuffix(".bin") for name in manifests[0]["files"]}
    files = {
        f"{name}.bin": _join_column(joined, pieces, manifests, name)
        for name in _COLUMNS
        if name in has
    }
    files |= {
        f"{name}.bin": _join_offsets(joined, pieces, name) for name in _OFFSETS if name in has
    }
    tokens = []
    some = [n for n in range(len(pieces)) if manifests[n]["files"]["tokens.bin"]["count"]] or [0]
    for number in some:
        name = f"tokens-{number:06}.bin"
        if not (joined / name).exists():
            os.rename(pieces[number] / "tokens.bin", joined / name)
        files[name] = manifests[number]["files"]["tokens.bin"]
        tokens.append(name)
    first = manifests[0]
    about = {name: first[name] for name in ("vocab_size", "unmaskable_ids", "max_seq_length")}
    counted: Counter[str] = Counter()
    for manifest in manifests:
        counted.update(manifest["statistics"])
    about["statistics"] = dict(counted)
    write_shard_manifest(joined, about, files, tokens)
    sync_folder(joined)
    os.rename(joined, final)


def _join_column(
    joined: Path, pieces: Sequence[Path], manifests: list[dict[str, Any]], name: str
) -> dict[str, Any]:
    dtype = np.dtype(manifests[0]["files"][f"{name}.bin"]["dtype"])
    column = Column(joined / f"{name}.bin", dtype)
    for piece in pieces:
        column.append(np.fromfile(piece / f"{name}.bin", dtype.newbyteorder("<")))
    return column.close()


def _join_offsets(joined: Path, pieces: Sequence[Path], name: str) -> dict[str, Any]:
    column = Column(joined / f"{name}.bin", np.int64)
    column.append(np.zeros(1, np.int64))
    end = 0
    for piece in pieces:
        offsets = np.fromfile(piece / f"{name}.bin", "<i8")
        column.append(offsets[1:] + end)
        end += int(offsets[-1])
    return column.close()


def count_split(folder: Path, split: str) -> dict[str, int]:
    """Returns the numbers of examples and tokens of a finished split, and what its pieces noted."""
    dataset = ShardDataset(folder / split, verify=False)
    counts = {**dataset.statistics, "examples": len(dataset), "tokens": dataset.num_tokens}
    return {f"{split}_{name}": count for name, count in counts.items()}
