"""Examples on disk: flat memory-mapped arrays without padding, and a manifest with digests.

A shard is a folder. One or more files of tokens hold all examples end to end ([CLS] a [SEP] b
[SEP], no padding), `lengths.bin` and `offsets.bin` how long each is and where it begins. The ranks
of a machine share the memory, and a file of tokens is mapped when it is first read. Masks are drawn
again in every epoch; if the data came with masks, three more arrays hold them. A folder is written
under a temporary name and renamed when complete. Opening it detects truncated files by the sizes in
the manifest, and altered ones by SHA-256 digests where that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_unpad._text import gather
from bert_unpad.batch.inputs import IGNORE
from bert_unpad.data.store.example_batch import ExampleBatch, Masks, ragged_places
from bert_unpad.data.store.manifest import (
    MANIFEST,
    DamagedDataError,
    check_digest,
    check_size,
    count_of,
    read_manifest,
)
from bert_unpad.data.store.mapped import check_mapped, map_file

FORMAT = "bert_unpad shard, version 2"
MAX_LENGTH = 65_535  # lengths are uint16
MAX_VOCAB = 2**24  # far above any vocabulary in use
AT_ONCE = 2**24  # values of a large array that are counted together
DTYPES = {
    "tokens": (np.uint16, np.uint32),
    "lengths": (np.uint16,),
    "offsets": (np.int64,),
    "second_starts": (np.uint16,),
    "next_sentence_labels": (np.int8,),
    "masked_offsets": (np.int64,),
    "masked_positions": (np.uint16,),
    "masked_labels": (np.uint16, np.uint32),
}
"""The arrays of a shard and their possible dtypes; not every shard has arrays of masks."""
OF_MASKS = ("masked_offsets", "masked_positions", "masked_labels")


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


class ShardDataset:
    """A shard opened for reading; its arrays are memory-mapped, so opening costs no memory.

    No file stays open, however many the tokens are in.

    Args:
        path: the folder a `ShardWriter` made.
        verify: read every file and compare its digest.
        sizes: compare the sizes of all files, which finds truncation but not altered bytes, and
            look at all lengths. Without it, opening takes as long whatever the size of the data: a
            file of tokens is looked at when it is first read.

    Attributes:
        lengths: uint16 [N], tokens of each example.
        offsets: int64 [N + 1], where each example begins among all tokens, and where the last ends.
        second_starts: uint16 [N], index within the example where the second segment begins.
        next_sentence_labels: int8 [N], 0 = is next, 1 = random, -100 = none.
        masked_offsets, masked_positions, masked_labels: int64 [N + 1], and of each masked token its
            place within the example and true id; only if `has_masks`.
        num_tokens: the sum of the lengths.
        vocab_size, unmaskable_ids, max_seq_length, has_masks, statistics: as given to the writer.
        pair_labels: whether `batch` gives next-sentence labels; may be set. Otherwise all are -100,
            for objectives that do not ask for one.

    Raises:
        DamagedDataError: a file is missing, truncated or altered; the message names it and says
            what was expected. Reading may raise it too: examples are checked when they are read.
    """

    def __init__(self, path: str | Path, verify: bool = True, sizes: bool = True) -> None:
        self.path = Path(path)
        self.pair_labels = True
        self._columns: list[NDArray] = []
        manifest = read_manifest(self.path / MANIFEST, FORMAT)
        try:
            files = manifest["files"]
            self.vocab_size = count_of(manifest, "vocab_size", MAX_VOCAB)
            ids = {str(i): token for i, token in enumerate(manifest["unmaskable_ids"])}
            self.unmaskable_ids = tuple(count_of(ids, i, self.vocab_size - 1) for i in ids)
            self.max_seq_length = count_of(manifest, "max_seq_length", MAX_LENGTH)
            self.statistics = {
                name: count_of(manifest["statistics"], name, 2**60)
                for name in manifest["statistics"]
            }
            self.has_masks = "masked_offsets.bin" in files
            self._open_tokens(files, manifest["tokens"], sizes, verify)
            opened = partial(self._map, files, verify=verify)
            self.lengths = opened("lengths")
            self.offsets = opened("offsets")
            self.second_starts = opened("second_starts")
            self.next_sentence_labels = opened("next_sentence_labels")
            if self.has_masks:
                self.masked_offsets = opened("masked_offsets")
                self.masked_positions = opened("masked_positions")
                self.masked_labels = opened("masked_labels")
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedDataError(
                f"{self.path / MANIFEST} is damaged; expected an entry for {error}"
            ) from error
        self._check_columns()
        if sizes:
            self._check_values()

    def _open_tokens(self, files: dict, names: list[str], sizes: bool, verify: bool) -> None:
        """Learns where the tokens of each file begin among all; maps none of them yet."""
        counts, dtypes = [], set()
        self._token_paths = []
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"tokens: the name of a file in this folder, got {name!r}")
            dtype, count = self._about(files, name, "tokens")
            path = self.path / name
            if sizes:
                check_size(path, count * dtype.itemsize)
            if verify:
                check_digest(path, files[name]["sha256"])
            counts.append(count)
            dtypes.add(dtype)
            self._token_paths.append(path)
        if len(dtypes) != 1:
            raise ValueError("tokens: files of one dtype")
        (self._token_dtype,) = dtypes
        self._token_ends = np.cumsum(counts, dtype=np.int64)
        self._token_files: list[NDArray | None] = [None] * len(counts)
        self.num_tokens = int(self._token_ends[-1])

    def _about(self, files: dict, name: str, column: str) -> tuple[np.dtype, int]:
        """What a manifest says of a file: its dtype and how many values it holds."""
        about = files[name]
        names = [np.dtype(dtype).name for dtype in DTYPES[column]]
        if about["dtype"] not in names:
            raise ValueError(f"dtype: {' or '.join(names)} of {name}, got {about['dtype']!r}")
        return np.dtype(about["dtype"]).newbyteorder("<"), count_of(about, "count", 2**60)

    def _map(self, files: dict, column: str, verify: bool) -> NDArray:
        name = f"{column}.bin"
        dtype, count = self._about(files, name, column)
        check_size(self.path / name, count * dtype.itemsize)
        if verify:
            check_digest(self.path / name, files[name]["sha256"])
        self._columns.append(map_file(self.path / name, dtype, count))
        return self._columns[-1]

    def _check_columns(self) -> None:
        """Whether the columns have as many values as belong together."""
        examples = len(self.lengths)
        if (
            len(self.offsets) != examples + 1
            or self.offsets[0] != 0
            or self.offsets[-1] != self.num_tokens
            or not examples == len(self.second_starts) == len(self.next_sentence_labels)
        ):
            raise DamagedDataError(
                f"{self.path / 'offsets.bin'} is damaged: expected offsets that rise from 0 to "
                f"{self.num_tokens}, one more than examples"
            )
        if self.has_masks and (
            len(self.masked_offsets) != len(self.offsets)
            or self.masked_offsets[0] != 0
            or self.masked_offsets[-1] != len(self.masked_positions)
            or len(self.masked_positions) != len(self.masked_labels)
        ):
            raise self._bad_masked_offsets()

    def _check_values(self) -> None:
        """Whether all lengths are possible, and offsets of masks rise."""
        if not len(self):
            return
        least, most = self.lengths.min(), self.lengths.max()
        if not 1 <= least <= most <= self.max_seq_length:
            raise DamagedDataError(
                f"{self.path / 'lengths.bin'} is damaged: expected 1 to {self.max_seq_length}, got "
                f"{least} to {most}"
            )
        if self.has_masks and (self.masked_offsets[1:] < self.masked_offsets[:-1]).any():
            raise self._bad_masked_offsets()

    def _bad_masked_offsets(self) -> DamagedDataError:
        return DamagedDataError(
            f"{self.path / 'masked_offsets.bin'} is damaged: expected offsets that rise from 0 "
            f"to {len(self.masked_positions)}, one more than examples"
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index: expected {-len(self)} to {len(self) - 1}, got {index}")
        one = self.batch(np.array([int(index) % len(self)]))
        return Example(
            one.tokens.astype(np.int64), int(one.second_starts[0]), int(one.next_sentence_labels[0])
        )

    @property
    def tokens(self) -> NDArray[np.integer]:
        """All examples end to end, uint16 or uint32 [num_tokens]; a copy if in several files.

        It is there to look at; training reads batches.
        """
        parts = [self._tokens_of(number) for number in range(len(self._token_paths))]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _tokens_of(self, number: int) -> NDArray[np.integer]:
        """Maps a file of tokens."""
        found = self._token_files[number]
        if found is None:
            path, end = self._token_paths[number], self._token_ends[number]
            count = int(end - (self._token_ends[number - 1] if number else 0))
            check_size(path, count * self._token_dtype.itemsize)
            found = self._token_files[number] = map_file(path, self._token_dtype, count)
        check_mapped(found)
        return found

    def _gather(self, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.integer]:
        """The tokens of some examples, which never reach beyond a file."""
        numbers = np.searchsorted(self._token_ends, begins, side="right")
        begins = begins - np.concatenate([[0], self._token_ends[:-1]])[numbers]
        read, source = np.unique(numbers, return_inverse=True)
        files = [self._tokens_of(number) for number in read.tolist()]
        if (begins + lengths > np.array([len(file) for file in files], np.int64)[source]).any():
            raise DamagedDataError(
                f"{self.path / 'offsets.bin'} is damaged: expected examples within a file"
            )
        files = files or [np.empty(0, self._token_dtype)]
        tokens = gather(files, source, begins, lengths)
        if len(tokens) and tokens.max() >= self.vocab_size:
            example = np.searchsorted(np.cumsum(lengths), tokens.argmax(), side="right")
            raise self._wrong_ids(tokens, self._token_paths[numbers[example]])
        return tokens

    def _wrong_ids(self, ids: NDArray, path: Path) -> DamagedDataError:
        """The error of ids outside the vocabulary, which would be indices outside of tables."""
        return DamagedDataError(
            f"{path} is damaged: expected ids of 0 to {self.vocab_size - 1}, got {ids.max()}"
        )

    def batch(self, indices: NDArray[np.integer]) -> ExampleBatch:
        """Reads several examples in one operation; their ids are their indices in the shard.

        Args:
            indices: indices [B], 0 to len - 1.
        """
        indices = np.asarray(indices, np.int64)
        check_mapped(*self._columns)
        lengths = self.lengths[indices].astype(np.int64)
        begins = self.offsets[indices]
        within = (begins >= 0) & (begins <= self.num_tokens - lengths)
        if not (within & (self.offsets[indices + 1] - begins == lengths)).all():
            raise DamagedDataError(
                f"{self.path / 'offsets.bin'} is damaged: expected offsets that rise by the lengths"
            )
        second_starts = self.second_starts[indices].astype(np.int64)
        if (second_starts > lengths).any():
            raise DamagedDataError(
                f"{self.path / 'second_starts.bin'} is damaged: expected places within the examples"
            )
        labels = self.next_sentence_labels[indices].astype(np.int64)
        if not ((labels == 0) | (labels == 1) | (labels == -100)).all():
            raise DamagedDataError(
                f"{self.path / 'next_sentence_labels.bin'} is damaged: expected 0, 1 or -100"
            )
        if not self.pair_labels:
            labels = np.full_like(labels, IGNORE)
        tokens = self._gather(begins, lengths)
        masks = self._masks(indices, lengths) if self.has_masks else None
        return ExampleBatch(indices, lengths, second_starts, labels, tokens, masks)

    def _masks(self, indices: NDArray[np.integer], lengths: NDArray[np.int64]) -> Masks:
        begins = self.masked_offsets[indices]
        ends = self.masked_offsets[indices + 1]
        if ((begins < 0) | (begins > ends) | (ends > len(self.masked_positions))).any():
            raise self._bad_masked_offsets()
        counts = ends - begins
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
        return masks

    def target_counts(self) -> NDArray[np.int64]:
        """See `ExampleDataset`."""
        paths = [self.path / "masked_labels.bin"] if self.has_masks else self._token_paths
        counts = np.zeros(self.vocab_size, np.int64)
        for number, path in enumerate(paths):
            ids = self.masked_labels if self.has_masks else self._tokens_of(number)
            for begin in range(0, len(ids), AT_ONCE):  # bincount makes int64 of them
                piece = ids[begin : begin + AT_ONCE]
                if piece.max() >= self.vocab_size:
                    raise self._wrong_ids(piece, path)
                counts += np.bincount(piece, minlength=len(counts))
        counts[list(self.unmaskable_ids)] = 0
        return counts

    def __reduce__(self) -> tuple[Callable[..., ShardDataset], tuple, dict[str, bool]]:
        # Pickled by its path: a spawned worker maps the same pages instead of receiving a copy.
        return ShardDataset, (self.path, False, False), {"pair_labels": self.pair_labels}
