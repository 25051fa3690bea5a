"""Examples of files that hold token ids alone: one sequence of ids after another.

The formats differ in where sequences are and how long they are. The rest is the same for all:
cutting sequences to examples, special tokens, and checks. Examples have one segment and no label,
and masks are drawn in every epoch.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_unpad._text import gather
from bert_unpad.batch.inputs import IGNORE
from bert_unpad.data.formats import Setting
from bert_unpad.data.store.example_batch import ExampleBatch, ragged_places
from bert_unpad.data.store.manifest import DamagedDataError

_AT_ONCE = 2**20  # ids that are read together

Sequences = tuple[NDArray[np.integer], NDArray[np.int64]]
"""Ids of some sequences end to end, and the number of ids of each."""


def check_options(setting: Setting) -> None:
    """Raises a ValueError if the options of a source of token ids do not go together."""
    if setting.options.get("long") == "split" and "add" not in setting.options:
        raise ValueError(
            "source: expected the option add=cls,sep (or none, cls, sep) with long=split, because "
            "only the first piece of a sequence begins as the sequence does"
        )


def in_blocks(lengths: NDArray[np.int64]) -> Iterator[slice]:
    """Divides the sequences of a file into blocks that are read together, in order."""
    ends, first, done = np.cumsum(lengths), 0, 0
    while first < len(lengths):
        last = max(int(np.searchsorted(ends, done + _AT_ONCE, side="right")), first + 1)
        yield slice(first, last)
        first, done = last, int(ends[last - 1])


def cut_sequences(
    path: Path, blocks: Iterable[Sequences], setting: Setting
) -> Iterator[ExampleBatch]:
    """Makes examples of the sequences of a file, in order.

    Options, of a source: `add` says which special tokens are put around each example. Without it
    examples are as stored, and have to begin with [CLS]; with `none` they may begin with anything.
    `long` says what becomes of a sequence that is longer than `max_seq_length`: `error`; `cut`
    keeps its beginning; `split` makes pieces of it, as long as possible.

    Raises:
        DamagedDataError: an id is wrong, or a sequence begins or ends with a wrong one.
        ValueError: a sequence is too long, or options do not go together.
    """
    check_options(setting)
    words = setting.options.get("add", "").split(",")
    first = [setting.cls_id] * ("cls" in words)
    last = [setting.sep_id] * ("sep" in words)
    added = len(first) + len(last)
    kind = np.dtype(np.uint16 if setting.vocab_size <= 65_536 else np.uint32)
    for ids, sizes in blocks:
        inner, counts = _pieces(path, ids, sizes, setting, added)
        _check(path, inner, counts, setting)
        lengths = counts + added
        ends = np.cumsum(lengths)
        tokens = np.empty(len(inner) + len(counts) * added, kind)
        tokens[ends - lengths] = first or 0
        tokens[ends - 1] = last or 0
        tokens[ragged_places(ends - lengths + len(first), counts)] = inner
        none = np.full(len(counts), IGNORE, np.int64)
        yield ExampleBatch(np.arange(len(counts)), lengths, lengths, none, tokens)


def _pieces(
    path: Path, ids: NDArray[np.integer], sizes: NDArray[np.int64], setting: Setting, added: int
) -> Sequences:
    """Cuts sequences that are too long, and leaves out empty ones."""
    room, long = setting.max_seq_length - added, setting.options.get("long", "error")
    longest = int(sizes.max(initial=0))
    if longest <= room:
        return ids, sizes[sizes > 0]
    if long == "error":
        raise ValueError(
            f"max_seq_length: expected at least {longest + added}, for a sequence of {path}"
            f"{f' and {added} special tokens' * (added > 0)}, or the option long=cut or long=split "
            f"of the source, got {setting.max_seq_length}"
        )
    if long == "cut":
        counts = np.minimum(sizes, room)
        begins = np.cumsum(sizes) - sizes
        kept = gather([ids], np.zeros(len(sizes), np.int64), begins, counts)
        return kept, counts[counts > 0]
    pieces = -(-sizes // room)
    counts = np.full(int(pieces.sum()), room)
    some = sizes > 0
    counts[np.cumsum(pieces)[some] - 1] = (sizes - (pieces - 1) * room)[some]
    return ids, counts


def _check(
    path: Path, ids: NDArray[np.integer], counts: NDArray[np.int64], setting: Setting
) -> None:
    if not len(ids):
        return
    most = setting.vocab_size - 1
    if ids.min() < 0 or ids.max() > most:
        wrong = ids[(ids < 0) | (ids > most)][0]
        raise DamagedDataError(f"{path}: expected ids of 0 to {most} (the vocabulary), got {wrong}")
    ends = np.cumsum(counts)
    # Some tokenizers use the token at the end of a text for padding too.
    padding = None if setting.pad_id == setting.sep_id else setting.pad_id
    if padding is not None and (ids[ends - 1] == padding).any():
        raise DamagedDataError(
            f"{path}: expected sequences without padding, got one that ends with {padding}"
        )
    if "add" in setting.options:
        return
    begin = ids[ends - counts]
    wrong = begin != setting.cls_id
    if wrong.any():
        raise DamagedDataError(
            f"{path}: expected sequences that begin with [CLS] ({setting.cls_id}), got "
            f"{begin[wrong][0]}; the option add=cls,sep (or cls, sep) of the source adds special "
            "tokens, and add=none takes ids as they are"
        )
