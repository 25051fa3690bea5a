"""Throughput of `python -m bert_unpad.data prepare`, beside the tokenizer library's own batch call.

    python -m benchmarks.prepare --json

Text is what this machine has (`benchmarks/lib/machine_text.py`). A vocabulary is trained once, and
given to all runs. The library encodes the same documents, in batches, on as many threads as there
are workers. A run is a process of its own: its seconds include the start of its workers, or of
Ray's local cluster. All runs have to give the same bytes. Two more runs show the memory of a
worker: with half of the text, and with the blocks that a corpus of 1 TB has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib import harness
from benchmarks.lib.machine_text import first_half, gather
from benchmarks.lib.report import ROOT
from benchmarks.lib.worker_memory import Measured, peak_bytes
from bert_unpad._extras import packages_of
from bert_unpad.data import DataConfig
from bert_unpad.data.formats.sources import open_files
from bert_unpad.data.preparation.blocks import BLOCK_BYTES, block_bytes
from bert_unpad.data.preparation.engines import InProcess, Processes
from bert_unpad.data.preparation.pipeline import Pipeline
from bert_unpad.data.preparation.ray_engine import Ray
from bert_unpad.data.prepared import read_prepared

_LENGTH = 128
_VOCABULARY = 30_522
_SAMPLE_MB = 100.0
LARGEST_BLOCK = block_bytes(sys.maxsize, BLOCK_BYTES)
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
_RUN = "import sys; from benchmarks.prepare import run_once; run_once(*sys.argv[1:])"


def library_seconds(vocabulary: Path, text: Path, threads: int) -> float:
    """Seconds that the library's batch call takes for all documents."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
    environment["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    return float(_output(_LIBRARY, vocabulary, text, environment=environment))


def prepare_apart(
    text: Path,
    output: Path,
    vocabulary: Path,
    workers: int,
    engine: str = "processes",
    block: int = BLOCK_BYTES,
) -> dict[str, Any]:
    """Prepares in a process of its own, and removes the result; see `run_once`."""
    found = json.loads(_output(_RUN, text, output, vocabulary, workers, engine, block))
    found["checksum"] = read_prepared(output)["checksum"]
    shutil.rmtree(output)
    return {"engine": engine, "workers": workers, **found}


def _output(code: str, *arguments: object, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = dict(environment or os.environ)  # in which workers of Ray find this package
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return done.stdout.decode().splitlines()[-1]


def run_once(
    text: str, output: str, vocabulary: str, workers: str, engine: str, block: str
) -> None:
    """Prepares in this process, with the engine that the command takes; prints JSON."""
    if (engine, workers) == ("processes", "1"):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        chosen: InProcess | Processes | Ray = InProcess()
    else:
        chosen = {"processes": Processes, "ray": Ray}[engine](int(workers))
    config = DataConfig(text, max_seq_length=_LENGTH, vocab_file=vocabulary)
    started = time.perf_counter()
    with chosen as opened:
        begun = time.perf_counter()
        measured, source = Measured(opened), open_files(Path(text))
        options = {"block_bytes": int(block), "progress": False}
        work = Pipeline(Path(output), config, source, measured, **options)
        statistics = work.run()
        ended = time.perf_counter()
    found = {
        "seconds": ended - started,
        "start_seconds": begun - started,
        "worker_bytes": measured.peak_bytes,
        "main_bytes": peak_bytes(),
        "stages": {name: stage.worker_seconds for name, stage in work.report.stages.items()},
        "statistics": statistics,
    }
    print(json.dumps(found))


def train_vocabulary(text: Path, folder: Path) -> tuple[Path, float]:
    """Trains a vocabulary on a sample; returns its file and the seconds that it took."""
    config = DataConfig(str(text), vocab_size=_VOCABULARY, vocab_sample_mb=_SAMPLE_MB)
    with Processes(os.cpu_count() or 1) as engine:
        work = Pipeline(folder, config, open_files(text), engine, progress=False)
        work.read()
        work.plan()
    return folder / "tokenizer" / "vocab.txt", work.report.stages["vocabulary"].worker_seconds


def rest_rate(run: dict[str, Any], size: int) -> float:
    """MB/s of one worker in all stages but the conversion to ids."""
    stages = run["stages"]
    return size / 1e6 / sum(stages[name] for name in ("read", "duplicates", "examples"))


def measure(folder: Path, size: int, workers: list[int], ray: int) -> dict[str, Any]:
    """Runs everything; returns what is written as JSON.

    Args:
        folder: a new folder.
        size: bytes of text, at most.
        workers: of the runs in processes.
        ray: workers of the run by Ray; 0 leaves it out.
    """
    text, half, output = (folder / name for name in ("text", "half", "out"))
    kinds = gather(text, size)
    print(", ".join(f"{kind} {count / 1e6:.1f} MB" for kind, count in kinds.items()), flush=True)
    total = sum(kinds.values())
    vocabulary, seconds = train_vocabulary(text, folder / "vocabulary")
    print(f"vocabulary: {seconds:.1f} s, of up to {_SAMPLE_MB:g} MB", flush=True)
    library = {
        count: library_seconds(vocabulary, text, count) for count in sorted({*workers, ray} - {0})
    }
    runs = []
    for engine, count in [*(("processes", n) for n in workers), *[("ray", ray)] * (ray > 0)]:
        run = prepare_apart(text, output, vocabulary, count, engine)
        runs.append({**run, "library_seconds": library[count]})
        _print(runs[-1], total)
    if len({run["checksum"] for run in runs}) > 1:
        raise SystemExit("the runs have given different bytes")
    memory = []
    half_size = first_half(text, half)
    for source, count, block in ((half, half_size, BLOCK_BYTES), (text, total, LARGEST_BLOCK)):
        run = prepare_apart(source, output, vocabulary, workers[-1], block=block)
        memory.append({"text_bytes": count, "block_bytes": block, **run})
        print(
            f"{count / 1e6:.0f} MB in blocks of {block / 2**20:g} MiB: {run['seconds']:.1f} s, "
            f"{run['worker_bytes'] / 1e9:.2f} GB a worker",
            flush=True,
        )
    return {
        "text_bytes": kinds,
        "vocabulary_seconds": seconds,
        "vocabulary_sample_mb": _SAMPLE_MB,
        "runs": runs,
        "memory": memory,
    }


def _print(run: dict[str, Any], total: int) -> None:
    whole, library = run["seconds"], run["library_seconds"]
    print(
        f"{run['engine']}, {run['workers']} workers: {whole:.1f} s, {total / 1e6 / whole:.2f} "
        f"MB/s; library alone {library:.1f} s, ratio {whole / library:.2f}; "
        f"{run['worker_bytes'] / 1e9:.2f} GB a worker"
    )
    for name, seconds in run["stages"].items():
        print(f"  {name:12s}{seconds:8.1f} s{total / 1e6 / max(seconds, 1e-9):10.1f} MB/s")
    print(f"  all but tokenize: {rest_rate(run, total):.1f} MB/s a worker", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=float, default=240, help="text, at most")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ray", type=int, default=2, help="workers of the run by Ray; 0: none")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results")
    args = parser.parse_args()
    if args.ray:
        with packages_of("ray"):
            import ray  # noqa: F401
    with tempfile.TemporaryDirectory() as name:
        payload = measure(Path(name), int(args.mb * 1e6), args.workers, args.ray)
    if args.json:
        print(harness.save("prepare", "cpu", harness.command(), payload))


if __name__ == "__main__":
    main()
