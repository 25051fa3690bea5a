"""Prepared data of any size that takes hardly any disk, and how long it takes to open it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.lib.feed_files import VOCABULARY, tokenizer
from bert_unpad.data import BalancedSampler, DataConfig, prepare
from bert_unpad.data.prepared import write_prepared
from bert_unpad.data.store.shard_writer import write_shard_manifest

LENGTH = 128
FILE_TOKENS = 1 << 23  # about those of a block
RANKS, BATCH = 8, 32


def write_sparse(folder: Path, size: int) -> None:
    """Makes prepared data whose files of tokens have `size` bytes in all and take no space."""
    made = tokenizer()
    made.save(folder / "tokenizer")
    about = {
        "vocab_size": VOCABULARY,
        "unmaskable_ids": list(made.unmaskable_ids),
        "max_seq_length": LENGTH,
        "statistics": {"documents": 1},
    }
    for split, tokens in (("train", size // 2), ("validation", LENGTH)):
        (folder / split).mkdir()
        tokens -= tokens % LENGTH
        counts: dict[str, int] = {}
        for begin in range(0, tokens, FILE_TOKENS):
            counts[f"tokens-{len(counts):06}.bin"] = min(FILE_TOKENS, tokens - begin)
        files = {name: ("uint16", count) for name, count in counts.items()}
        examples = tokens // LENGTH
        for name, dtype in (("second_starts", "uint16"), ("next_sentence_labels", "int8")):
            files[f"{name}.bin"] = (dtype, examples)
        for name, (dtype, count) in files.items():
            with (folder / split / name).open("wb") as file:
                file.truncate(count * np.dtype(dtype).itemsize)
        np.full(examples, LENGTH, np.uint16).tofile(folder / split / "lengths.bin")
        np.arange(0, tokens + 1, LENGTH, dtype=np.int64).tofile(folder / split / "offsets.bin")
        files |= {"lengths.bin": ("uint16", examples), "offsets.bin": ("int64", examples + 1)}
        described = {
            name: {"dtype": dtype, "count": count, "sha256": ""}
            for name, (dtype, count) in files.items()
        }
        write_shard_manifest(folder / split, about, described, list(counts))
    write_prepared(
        folder,
        source="sparse",
        settings={"objective": "next_or_random"},
        statistics={"validation_examples": 1},
        tokenizer_files=made.files,
    )


def forget(folder: Path) -> None:
    """Lets the kernel drop what it keeps of a folder's files, as if they were read first."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_opening(size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of opening `size` bytes of sparse files, and of the first batch of a rank.

    Returns:
        `first rank, cold` with nothing in the page cache, `first rank` and `other ranks`, which
        compare no sizes, `rounds` each; `first batch` of `stratified` after that, once.
    """
    found: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        found.setdefault(name, []).append(time.perf_counter() - started)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        write_sparse(folder, size)
        config = DataConfig(f"shards:{folder}", max_seq_length=LENGTH)
        for _ in range(rounds):
            forget(folder)
            timed("first rank, cold", lambda: prepare(config, progress=False))
            timed("first rank", lambda: prepare(config, progress=False))
            timed("other ranks", lambda: prepare(config, progress=False, check=False))
        train = prepare(config, progress=False).train

        def first_batch() -> None:
            sampler = BalancedSampler(train.lengths, RANKS, 0, BATCH)
            assert len(train.batch(next(iter(sampler))))

        timed("first batch", first_batch)
    return found
