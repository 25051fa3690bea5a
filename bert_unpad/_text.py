"""Text work: sentences, counts of characters, parts of arrays, packed and masked tokens
(csrc/text)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_bool, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad._host_calls import (
    NONE,
    Array,
    Handle,
    address,
    call,
    characters,
    integer,
    is_vector,
    pointers,
    take,
    unsigned,
    vector,
)

_UNITS = ("token", "word", "span")
_TOKENS = ("uint16", "uint32", "int32", "int64")
_Int64 = NDArray[np.int64]


class _MaskingOptions(ctypes.Structure):
    _fields_ = (
        *(("unit", c_int), ("mask_id", c_int64), ("max_predictions", c_int64)),
        *(("always_mask", c_bool), ("seed", c_uint64)),
    )


class _PackArguments(ctypes.Structure):
    _fields_ = (
        *(("begins", Array), ("lengths", Array), ("second_starts", Array), ("examples", Array)),
        *(("masker", c_void_p), ("epoch", c_uint64), ("rate", c_double)),
    )


class _Packed(ctypes.Structure):
    _fields_ = (
        *(("total", c_int64), ("input_ids", c_void_p), ("token_type_ids", c_void_p)),
        *(("positions", c_void_p), ("labels", c_void_p)),
    )


class Splitter:
    """Splits documents into sentences.

    Args:
        kinds: bytes, for each code point from 0 on 1 if it is a letter or digit, + 2 if it is upper
            case.
    """

    def __init__(self, kinds: bytes) -> None:
        (splitter,) = pointers(1)
        call("bu_splitter", characters(kinds), byref(splitter))
        self._splitter = Handle(splitter)

    def split(self, text: bytes, ends: _Int64 | None = None) -> tuple[bytes, _Int64, _Int64]:
        """Splits UTF-8 text into documents and these into sentences.

        Args:
            text: UTF-8.
            ends: int64 [D], where each document ends in it, rising; None: a blank line ends one.

        Returns:
            (text, ends, counts): bytes, each sentence followed by a line feed, white space reduced
            to single spaces; int64 [documents], where each document ends in it, and how many
            sentences it has. Documents without text are left out.

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        given = NONE if ends is None else vector("ends", ends, np.int64)
        found, new_ends, counts = pointers(3)
        call(
            *("bu_split", self._splitter, characters(text), given),
            *(byref(found), byref(new_ends), byref(counts)),
        )
        return take(found, np.uint8).tobytes(), take(new_ends, np.int64), take(counts, np.int64)


class CharacterCounts:
    """How often each character occurs in texts."""

    def __init__(self) -> None:
        (counts,) = pointers(1)
        call("bu_characters", byref(counts))
        self._counts = Handle(counts)

    def add(self, text: bytes) -> None:
        """Counts the characters of UTF-8 text."""
        call("bu_characters_add", self._counts, characters(text))

    def counts(self) -> _Int64:
        """How often each code point has occurred, int64 [1,114,112]."""
        (found,) = pointers(1)
        call("bu_characters_counts", self._counts, byref(found))
        return take(found, np.int64)


class Masker:
    """Chooses the tokens to predict; see `bert_unpad.data.TokenMasker`.

    Args:
        kinds: bytes, for each id 1 if it may be predicted, + 2 if it continues a word, + 4 if it
            may replace another.
        unit: "token", "word" or "span".
        max_predictions: of a sequence; None: no limit.
        always_mask: whether all that is predicted becomes mask_id.

    Raises:
        ValueError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        kinds: bytes,
        *,
        unit: str,
        mask_id: int,
        max_predictions: int | None,
        always_mask: bool,
        seed: int,
    ) -> None:
        if unit not in _UNITS:
            raise ValueError(f"unit: expected 'token', 'word' or 'span', got {unit!r}")
        most = 2**63 - 1 if max_predictions is None else integer("max_predictions", max_predictions)
        if most < 1:
            raise ValueError(f"max_predictions: expected 1 or more, got {most}")
        options = _MaskingOptions(
            unit=_UNITS.index(unit),
            mask_id=integer("mask_id", mask_id),
            max_predictions=most,
            always_mask=always_mask,
            seed=unsigned("seed", seed),
        )
        (masker,) = pointers(1)
        call("bu_masker", characters(kinds), byref(options), byref(masker))
        self._masker = Handle(masker)
        self._make = partial(
            Masker,
            kinds,
            unit=unit,
            mask_id=mask_id,
            max_predictions=max_predictions,
            always_mask=always_mask,
            seed=seed,
        )

    def __reduce__(self) -> tuple[Callable[[], Masker], tuple[()]]:
        return self._make, ()


def gather(
    sources: Sequence[NDArray[Any]], source: _Int64, begins: _Int64, lengths: _Int64
) -> NDArray[Any]:
    """Copies parts of several arrays, one after the other.

    Args:
        sources: contiguous arrays of one dtype, perhaps memory-mapped.
        source, begins, lengths: int64 [B], the array of each part, where the part begins in it, and
            how many values it has.

    Returns:
        An array [sum of lengths].

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
    """
    if not len(sources):
        raise ValueError("sources: expected at least one, got none")
    dtype = sources[0].dtype
    if not all(is_vector(x) and x.dtype == dtype for x in sources) or dtype.hasobject:
        raise TypeError("sources: expected contiguous one-dimensional arrays of one dtype")
    columns = {"source": source, "begins": begins, "lengths": lengths}
    parts = [vector(name, column, np.int64) for name, column in columns.items()]
    _check_equal_sizes(columns)
    buffers = (Array * len(sources))(*(Array(address(x), x.nbytes) for x in sources))
    total = c_int64()
    given = (buffers, c_int64(len(sources)), c_int64(dtype.itemsize), *parts, byref(total))
    call("bu_gather", *given, None)
    out = np.empty(total.value, dtype)
    if out.size:
        call("bu_gather", *given, c_void_p(address(out)))
    return out


def pack(
    tokens: NDArray[Any],
    begins: _Int64,
    lengths: _Int64,
    second_starts: _Int64,
    *,
    masker: Masker | None = None,
    examples: _Int64 | None = None,
    epoch: int = 0,
    rate: float = 0.0,
) -> tuple[_Int64, _Int64, _Int64, _Int64]:
    """Packs examples end to end, and masks them.

    Args:
        tokens: uint16, uint32, int32 or int64 [N], a buffer that holds the examples.
        begins, lengths, second_starts: int64 [B], where each example begins in it, its number of
            tokens, and where its second segment begins in the example.
        masker, examples: a `Masker` and int64 [B], the coordinate of each example; without them
            nothing is masked.
        epoch, rate: coordinate of the pass over the data, and share of the tokens to predict.

    Returns:
        (input_ids, token_type_ids, positions, labels): int64 [T] twice, then int64 [M], the packed
        places to predict, ascending, and the true ids there. A pure function.

    Raises:
        ValueError, TypeError: an argument is wrong; the message names it.
    """
    if (masker is None) != (examples is None):
        raise ValueError("masker and examples: expected both or none, got one")
    columns = {"begins": begins, "lengths": lengths, "second_starts": second_starts}
    columns["examples"] = lengths if examples is None else examples
    arrays = {name: vector(name, column, np.int64) for name, column in columns.items()}
    _check_equal_sizes(columns)
    if not is_vector(tokens) or tokens.dtype.name not in _TOKENS:
        raise TypeError(
            "tokens: expected a contiguous one-dimensional array of uint16, uint32, int32 or int64"
        )
    given = _PackArguments(
        **arrays,
        masker=None if masker is None else masker._masker._as_parameter_,
        epoch=unsigned("epoch", epoch),
        rate=rate,
    )
    total = int(lengths.sum())
    # Wrong lengths are refused by the call, which comes after the room for the result is made.
    room = total if 0 <= total <= tokens.size * len(lengths) else 0
    ids, types = np.empty(room, np.int64), np.empty(room, np.int64)
    packed = _Packed(total=room, input_ids=address(ids), token_type_ids=address(types))
    name = f"bu_pack_{tokens.dtype.name}"
    call(name, Array(address(tokens), tokens.size), byref(given), byref(packed))
    positions, labels = (
        take(c_void_p(handle), np.int64) for handle in (packed.positions, packed.labels)
    )
    return ids, types, positions, labels


def _check_equal_sizes(columns: dict[str, _Int64]) -> None:
    if len({column.size for column in columns.values()}) > 1:
        raise ValueError(f"{', '.join(columns)}: expected equal sizes")
