"""How many megabytes a second one core imports, for each format of other tools.

    python -m benchmarks.import_formats --json

Writes random token ids or examples in each format to a temporary folder, one file and copies of it,
and imports them by `python -m bert_unpad.data import`'s function, in this process. Formats take
turns. Seconds are those of the process's CPU time, so that other work on the machine counts less.
The files stay in the page cache; shards are written to disk.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import harness
from bert_unpad._extras import packages_of
from bert_unpad.data.preparation.engines import InProcess
from bert_unpad.data.preparation.import_data import import_data

_FIRST = 500  # sequences or examples of the first file, from which the number of copies follows
_COPIES = 4


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_files(folder: Path, write: Any, size: int) -> None:
    """Writes files of about `size` bytes in all: one, and copies of it."""
    folder.mkdir()
    write(folder / "0", _FIRST)
    count = max(_FIRST * size // _COPIES // _size(folder), 1)
    shutil.rmtree(folder)
    folder.mkdir()
    write(folder / "0", count)
    for path in list(folder.iterdir()):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        for number in range(1, _COPIES):
            copy(path, path.with_name(f"{number}{path.suffix}"))


def measure(folder: Path, size: int, rounds: int) -> list[dict[str, Any]]:
    """Imports `size` bytes of each format; prints and returns a row of each."""
    with packages_of("hdf5"), packages_of("parquet"):
        from benchmarks.lib.feed_files import tokenizer
        from benchmarks.lib.foreign_files import FORMATS, LENGTH
    rows: dict[str, dict[str, Any]] = {}
    for number, (name, (_, write)) in enumerate(FORMATS.items()):
        write_files(folder / str(number), write, size)
        rows[name] = {"format": name, "bytes": _size(folder / str(number)), "rounds": []}
    output, options = folder / "out", {"max_seq_length": LENGTH, "tokenizer": tokenizer()}
    for turn in range(rounds + 1):  # the first does not count
        for number, (name, (kind, _)) in enumerate(FORMATS.items()):
            query = "" if kind in ("hdf5", "tfrecord") else "?add=cls,sep&long=split"
            source = f"{kind}:{folder / str(number)}{query}"
            started = time.process_time()
            found = import_data(source, output, InProcess(), **options, progress=False)
            seconds = time.process_time() - started
            if turn:
                rows[name]["rounds"].append(seconds)
            rows[name] |= {"tokens": found["train_tokens"], "shard_bytes": _size(output)}
            shutil.rmtree(output)
    for name, row in rows.items():
        rate = row["bytes"] / 1e6 / statistics.median(row["rounds"])
        print(f"{name:24s}{row['bytes'] / 1e6:7.0f} MB {rate:7.0f} MB/s a core")
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=float, default=100, help="of each format")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), int(args.mb * 1e6), args.rounds)
    if args.json:
        print(harness.save("import", "cpu", harness.command(), {"results": rows}))


if __name__ == "__main__":
    main()
