"""The sections of docs/benchmarks.md on data: preparing it, opening it, and making batches."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.lib.report import between, count, read, section, source, table

_STAGES = ("read", "duplicates", "tokenize", "examples")
_TOKENIZE = ("tokenize", "vocabulary")
_SIZES = {"20 GB (English Wikipedia)": 20e9, "1 TB": 1e12}
_WORKERS = (2, 16, 128)


def preparing() -> str:
    found = read("prepare")
    if found is None:
        return ""
    size = sum(found["text_bytes"].values())
    kinds = ", ".join(
        f"{kind} {bytes_ / 1e6:.0f} MB" for kind, bytes_ in found["text_bytes"].items()
    )
    documents = found["runs"][0]["statistics"]["documents"]
    runs = [_run_row(run, size) for run in found["runs"]]
    columns = ["seconds", "MB/s", "of the library's", "library", *_STAGES, "all but tokenize"]
    return section(
        "Preparing a corpus",
        f"`python -m bert_unpad.data prepare` on text of this machine ({kinds}; "
        f"{documents:,} distinct documents): pairs of at most 128 tokens with a given vocabulary "
        f'of WordPiece. One run each, all with the same bytes as result. "Of the library\'s": the '
        "whole, over `encode_batch_fast` of the `tokenizers` library on the same documents and as "
        "many threads. The other columns are MB of text a second of one worker, or of one of the "
        "library's threads. A vocabulary of a sample "
        f"of {found['vocabulary_sample_mb']:g} MB takes {found['vocabulary_seconds']:.0f} s more."
        f"{_start_of_ray(found)}",
        source("prepare", found),
        table(["engine", "workers", *columns], runs),
        "The memory of a worker does not grow with the corpus, but with its blocks, which have 8 "
        "MiB in the first 4 GB and 128 MiB from 64 GB on:",
        table(["text", "blocks", "workers", "GB of the largest worker"], _memory_rows(found, size)),
        "Hours that larger corpora would take, computed from the last run in processes: text over "
        "the rate of its workers, and the vocabulary once. They leave out waiting for disks.",
        table(
            ["text", *(f"{workers} workers" for workers in _WORKERS)],
            ([name, *_hours(found, size, text)] for name, text in _SIZES.items()),
        ),
    )


def _start_of_ray(found: dict[str, Any]) -> str:
    seconds = [run["start_seconds"] for run in found["runs"] if run["engine"] == "ray"]
    return f" Ray's local cluster takes {seconds[0]:.0f} s of its row to start." if seconds else ""


def _run_row(run: dict[str, Any], size: int) -> list[str]:
    rates = {name: size / 1e6 / run["stages"][name] for name in _STAGES}
    rest = sum(seconds for name, seconds in run["stages"].items() if name not in _TOKENIZE)
    whole = run["seconds"]
    return [
        *(run["engine"], str(run["workers"]), f"{whole:.1f}", f"{size / 1e6 / whole:.2f}"),
        f"{whole / run['library_seconds']:.2f}",
        f"{size / 1e6 / run['library_seconds'] / run['workers']:.1f}",
        *(f"{rate:.1f}" for rate in rates.values()),
        f"{size / 1e6 / rest:.1f}",
    ]


def _memory_rows(found: dict[str, Any], size: int) -> list[list[str]]:
    whole = _last_of_processes(found) | {"text_bytes": size, "block_bytes": 8 << 20}
    half, large = found["memory"]
    return [
        [
            f"{run['text_bytes'] / 1e6:.0f} MB",
            f"{run['block_bytes'] >> 20} MiB",
            str(run["workers"]),
            f"{run['worker_bytes'] / 1e9:.2f}",
        ]
        for run in (half, whole, large)
    ]


def _last_of_processes(found: dict[str, Any]) -> dict[str, Any]:
    return [run for run in found["runs"] if run["engine"] == "processes"][-1]


def _hours(found: dict[str, Any], size: int, text: float) -> list[str]:
    run = _last_of_processes(found)
    seconds = text / (size / run["seconds"]) * run["workers"]  # of one worker
    vocabulary = found["vocabulary_seconds"]
    return [f"{(seconds / workers + vocabulary) / 3600:.1f}" for workers in _WORKERS]


def importing() -> str:
    found = read("import")
    if found is None:
        return ""
    rows = []
    for x in found["results"]:
        rates = [x["bytes"] / 1e6 / seconds for seconds in x["rounds"]]
        tokens = x["tokens"] / statistics.median(x["rounds"])
        about = [x["format"], f"{x['bytes'] / 1e6:.0f}", f"{x['shard_bytes'] / 1e6:.0f}"]
        rows.append(
            [*about, f"{statistics.median(rates):.0f}", between(rates, 0), f"{tokens / 1e6:.1f}"]
        )
    rounds = len(found["results"][0]["rounds"])
    return section(
        "Importing other formats",
        "`python -m bert_unpad.data import` of random ids or examples in one process on one core, "
        "from files in the page cache, to shards on disk: MB of the files a second of CPU time, "
        f"median and range of {count(rounds, 'round')}, and millions of tokens a second. Each "
        "worker takes another file.",
        source("import", found),
        table(
            ["format", "MB", "MB of shards", "MB/s a core", "range", "million tokens/s"], rows, 1
        ),
    )


def feed() -> str:
    found = read("feed")
    if found is None:
        return ""
    rows = []
    for x in found["results"]:
        row = [str(x["length"]), x["masks"], f"{x['sequences_per_second']:,.0f}"]
        rows.append([*row, between([rate / 1000 for rate in x["rounds"]], 1)])
    shares = [x["python_left"] for x in found["results"] if x["python_left"]]
    left = f"{between([100 * share for share in shares[0]], 0)}%"
    rounds = len(found["results"][0]["rounds"])
    targets = " and ".join(
        f"{rate:,} of {length} tokens" for length, rate in found["targets"].items()
    )
    return section(
        "Feeding a rank",
        "Sequences of one length that one thread reads, masks and packs, in batches of "
        f"{found['batch_tokens']:,} tokens, from shards in the page cache; median and range of "
        f"{count(rounds, 'round')}. They are to reach {targets}. Masks are drawn "
        "([`data.mask_unit`](training/data.md#masking)). "
        f"While a thread collates, a loop of Python in another one keeps {left} of its speed.",
        source("feed", found),
        table(["length", "masks", "sequences a second", "thousands"], rows, 2),
        _opening(found["open"]),
    )


def _opening(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    middle = {name: statistics.median(values) for name, values in found["seconds"].items()}
    return (
        f"Opening {found['gb']:g} GB of prepared data in sparse files takes the first rank of a "
        f"machine {middle['first rank']:.2f} s, or {middle['first rank, cold']:.2f} s with nothing "
        f"in the page cache, and the others {middle['other ranks']:.2f} s. Dealing out an epoch of "
        f"it by `stratified`, for the first batch, takes {middle['first batch']:.1f} s."
    )
