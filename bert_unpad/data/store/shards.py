"""Examples on disk: flat memory-mapped arrays without padding, and a manifest with digests.

A shard is a folder. `tokens.bin` holds all examples end to end ([CLS] a [SEP] b [SEP], no padding),
and `offsets.bin` holds where each begins. So any batch is one gather from one array, and the ranks
of a machine share the memory. Masks are drawn again in every epoch; if the data came with masks,
three more arrays hold them. A folder is written under a temporary name and renamed when complete.
Opening it detects truncated or altered files by the sizes and SHA-256 digests in the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.store.example_batch import ExampleBatch, Masks, ragged_places
from bert_unpad.data.store.manifest import (
    MANIFEST,
    DamagedDataError,
    check_digest,
    count_of,
    read_manifest,
    write_synced,
)

FORMAT = "bert_unpad shard, version 1"
MAX_LENGTH = 65_535  # lengths are uint16
_MAX_VOCAB = 2**24  # far above any vocabulary in use
_DTYPES = {
    "tokens": (np.uint16, np.uint32),
    "offsets": (np.int64,),
    "second_starts": (np.uint16,),
    "next_sentence_labels": (np.int8,),
    "masked_offsets": (np.int64,),
    "masked_positions": (np.uint16,),
    "masked_labels": (np.uint16, np.uint32),
}
"""The arrays of a shard and their possible dtypes; not every shard has arrays of masks."""
_OF_MASKS = ("masked_offsets", "masked_positions", "masked_labels")


@dataclass(frozen=True)
class Example:
    """One sentence pair.

    Attributes:
        input_ids: int64 [length], [CLS] a [SEP] b [SEP].
        second_start: index of b's first token; `length` if there is no b. Tokens from here on have
            token type 1.
        next_sentence_label: 0 = b follows a, 1 = b is from another document, -100 = no b.
    """

    input_ids: NDArray[np.int64]
    second_start: int
    next_sentence_label: int


class ShardWriter:
    """Writes a shard in blocks of examples; the folder appears when it is closed without error.

    Args:
        path: the folder to create; it must not exist.
        vocab_size: number of ids; tokens are stored as uint16 if all ids fit, else as uint32.
        unmaskable_ids: ids that are never predicted (see `TextTokenizer`).
        max_seq_length: longest allowed example, in tokens (at most 65,535).
        has_masks: whether every example comes with its masks.

    Use it as a context manager: an exception then leaves no files.
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
        if not 0 < vocab_size <= _MAX_VOCAB:
            raise ValueError(f"vocab_size: expected 1 to {_MAX_VOCAB:,}, got {vocab_size}")
        self._temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        self._temporary.mkdir(parents=True)
        self._about = {
            "vocab_size": vocab_size,
            "unmaskable_ids": list(unmaskable_ids),
            "max_seq_length": max_seq_length,
        }
        # The first type that an array may hold takes ids up to 65,535, the last one all.
        wide = -1 if vocab_size > 65_536 else 0
        self._columns = {
            name: _Column(self._temporary / f"{name}.bin", dtypes[wide])
            for name, dtypes in _DTYPES.items()
            if has_masks or name not in _OF_MASKS
        }
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
        manifest = {"format": FORMAT, **self._about, "files": files}
        write_synced(self._temporary / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        os.replace(self._temporary, self.path)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        for column in self._columns.values():
            column.file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


class _Column:
    """One array file; its digest is computed while it is written."""

    def __init__(self, path: Path, dtype: type[np.integer]) -> None:
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.file = path.open("wb")
        self.count = 0
        self.digest = hashlib.sha256()

    def append(self, values: NDArray[np.integer]) -> None:
        data = np.ascontiguousarray(values, self.dtype).tobytes()
        self.file.write(data)
        self.digest.update(data)
        self.count += len(values)

    def close(self) -> dict[str, str | int]:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {"dtype": self.dtype.name, "count": self.count, "sha256": self.digest.hexdigest()}


class ShardDataset:
    """A shard opened for reading; its arrays are memory-mapped, so opening costs no memory.

    Args:
        path: the folder a `ShardWriter` made.
        verify: read every file and compare its digest. Without it only sizes and offsets are
            checked, which finds truncation but not altered bytes.

    Attributes:
        lengths: uint16 [N], tokens of each example.
        tokens: uint16 or uint32 [total], all examples end to end.
        offsets: int64 [N + 1], example i is tokens[offsets[i] : offsets[i + 1]].
        second_starts: uint16 [N], index within the example where the second segment begins.
        next_sentence_labels: int8 [N], 0 = is next, 1 = random, -100 = none.
        masked_offsets, masked_positions, masked_labels: int64 [N + 1], and of each masked token its
            place within the example and true id; only if `has_masks`.
        vocab_size, unmaskable_ids, max_seq_length, has_masks: as given to the writer.

    Raises:
        DamagedDataError: a file is missing, truncated or altered; the message names it and says
            what was expected. Reading may raise it too: examples are checked when they are read.
    """

    def __init__(self, path: str | Path, verify: bool = True) -> None:
        self.path = Path(path)
        manifest = read_manifest(self.path / MANIFEST, FORMAT)
        try:
            files = manifest["files"]
            self.vocab_size = count_of(manifest, "vocab_size", _MAX_VOCAB)
            ids = dict(enumerate(manifest["unmaskable_ids"]))
            self.unmaskable_ids = tuple(count_of(ids, i, self.vocab_size - 1) for i in ids)
            self.max_seq_length = count_of(manifest, "max_seq_length", MAX_LENGTH)
            self.has_masks = "masked_offsets.bin" in files
            self.tokens = self._map(files, "tokens", verify)
            self.offsets = self._map(files, "offsets", verify)
            self.second_starts = self._map(files, "second_starts", verify)
            self.next_sentence_labels = self._map(files, "next_sentence_labels", verify)
            if self.has_masks:
                self.masked_offsets = self._map(files, "masked_offsets", verify)
                self.masked_positions = self._map(files, "masked_positions", verify)
                self.masked_labels = self._map(files, "masked_labels", verify)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedDataError(
                f"{self.path / MANIFEST} is damaged; expected an entry for {error}"
            ) from error
        lengths = np.diff(self.offsets)
        if (
            not len(self.offsets)
            or self.offsets[0] != 0
            or self.offsets[-1] != len(self.tokens)
            or (len(lengths) and not 1 <= lengths.min() <= lengths.max() <= self.max_seq_length)
            or not len(lengths) == len(self.second_starts) == len(self.next_sentence_labels)
        ):
            raise DamagedDataError(
                f"{self.path / 'offsets.bin'} is damaged: expected offsets that rise from 0 to "
                f"{len(self.tokens)} by 1 to {self.max_seq_length}, one more than examples"
            )
        self.lengths = lengths.astype(np.uint16)
        if (self.second_starts > self.lengths).any():
            raise DamagedDataError(
                f"{self.path / 'second_starts.bin'} is damaged: expected places within the examples"
            )
        if not np.isin(self.next_sentence_labels, (0, 1, -100)).all():
            raise DamagedDataError(
                f"{self.path / 'next_sentence_labels.bin'} is damaged: expected 0, 1 or -100"
            )
        if self.has_masks and (
            len(self.masked_offsets) != len(self.offsets)
            or self.masked_offsets[0] != 0
            or self.masked_offsets[-1] != len(self.masked_positions)
            or len(self.masked_positions) != len(self.masked_labels)
            or (self.masked_offsets[1:] < self.masked_offsets[:-1]).any()
        ):
            raise DamagedDataError(
                f"{self.path / 'masked_offsets.bin'} is damaged: expected offsets that rise from 0 "
                f"to {len(self.masked_positions)}, one more than examples"
            )

    def _map(self, files: dict, name: str, verify: bool) -> NDArray:
        path = self.path / f"{name}.bin"
        about = files[path.name]
        names = [np.dtype(dtype).name for dtype in _DTYPES[name]]
        if about["dtype"] not in names:
            raise ValueError(f"dtype: {' or '.join(names)} of {path.name}, got {about['dtype']!r}")
        dtype = np.dtype(about["dtype"]).newbyteorder("<")
        expected = count_of(about, "count", 2**60) * dtype.itemsize
        found = path.stat().st_size if path.exists() else None
        if found != expected:
            state = "is missing" if found is None else f"has {found:,} bytes"
            raise DamagedDataError(f"{path} {state}; expected {expected:,} bytes")
        if verify:
            check_digest(path, about["sha256"])
        if not expected:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype, mode="r").view(np.ndarray)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index: expected {-len(self)} to {len(self) - 1}, got {index}")
        index = int(index) % len(self)
        span = slice(self.offsets[index], self.offsets[index + 1])
        return Example(
            self._checked(self.tokens[span], "tokens").astype(np.int64),
            int(self.second_starts[index]),
            int(self.next_sentence_labels[index]),
        )

    def _checked(self, ids: NDArray, name: str) -> NDArray:
        """Returns ids after checking them: a wrong id would be an index outside a table."""
        if len(ids) and ids.max() >= self.vocab_size:
            raise DamagedDataError(
                f"{self.path / name}.bin is damaged: expected ids of 0 to {self.vocab_size - 1}, "
                f"got {ids.max()}"
            )
        return ids

    def batch(self, indices: NDArray[np.integer]) -> ExampleBatch:
        """Reads several examples in one operation; their ids are their indices in the shard.

        Args:
            indices: indices [B], 0 to len - 1.
        """
        indices = np.asarray(indices, np.int64)
        lengths = self.lengths[indices].astype(np.int64)
        masks = None
        if self.has_masks:
            begins = self.masked_offsets[indices]
            counts = self.masked_offsets[indices + 1] - begins
            places = ragged_places(begins, counts)
            masks = Masks(
                counts,
                self.masked_positions[places].astype(np.int64),
                self.masked_labels[places].astype(np.int64),
            )
            try:
                masks.check(lengths, self.vocab_size)
            except ValueError as error:
                raise DamagedDataError(f"{self.path} is damaged: {error}") from error
        tokens = self.tokens[ragged_places(self.offsets[indices], lengths)]
        return ExampleBatch(
            indices,
            lengths,
            self.second_starts[indices].astype(np.int64),
            self.next_sentence_labels[indices].astype(np.int64),
            self._checked(tokens, "tokens"),
            masks,
        )

    def target_counts(self) -> NDArray[np.int64]:
        """See `ExampleDataset`."""
        name = "masked_labels" if self.has_masks else "tokens"
        ids = getattr(self, name)
        counts = np.zeros(self.vocab_size, np.int64)
        for begin in range(0, len(ids), 1 << 24):  # in pieces: bincount makes int64 of its input
            piece = self._checked(ids[begin : begin + (1 << 24)], name)
            counts += np.bincount(piece, minlength=len(counts))
        counts[list(self.unmaskable_ids)] = 0
        return counts

    @property
    def fill(self) -> float:
        """The share of real tokens if every example were padded to `max_seq_length`."""
        return len(self.tokens) / (len(self) * self.max_seq_length) if len(self) else 0.0

    def __reduce__(self) -> tuple[Callable[..., ShardDataset], tuple[Path, bool]]:
        # Pickled by its path: a spawned worker maps the same pages instead of receiving a copy.
        return ShardDataset, (self.path, False)
