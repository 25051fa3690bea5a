"""Writes shards, see `store/shards.py`: block by block, under a temporary name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad._files import sync_file, sync_folder, write_text
from bert_unpad._full_disk import named_if_full
from bert_unpad.data.store.example_batch import Masks
from bert_unpad.data.store.manifest import MANIFEST
from bert_unpad.data.store.shards import DTYPES, FORMAT, MAX_LENGTH, MAX_VOCAB, OF_MASKS


class ShardWriter:
    """Writes a shard in blocks of examples; the folder appears when it is closed without error.

    Args:
        path: the folder to create; it must not exist.
        vocab_size: number of ids; tokens are stored as uint16 if all ids fit, else as uint32.
        unmaskable_ids: ids that are never predicted (see `TextTokenizer`).
        max_seq_length: longest allowed example, in tokens (at most 65,535).
        has_masks: whether every example comes with its masks.

    Use it as a context manager: an exception then leaves no files.

    Attributes:
        statistics: counts to note in the manifest.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int,
        unmaskable_ids: tuple[int, ...],
        max_seq_length: int,
        has_masks: bool = False,
    ) -> None:
        self.path = Path(path)
        self.has_masks = has_masks
        if self.path.exists():
            raise FileExistsError(f"path: {path} exists already; expected a new folder")
        if not 0 < max_seq_length <= MAX_LENGTH:
            raise ValueError(
                f"max_seq_length: expected 1 to {MAX_LENGTH:,} tokens, got {max_seq_length}"
            )
        if not 0 < vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size: expected 1 to {MAX_VOCAB:,}, got {vocab_size}")
        self._temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        self._temporary.mkdir(parents=True)
        self._about: dict[str, Any] = {
            "vocab_size": vocab_size,
            "unmaskable_ids": list(unmaskable_ids),
            "max_seq_length": max_seq_length,
        }
        # The first type that an array may hold takes ids up to 65,535, the last one all.
        wide = -1 if vocab_size > 65_536 else 0
        self._columns = {
            name: Column(self._temporary / f"{name}.bin", dtypes[wide])
            for name, dtypes in DTYPES.items()
            if has_masks or name not in OF_MASKS
        }
        self.statistics: dict[str, int] = {}
        self._ends = {"offsets": 0, "masked_offsets": 0}
        for name in self._ends.keys() & self._columns.keys():
            self._columns[name].append(np.zeros(1, np.int64))

    def append(
        self,
        tokens: NDArray[np.integer],
        lengths: NDArray[np.integer],
        second_starts: NDArray[np.integer],
        next_sentence_labels: NDArray[np.integer],
        masks: Masks | None = None,
    ) -> None:
        """Appends B examples: tokens [sum of lengths] end to end, the other arrays [B].

        Args:
            tokens: true ids; with `masks`, the input of the model.
            lengths: number of tokens of each example.
            second_starts, next_sentence_labels: see `Example`.
            masks: masks of these examples; needed if, and only if, the writer has `has_masks`.

        Raises:
            ValueError: sizes do not fit together, an example is empty or too long, a token is
                outside the vocabulary, a masked position is outside its example, or masks are
                missing or unexpected.
        """
        if (masks is not None) != self.has_masks:
            raise ValueError(f"masks: expected {'some' if self.has_masks else 'None'}")
        if not len(lengths) == len(second_starts) == len(next_sentence_labels):
            raise ValueError("lengths, second_starts, next_sentence_labels: expected equal sizes")
        if not len(lengths):
            return
        if lengths.sum() != len(tokens):
            raise ValueError(
                f"tokens: expected {lengths.sum()} (sum of lengths), got {len(tokens)}"
            )
        longest = self._about["max_seq_length"]
        if lengths.min() < 1 or lengths.max() > longest:
            raise ValueError(
                f"lengths: expected 1 to {longest}, got {lengths.min()} to {lengths.max()}"
            )
        if tokens.min() < 0 or tokens.max() >= self._about["vocab_size"]:
            raise ValueError(f"tokens: expected ids of 0 to {self._about['vocab_size'] - 1}")
        if masks is not None:
            masks.check(lengths, self._about["vocab_size"])
            self._append_offsets("masked_offsets", masks.counts)
            self._columns["masked_positions"].append(masks.positions)
            self._columns["masked_labels"].append(masks.labels)
        self._append_offsets("offsets", lengths)
        self._columns["lengths"].append(lengths)
        self._columns["tokens"].append(tokens)
        self._columns["second_starts"].append(second_starts)
        self._columns["next_sentence_labels"].append(next_sentence_labels)

    def _append_offsets(self, name: str, counts: NDArray[np.integer]) -> None:
        offsets = self._ends[name] + np.cumsum(counts, dtype=np.int64)
        self._ends[name] = int(offsets[-1])
        self._columns[name].append(offsets)

    def close(self) -> None:
        """Finishes the files, writes the manifest and renames the folder to its final name."""
        files = {column.path.name: column.close() for column in self._columns.values()}
        write_shard_manifest(
            self._temporary,
            {**self._about, "statistics": self.statistics},
            files,
            [self._columns["tokens"].path.name],
        )
        sync_folder(self._temporary)
        os.replace(self._temporary, self.path)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            for column in self._columns.values():
                with contextlib.suppress(OSError):  # of a full disk, which has been raised already
                    column.file.close()
            shutil.rmtree(self._temporary, ignore_errors=True)


def write_shard_manifest(
    folder: Path, about: dict[str, Any], files: dict[str, dict[str, Any]], tokens: list[str]
) -> None:
    """Writes what makes files a shard; `files` has the dtype, count and SHA-256 of each."""
    manifest = {"format": FORMAT, **about, "tokens": tokens, "files": files}
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


class Column:
    """One array file; its digest is computed while it is written."""

    def __init__(self, path: Path, dtype: type[np.integer]) -> None:
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.file = path.open("wb")
        self.count = 0
        self.digest = hashlib.sha256()

    def append(self, values: NDArray[np.integer]) -> None:
        data = np.ascontiguousarray(values, self.dtype).tobytes()
        with named_if_full(self.path):
            self.file.write(data)
        self.digest.update(data)
        self.count += len(values)

    def close(self) -> dict[str, str | int]:
        with named_if_full(self.path):
            self.file.close()
            sync_file(self.path)
        return {"dtype": self.dtype.name, "count": self.count, "sha256": self.digest.hexdigest()}
