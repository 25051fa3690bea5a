"""Throughput of `python -m bert_unpad.data prepare`, beside the tokenizer library's own batch call.

    python -m benchmarks.prepare --mb 300

Text is what this machine has (`benchmarks/lib/machine_text.py`). A vocabulary is trained once, and
given to all runs. The library encodes the same documents, in batches, on as many threads as there
are workers. A run is a process of its own: its seconds include starting it, and its memory is that
of its largest worker. `--open-gb` times opening a folder of sparse files of that size instead.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib import harness
from benchmarks.lib.machine_text import gather
from bert_unpad.data import DataConfig, WordPieceTokenizer, prepare
from bert_unpad.data.building.engines import Processes
from bert_unpad.data.building.pipeline import Pipeline
from bert_unpad.data.store.prepared import write_prepared
from bert_unpad.data.store.shard_writer import write_shard_manifest
from bert_unpad.data.text.sources import TextSource

_LENGTH = 128
_VOCABULARY = 30_522
_FILE_TOKENS = 1 << 27
_LIBRARY = """
import sys, time
from pathlib import Path
from bert_unpad.data import WordPieceTokenizer
tokenizer = WordPieceTokenizer.from_vocab_file(sys.argv[1])._tokenizer
documents = [d for p in sorted(Path(sys.argv[2]).iterdir()) for d in p.read_text().split("\\n\\n")]
started = time.perf_counter()
for first in range(0, len(documents), 1000):
    tokenizer.encode_batch_fast(documents[first : first + 1000], add_special_tokens=False)
print(time.perf_counter() - started)
"""


def library_seconds(vocabulary: Path, text: Path, threads: int) -> float:
    """Seconds that the library's batch call takes for all documents."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
    environment["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    command = [sys.executable, "-c", _LIBRARY, str(vocabulary), str(text)]
    return float(subprocess.run(command, env=environment, stdout=-1, check=True).stdout)


def run_once(text: str, output: str, vocabulary: str, workers: str) -> None:
    """Prepares in this process; prints its report as JSON."""
    started = time.perf_counter()
    config = DataConfig(text, max_seq_length=_LENGTH, vocab_file=vocabulary)
    with Processes(int(workers)) as engine:
        work = Pipeline(Path(output), config, TextSource(Path(text)), engine, progress=False)
        statistics = work.run()
    seconds = time.perf_counter() - started
    stages = {name: vars(stage) for name, stage in work.report.stages.items()}
    peak = 1024 * max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    found = {"seconds": seconds, "peak_bytes": peak, "stages": stages, "statistics": statistics}
    print(json.dumps(found))


def prepare_apart(text: Path, output: Path, vocabulary: Path, workers: int) -> dict[str, Any]:
    """Prepares in a process of its own; see `run_once`."""
    code = "import sys; from benchmarks.prepare import run_once; run_once(*sys.argv[1:])"
    places = [str(text), str(output), str(vocabulary), str(workers)]
    done = subprocess.run([sys.executable, "-c", code, *places], stdout=-1, check=True)
    return json.loads(done.stdout)


def train_vocabulary(text: Path, folder: Path) -> tuple[Path, float]:
    """Trains a vocabulary on all text; returns its file and the seconds that it took."""
    config = DataConfig(str(text), vocab_size=_VOCABULARY)
    with Processes(os.cpu_count() or 1) as engine:
        work = Pipeline(folder, config, TextSource(text), engine, progress=False)
        work.read()
        work.plan()
    return folder / "tokenizer" / "vocab.txt", work.report.stages["vocabulary"].worker_seconds


def sparse_data(folder: Path, size: int) -> None:
    """Makes prepared data whose files of tokens have `size` bytes in all and take no space."""
    tokenizer = WordPieceTokenizer(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(30_000))]
    )
    tokenizer.save(folder / "tokenizer")
    about = {
        "vocab_size": tokenizer.vocab_size,
        "unmaskable_ids": list(tokenizer.unmaskable_ids),
        "max_seq_length": _LENGTH,
        "statistics": {"documents": 1},
    }
    statistics = {"validation_documents": 1}
    for split, tokens in (("train", size // 2), ("validation", _LENGTH)):
        (folder / split).mkdir()
        tokens -= tokens % _LENGTH
        counts = {}
        for begin in range(0, tokens, _FILE_TOKENS):
            counts[f"tokens-{len(counts):06}.bin"] = min(_FILE_TOKENS, tokens - begin)
        files = {name: ("uint16", count) for name, count in counts.items()}
        examples = tokens // _LENGTH
        for name, dtype in (("second_starts", "uint16"), ("next_sentence_labels", "int8")):
            files[f"{name}.bin"] = (dtype, examples)
        for name, (dtype, count) in files.items():
            with (folder / split / name).open("wb") as file:
                file.truncate(count * np.dtype(dtype).itemsize)
        np.full(examples, _LENGTH, np.uint16).tofile(folder / split / "lengths.bin")
        np.arange(0, tokens + 1, _LENGTH, dtype=np.int64).tofile(folder / split / "offsets.bin")
        files |= {"lengths.bin": ("uint16", examples), "offsets.bin": ("int64", examples + 1)}
        described = {
            name: {"dtype": dtype, "count": count, "sha256": ""}
            for name, (dtype, count) in files.items()
        }
        write_shard_manifest(folder / split, about, described, list(counts))
    write_prepared(
        folder, source="sparse", settings={"objective": "next_or_random"}, statistics=statistics,
        tokenizer_files=tokenizer.files,
    )  # fmt: skip


def time_opening(size: int) -> dict[str, float]:
    """Seconds of opening sparse data as the first rank of a machine does it, and as others do."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        sparse_data(Path(name) / "data", size)
        config = DataConfig(f"shards:{name}/data", max_seq_length=_LENGTH)
        for rank, check in (("first rank", True), ("other ranks", False)):
            started = time.perf_counter()
            data = prepare(config, progress=False, check=check)
            found[rank] = time.perf_counter() - started
            print(f"{rank}: {len(data.train):,} examples opened in {found[rank]:.2f} s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=float, default=300, help="text, at most")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--open-gb", type=float, help="time opening so many GB instead")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results")
    args = parser.parse_args()
    if args.open_gb:
        payload: dict[str, Any] = {
            "gb": args.open_gb,
            "open": time_opening(int(args.open_gb * 1e9)),
        }
        if args.json:
            print(harness.save("open_prepared", "cpu", harness.command(), payload))
        return
    with tempfile.TemporaryDirectory() as name:
        payload = _measure(Path(name), int(args.mb * 1e6), args.workers)
    if args.json:
        print(harness.save("prepare", "cpu", harness.command(), payload))


def _measure(folder: Path, size: int, workers: list[int]) -> dict[str, Any]:
    kinds = gather(folder / "text", size)
    total = sum(kinds.values())
    print(", ".join(f"{kind} {count / 1e6:.1f} MB" for kind, count in kinds.items()))
    vocabulary, seconds = train_vocabulary(folder / "text", folder / "vocabulary")
    print(f"vocabulary: {seconds:.1f} s")
    runs: list[dict[str, Any]] = []
    for count in workers:
        library = library_seconds(vocabulary, folder / "text", count)
        run = prepare_apart(folder / "text", folder / "out", vocabulary, count)
        shutil.rmtree(folder / "out")
        runs.append({"workers": count, "library_seconds": library, **run})
        _print(runs[-1], total)
    return {"text_bytes": kinds, "vocabulary_seconds": seconds, "runs": runs}


def _print(run: dict[str, Any], total: int) -> None:
    whole, library = run["seconds"], run["library_seconds"]
    print(
        f"{run['workers']} workers: {whole:.1f} s, {total / 1e6 / whole:.2f} MB/s; library alone "
        f"{library:.1f} s, ratio {whole / library:.2f}; peak {run['peak_bytes'] / 1e9:.2f} GB"
    )
    rest = 0.0
    for name, stage in run["stages"].items():
        seconds = stage["worker_seconds"]
        rest += seconds if name not in ("tokenize", "vocabulary") else 0
        print(f"  {name:12s}{seconds:8.1f} s{total / 1e6 / max(seconds, 1e-9):10.1f} MB/s")
    print(f"  all but the tokenizer: {total / 1e6 / rest:.1f} MB/s a worker")


if __name__ == "__main__":
    main()
