"""Examples on disk: flat memory-mapped arrays of true lengths, with a manifest that proves them.

A shard is a folder. `tokens.bin` holds all examples end to end ([CLS] a [SEP] b [SEP], no padding),
`offsets.bin` where each begins, so any batch is one gather from one array, and ranks on a machine
share the pages. Masks are drawn anew in every epoch, unless the shard was made of data that brings
its own: three more arrays then hold them. A folder appears under its name only when complete
(written aside, then renamed), and the manifest's sizes and SHA-256 digests tell a truncated or
altered file when it is opened.
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
from bert_unpad.data.text.sources import file_sha256

MANIFEST = "manifest.json"
FORMAT = "bert_unpad shard, version 1"
MAX_LENGTH = 65_535  # lengths are uint16


class DamagedDataError(RuntimeError):
    """A file of prepared data is missing, truncated or altered."""


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
    """Writes a shard a block of examples at a time; the folder appears on a clean close.

    Args:
        path: the folder to make; must not exist yet.
        vocab_size: number of ids; tokens are stored as uint16 if all ids fit, else as uint32.
        unmaskable_ids: ids that are never predicted (see `WordPieceTokenizer`).
        max_seq_length: longest allowed example, in tokens (at most 65,535).
        has_masks: whether every example comes with its masks.

    Use it as a context manager: on an exception nothing is left behind.
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
        self._temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        self._temporary.mkdir(parents=True)
        self._about = {
            "vocab_size": vocab_size,
            "unmaskable_ids": list(unmaskable_ids),
            "max_seq_length": max_seq_length,
        }
        token_dtype = np.uint16 if vocab_size <= 65_536 else np.uint32
        dtypes = {
            "tokens": token_dtype,
            "offsets": np.int64,
            "second_starts": np.uint16,
            "next_sentence_labels": np.int8,
        }
        if has_masks:
            dtypes |= {
                "masked_offsets": np.int64,
                "masked_positions": np.uint16,
                "masked_labels": token_dtype,
            }
        self._columns = {
            name: _Column(self._temporary / f"{name}.bin", dtype) for name, dtype in dtypes.items()
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
        """Add B examples: tokens [sum of lengths] end to end, the others [B].

        Args:
            tokens: true ids; with `masks`, what the model is to see.
            lengths: tokens of each example.
            second_starts, next_sentence_labels: see `Example`.
            masks: of these examples, if the writer was made with `has_masks`.

        Raises:
            ValueError: sizes that do not fit together, an example that is empty or too long, a
                token outside the vocabulary, a masked position outside its example, or masks that
                are missing or not expected.
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
        """Finish the files, write the manifest and give the folder its name."""
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
    """One array file, hashed while it is written."""

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


def write_synced(path: Path, text: str) -> None:
    """Write text and wait until it is on the disk (a rename may otherwise outlive its content)."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path, expected_format: str) -> dict:
    """Read a JSON manifest of a given format.

    Raises:
        DamagedDataError: it is missing, no JSON, or of another format.
    """
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise DamagedDataError(f"{path} is missing; expected the manifest of this data") from error
    except ValueError as error:
        raise DamagedDataError(f"{path} is damaged; expected JSON ({error})") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != expected_format:
        raise DamagedDataError(f"{path}: expected format {expected_format!r}, found {found!r}")
    return manifest


def check_digest(path: Path, expected: str) -> None:
    """Raise DamagedDataError, naming the file, unless its SHA-256 is `expected`."""
    try:
        found = file_sha256(path)
    except FileNotFoundError as error:
        raise DamagedDataError(f"{path} is missing; expected SHA-256 {expected}") from error
    if found != expected:
        raise DamagedDataError(f"{path} was altered: expected SHA-256 {expected}, found {found}")


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
            what was expected.
    """

    def __init__(self, path: str | Path, verify: bool = True) -> None:
        self.path = Path(path)
        manifest = read_manifest(self.path / MANIFEST, FORMAT)
        try:
            files = manifest["files"]
            self.vocab_size = int(manifest["vocab_size"])
            self.unmaskable_ids = tuple(manifest["unmaskable_ids"])
            self.max_seq_length = int(manifest["max_seq_length"])
            self.tokens = self._map(files, "tokens.bin", verify)
            self.offsets = self._map(files, "offsets.bin", verify)
            self.second_starts = self._map(files, "second_starts.bin", verify)
            self.next_sentence_labels = self._map(files, "next_sentence_labels.bin", verify)
            self.has_masks = "masked_offsets.bin" in files
            if self.has_masks:
                self.masked_offsets = self._map(files, "masked_offsets.bin", verify)
                self.masked_positions = self._map(files, "masked_positions.bin", verify)
                self.masked_labels = self._map(files, "masked_labels.bin", verify)
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
        if self.has_masks and (
            len(self.masked_offsets) != len(self.offsets)
            or self.masked_offsets[0] != 0
            or self.masked_offsets[-1] != len(self.masked_positions)
            or len(self.masked_positions) != len(self.masked_labels)
            or (np.diff(self.masked_offsets) < 0).any()
        ):
            raise DamagedDataError(
                f"{self.path / 'masked_offsets.bin'} is damaged: expected offsets that rise from 0 "
                f"to {len(self.masked_positions)}, one more than examples"
            )

    def _map(self, files: dict, name: str, verify: bool) -> NDArray:
        path, about = self.path / name, files[name]
        dtype = np.dtype(about["dtype"]).newbyteorder("<")
        expected = about["count"] * dtype.itemsize
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
            self.tokens[span].astype(np.int64),
            int(self.second_starts[index]),
            int(self.next_sentence_labels[index]),
        )

    def batch(self, indices: NDArray[np.integer]) -> ExampleBatch:
        """Several examples, read in one operation; their ids are their places in the shard.

        Args:
            indices: [B], 0 to len - 1 each.
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
        return ExampleBatch(
            indices,
            lengths,
            self.second_starts[indices].astype(np.int64),
            self.next_sentence_labels[indices].astype(np.int64),
            self.tokens[ragged_places(self.offsets[indices], lengths)],
            masks,
        )

    def target_counts(self) -> NDArray[np.int64]:
        """See `ExampleDataset`."""
        ids = self.masked_labels if self.has_masks else self.tokens
        counts = np.zeros(self.vocab_size, np.int64)
        for begin in range(0, len(ids), 1 << 24):  # in pieces: bincount makes int64 of its input
            counts += np.bincount(ids[begin : begin + (1 << 24)], minlength=len(counts))
        counts[list(self.unmaskable_ids)] = 0
        return counts

    @property
    def fill(self) -> float:
        """Share of real tokens if every example were padded to `max_seq_length`."""
        return len(self.tokens) / (len(self) * self.max_seq_length) if len(self) else 0.0

    def __reduce__(self) -> tuple[Callable[..., ShardDataset], tuple[Path, bool]]:
        # Pickled by its path: a spawned worker maps the same pages instead of receiving a copy.
        return ShardDataset, (self.path, False)
