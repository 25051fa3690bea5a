"""Folders of the cache that are made by several processes."""

from __future__ import annotations

import functools
import gzip
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bert_unpad.data import DamagedDataError
from bert_unpad.data.readers import cached as module
from bert_unpad.data.readers import open_split
from bert_unpad.data.readers.cached import cached_each
from tests.support.masked_examples import masked_examples
from tests.support.mds_files import compress, write_mds
from tests.support.paths import ROOT
from tests.support.processes import TIMEOUT
from tests.support.tf_records import example, features_of, write_records
from tests.support.token_files import setting


def _write(path: Path, folder: Path) -> None:
    if path.read_text() == "damaged":
        raise DamagedDataError(f"{path}: expected another text")
    (folder / "process").write_text(f"{os.getpid()} {path.name}")


def _load(folder: Path) -> tuple[int, str]:
    process, name = (folder / "process").read_text().split()
    return int(process), name


def _entries(folder: Path, count: int = 5) -> list[tuple]:
    files = [folder / f"{number}.txt" for number in range(count)]
    for file in files:
        file.write_text("text" * 10)
    return [
        (folder / "cache", "test", [file], [1], functools.partial(_write, file), _load)
        for file in files
    ]


def test_large_files_are_read_by_several_processes(tmp_path, monkeypatch):
    entries = _entries(tmp_path)
    names = [f"{number}.txt" for number in range(5)]
    here = os.getpid()
    assert cached_each(entries[:2], "test") == [(here, name) for name in names[:2]]
    (tmp_path / "4.txt").write_text("damaged")
    with monkeypatch.context() as patched:
        patched.setattr(module, "_LARGE", 50)
        patched.setattr(module, "available_cores", lambda: 2)
        with pytest.raises(DamagedDataError, match=r"4\.txt: expected another text"):
            cached_each(entries, "test")
    # What is there is not made again.
    (tmp_path / "4.txt").write_text("whole")
    monkeypatch.setattr(module, "Processes", None)
    made = cached_each(entries, "test")
    assert [name for _, name in made] == names
    assert [process == here for process, _ in made] == [True, True, False, False, True]


def run_in_two_processes(folder: str) -> None:
    module._LARGE, module.available_cores = 1, lambda: 2
    made = cached_each(_entries(Path(folder)), "test")
    print(os.getpid() in {process for process, _ in made})


def test_a_program_from_stdin_without_a_guard_may_start_processes(tmp_path):
    program = "from tests.data.readers import test_cached\n"
    program += f"test_cached.run_in_two_processes({str(tmp_path)!r})\n"
    done = subprocess.run(
        [sys.executable, "-"],
        input=program,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


class _Elsewhere:
    """Stands for `Processes`, but only sends what they would get through pickle."""

    jobs = 0

    def __init__(self, workers: int) -> None:
        pass

    def __enter__(self) -> _Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, job: Callable[..., Any], arguments: Sequence[tuple]) -> Iterator[Any]:
        for one in arguments:
            type(self).jobs += 1
            yield job(*pickle.loads(pickle.dumps(one)))


def _write_parquet(folder: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    folder.mkdir()
    for name in "abc":
        pq.write_table(pa.table({"input_ids": [[2, 7, 3]]}), folder / f"{name}.parquet")


def _write_tfrecord(folder: Path) -> None:
    for number, raw in enumerate(masked_examples(3)):
        write_records(folder / f"part-{number:05}-of-00003", [example(features_of(raw))])


def _write_mds(folder: Path) -> None:
    for name in "abc":
        write_mds(folder / name, {"input_ids": "ndarray"}, [{"input_ids": [2, 7, 3]}])
        compress(folder / name, "gz", gzip.compress)


def _write_hdf5(folder: Path) -> None:
    pytest.importorskip("h5py")
    from tests.support.hdf5_files import write_raw

    folder.mkdir()
    for name in "abc":
        write_raw(folder / f"{name}.hdf5", masked_examples(2), "variable")


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("parquet", _write_parquet),
        ("tfrecord", _write_tfrecord),
        ("mds", _write_mds),
        ("hdf5", _write_hdf5),
    ],
)
def test_every_format_lets_processes_share_the_work(tmp_path, monkeypatch, kind, write):
    write(tmp_path / "data")
    monkeypatch.setattr(module, "_LARGE", 1)
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    monkeypatch.setattr(module, "Processes", _Elsewhere)
    monkeypatch.setattr(_Elsewhere, "jobs", 0)
    open_split(kind, tmp_path / "data", setting(tmp_path))
    assert _Elsewhere.jobs == 3
