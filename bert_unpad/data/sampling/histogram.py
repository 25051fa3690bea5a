"""Length histograms: how many sequences of each length a data set has.

Work per batch depends only on the lengths. So a simulation, a benchmark or a test behaves like the
real data set with nothing but its histogram. The package has the histogram of the Wikipedia
pretraining set that MLPerf and NVIDIA's BERT use (maximum length 512): 16,279,552 sequences, mean
255.83 tokens, 23.4 % of full length. It was published under the MIT licence with Graphcore's
packing paper (Krell, Kosec, Perez, Fitzgibbon: Efficient Sequence Packing without
Cross-contamination, arXiv:2107.02027), in `histograms.py` of the packedBERT tutorial.
"""

from importlib import resources
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.store.manifest import MANIFEST
from bert_unpad.data.store.shards import ShardDataset

_MAX_LENGTH = 65_535  # lengths are uint16
_MAX_DIGITS = 13  # of a count: 65,535 of them add up to less than 2^63


def wikipedia_lengths() -> NDArray[np.int64]:
    """Returns the histogram of the Wikipedia pretraining set, int64 [513], for lengths 0 to 512.

    The set is that of MLPerf's and NVIDIA's BERT, with 16,279,552 sequences.
    """
    text = (
        resources.files("bert_unpad.data.sampling")
        .joinpath("wikipedia_lengths_512.txt")
        .read_text()
    )
    return _parse(text, "wikipedia_lengths_512.txt")


def read_histogram(path: str | PathLike[str]) -> NDArray[np.int64]:
    """Reads a histogram from a text file: line i is the number of sequences of length i (from 1).

    Returns:
        int64 [longest + 1], indexed by length; entry 0 is 0.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not a count, there are more than 65,535 lines, or all counts are 0.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text of UTF-8 ({error})") from error
    return _parse(text, str(path))


def measure_histogram(path: str | PathLike[str]) -> NDArray[np.int64]:
    """Counts the lengths of prepared data, in the folder of a shard or a folder with `train`.

    Returns:
        int64 [longest + 1], indexed by length.
    """
    folder = Path(path)
    if (folder / "train" / MANIFEST).is_file():
        folder = folder / "train"
    lengths = ShardDataset(folder, verify=False).lengths
    if not len(lengths):
        raise ValueError(f"{folder}: expected at least one example, got none")
    return np.bincount(lengths)


def sample_lengths(
    n: int, seed: int = 0, histogram: NDArray[np.int64] | None = None
) -> NDArray[np.uint16]:
    """Draws lengths independently of each other, with the frequencies of the histogram.

    Args:
        n: number of lengths to draw, at least 0.
        seed: the same seed draws the same lengths.
        histogram: counts indexed by length; by default `wikipedia_lengths()`.

    Returns:
        uint16 [n], tokens.

    Raises:
        ValueError: `n` or `seed` is negative.
    """
    if n < 0:
        raise ValueError(f"n: expected 0 or more lengths, got {n}")
    if seed < 0:
        raise ValueError(f"seed: expected 0 or more, got {seed}")
    counts = wikipedia_lengths() if histogram is None else histogram
    ends = np.cumsum(counts)
    draws = np.random.default_rng(seed).integers(ends[-1], size=n)
    return np.searchsorted(ends, draws, side="right").astype(np.uint16)


def all_lengths(histogram: NDArray[np.int64] | None = None) -> NDArray[np.uint16]:
    """Returns every length as often as a histogram (by default `wikipedia_lengths()`) counts it.

    Returns:
        uint16 [histogram.sum()], ascending.
    """
    counts = wikipedia_lengths() if histogram is None else histogram
    return np.repeat(np.arange(len(counts), dtype=np.uint16), counts)


def _parse(text: str, name: str) -> NDArray[np.int64]:
    lines = text.split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if len(lines) > _MAX_LENGTH:
        raise ValueError(f"{name}: expected at most {_MAX_LENGTH} lengths, got {len(lines)}")
    counts = np.zeros(len(lines) + 1, np.int64)
    for number, line in enumerate(lines, start=1):
        count = line.strip()
        if not (count.isascii() and count.isdigit() and len(count) <= _MAX_DIGITS):
            raise ValueError(f"{name}, line {number}: expected a number of sequences, got {line!r}")
        counts[number] = int(line)
    if not counts.any():
        raise ValueError(f"{name}: expected at least one sequence, all counts are 0")
    return counts
