"""Examples in files that hold token ids alone: one sequence of ids after another.

The formats differ in where a sequence begins and how long it is; a `TokenFile` says that. The rest
is the same for all: cutting sequences to examples, special tokens, and reading a batch. Examples
have one segment and no label, and masks are drawn in every epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_unpad.batch.inputs import IGNORE
from bert_unpad.data.readers import Setting
from bert_unpad.data.readers.ranges import FileRanges
from bert_unpad.data.store.dataset import count_targets
from bert_unpad.data.store.example_batch import ExampleBatch, ragged_places
from bert_unpad.data.store.manifest import DamagedDataError
from bert_unpad.data.store.mapped import check_mapped


@dataclass(frozen=True)
class TokenFile:
    """Where the sequences of one file are.

    Raises:
        DamagedDataError: a sequence lies outside the file; the message names the file.
    """

    path: Path
    name: Path
    """The file to name in errors: that of the user, where `path` is made of it."""
    dtype: np.dtype
    """Type of the ids: integers, little-endian."""
    begins: NDArray[np.int64]
    """[S]: byte where each sequence begins."""
    lengths: NDArray[np.integer]
    """[S]: number of ids of each sequence."""

    def __post_init__(self) -> None:
        if self.dtype.kind not in "iu":
            raise DamagedDataError(f"{self.name}: expected ids as integers, got {self.dtype}")
        size = self.path.stat().st_size
        begins, lengths = self.begins, self.lengths
        if len(begins) and (
            begins.min() < 0
            or begins.max() > size
            or lengths.min() < 0
            # A division, because a product of huge numbers would wrap around.
            or (lengths > (size - begins) // self.dtype.itemsize).any()
        ):
            raise DamagedDataError(
                f"{self.name}: expected sequences inside of its {size:,} bytes, got some beyond "
                "them: it is cut off, or its index belongs to another file"
            )


class TokenDataset:
    """An `ExampleDataset` of token ids.

    Options, of a source: `add` says which special tokens are put around each example. Without it
    examples are as stored, and have to begin with [CLS]; with `none` they may begin with anything.
    `long` says what becomes of a sequence that is longer than `max_seq_length`: `error`; `cut`
    keeps its beginning; `split` makes pieces of it, as long as possible.

    Args:
        open_files: returns the files; called again where the data set is unpickled.
        setting: what is to be known besides.

    Raises:
        DamagedDataError: a file is wrong; the message names it. Reading may raise it too.
        ValueError: a sequence is too long, or options do not go together.
    """

    has_masks = False

    def __init__(self, open_files: Callable[[], Sequence[TokenFile]], setting: Setting) -> None:
        self._arguments = open_files, setting
        self.vocab_size = setting.vocab_size
        self.unmaskable_ids = setting.unmaskable_ids
        self.max_seq_length = setting.max_seq_length
        add = setting.options.get("add")
        self._must_begin = setting.cls_id if add is None else None
        # Some tokenizers use the token at the end of a text for padding too.
        self._padding = None if setting.pad_id == setting.sep_id else setting.pad_id
        words = (add or "").split(",")
        self._first = [setting.cls_id] if "cls" in words else []
        self._last = [setting.sep_id] if "sep" in words else []
        self._added = len(self._first) + len(self._last)
        self._room = setting.max_seq_length - self._added
        long = setting.options.get("long", "error")
        if long == "split" and add is None:
            raise ValueError(
                "source: expected the option add=cls,sep (or none, cls, sep) with long=split, "
                "because only the first piece of a sequence begins as the sequence does"
            )
        self._files = list(open_files())
        self._dtypes = [file.dtype for file in self._files]
        self._ranges = FileRanges([file.path for file in self._files])
        parts = [self._pieces(file, long) for file in self._files]
        # Where the examples of each file begin, and those of each of its sequences.
        self._file_begins = np.cumsum([0, *(len(lengths) for lengths, _ in parts)])
        self._firsts = [firsts for _, firsts in parts]
        self.lengths = np.concatenate([np.empty(0, np.uint16), *(part for part, _ in parts)])

    def _pieces(
        self, file: TokenFile, long: str
    ) -> tuple[NDArray[np.uint16], NDArray[np.int64] | None]:
        """Returns the lengths of a file's examples, and the first example of each sequence.

        None stands for one example a sequence.
        """
        lengths, room = file.lengths, self._room
        longest, added = int(lengths.max(initial=0)), self._added
        if longest > room and long == "error":
            raise ValueError(
                f"max_seq_length: expected at least {longest + added}, for the longest sequence of "
                f"{file.name}{f' and {added} special tokens' * (added > 0)}, or the option "
                f"long=cut or long=split, got {self.max_seq_length}"
            )
        if longest <= room and lengths.min(initial=1) > 0:
            return (lengths + added).astype(np.uint16), None
        if long == "split":
            counts = -(-lengths.astype(np.int64) // room)
        else:
            counts = (lengths > 0).astype(np.int64)
        firsts = np.concatenate([[0], np.cumsum(counts)])
        pieces = np.full(firsts[-1], room + added, np.uint16)
        last = firsts[1:][counts > 0] - 1  # of each sequence
        rest = lengths.astype(np.int64) - (counts - 1) * room
        pieces[last] = np.minimum(rest[counts > 0], room) + added
        return pieces, firsts

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: NDArray[np.integer]) -> ExampleBatch:
        """See `ExampleDataset`."""
        indices = np.asarray(indices, np.int64)
        lengths = self.lengths[indices].astype(np.int64)
        counts = lengths - self._added
        files = np.searchsorted(self._file_begins, indices, side="right") - 1
        begins, sizes = np.empty(len(indices), np.int64), np.empty(len(indices), np.int64)
        for number in np.unique(files):
            here = files == number
            begins[here] = self._begins(number, indices[here] - self._file_begins[number])
            sizes[here] = counts[here] * self._dtypes[number].itemsize
        data = self._ranges.read(files, begins, sizes)
        ids = [
            np.frombuffer(piece, self._dtypes[file])
            for piece, file in zip(data, files.tolist(), strict=True)
        ]
        # A huge unsigned number becomes a negative one, which the check finds.
        inner = np.concatenate([np.empty(0, np.int64), *ids], dtype=np.int64, casting="unsafe")
        self._check(inner, files, counts)
        ends = np.cumsum(lengths)
        tokens = np.empty(len(inner) + len(indices) * self._added, np.int64)
        tokens[ends - lengths] = self._first or 0
        tokens[ends - 1] = self._last or 0
        tokens[ragged_places(ends - lengths + len(self._first), counts)] = inner
        none = np.full(len(indices), IGNORE, np.int64)
        return ExampleBatch(indices, lengths, lengths, none, tokens)

    def _begins(self, number: int, examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the byte where each of a file's examples begins."""
        file, firsts = self._files[number], self._firsts[number]
        check_mapped(file.begins)
        if firsts is None:
            return file.begins[examples]
        sequences = np.searchsorted(firsts, examples, side="right") - 1
        before = (examples - firsts[sequences]) * self._room
        return file.begins[sequences] + before * file.dtype.itemsize

    def _check(
        self, ids: NDArray[np.int64], files: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> None:
        wrong = (ids < 0) | (ids >= self.vocab_size)
        if wrong.any():
            at = int(wrong.argmax())
            file = self._files[files[np.searchsorted(np.cumsum(counts), at, side="right")]]
            copy = f" (its copy {file.path})" * (file.path != file.name)
            raise DamagedDataError(
                f"{file.name}{copy}: expected ids of 0 to {self.vocab_size - 1} (the vocabulary), "
                f"got {ids[at]}"
            )
        ends = np.cumsum(counts)
        wrong = ids[ends - 1] == self._padding
        if wrong.any():
            raise DamagedDataError(
                f"{self._files[files[wrong.argmax()]].name}: expected sequences without padding, "
                f"got one that ends with {self._padding}"
            )
        if self._must_begin is None:
            return
        first = ids[ends - counts]
        wrong = first != self._must_begin
        if wrong.any():
            raise DamagedDataError(
                f"{self._files[files[wrong.argmax()]].name}: expected sequences that begin with "
                f"[CLS] ({self._must_begin}), got {first[wrong][0]}; the option add=cls,sep (or "
                "cls, sep) of the source adds special tokens, and add=none takes ids as they are"
            )

    def target_counts(self) -> NDArray[np.int64]:
        """See `ExampleDataset`; reads all examples."""
        return count_targets(self)

    def __reduce__(self) -> tuple[type, tuple]:
        # Pickled by its files: handles cannot travel, and indexes are in files.
        return TokenDataset, self._arguments
