"""Ray: the same bytes as one process gives, also where a worker is killed in mid-run."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

ray = pytest.importorskip("ray")

import random

from bert_unpad.data import DataConfig
from bert_unpad.data.formats.sources import open_files
from bert_unpad.data.preparation.engines import InProcess
from bert_unpad.data.preparation.pipeline import Pipeline
from bert_unpad.data.preparation.ray_engine import Ray
from tests.support.prepared_text import contents, write_corpus
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(folder, random.Random(derived(0)), 1000)
    config = DataConfig(str(folder), max_seq_length=48, vocab_size=200)
    output = folder.parent / "expected"
    run(config, output, InProcess())
    return config, contents(output)


@pytest.fixture(scope="module")
def engine():
    """Starting one takes longer than any of its tasks here."""
    with Ray(2) as engine:
        yield engine


def run(config, output, engine):
    source = open_files(Path(config.source))
    Pipeline(output, config, source, engine, block_bytes=5000, progress=False).run()


class Tracked:
    """Notes the process of every job in a file; one that is new waits until enough are killed."""

    def __init__(self, engine, folder):
        self.engine, self.folder, self.workers = engine, folder, engine.workers

    def run(self, job, arguments):
        return self.engine.run(noted, [(str(self.folder), job, one) for one in arguments])


def noted(folder, job, arguments):
    note = Path(folder, str(os.getpid()))
    if not note.exists():
        note.touch()
        while not Path(folder, "..", "enough").exists():
            time.sleep(0.05)
    return job(*arguments)


def test_a_killed_worker_changes_nothing(corpus, engine, tmp_path):
    config, expected = corpus
    (tmp_path / "pids").mkdir()
    killed = []

    def kill():
        while len(killed) < 2:
            for path in (tmp_path / "pids").iterdir():
                if int(path.name) not in killed:
                    killed.append(int(path.name))
                    os.kill(int(path.name), signal.SIGKILL)
                    break
            time.sleep(0.05)
        (tmp_path / "enough").touch()

    threading.Thread(target=kill, daemon=True).start()
    run(config, tmp_path / "out", Tracked(engine, tmp_path / "pids"))
    assert len(killed) == 2
    assert contents(tmp_path / "out") == expected


def fails(number):
    raise ValueError(f"number: expected another one, got {number}")


def test_a_cluster_without_cores_yet(monkeypatch):
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # of the other tests' cluster
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"memory": 1e9})
    with Ray(address="auto") as engine:
        assert engine.workers == 1


def test_errors_of_jobs_are_those_of_the_job(engine):
    with pytest.raises(ValueError, match="number: expected another one, got 5"):
        list(engine.run(fails, [(5,)]))


def waits_or_fails(folder, fails):
    """Waits until a hang should end, or fails once another call waits."""
    begun = Path(folder, "begun")
    if not fails:
        begun.touch()
        for _ in range(int(TIMEOUT / 0.05)):  # as an interruption does not end a long sleep
            time.sleep(0.05)
    while not begun.exists():
        time.sleep(0.05)
    raise ValueError("fails: expected False")


def meets(folder, name, other):
    """Ends when both of two calls run at the same time."""
    Path(folder, name).touch()
    while not Path(folder, other).exists():
        time.sleep(0.05)
    return {"name": name}


def test_other_tasks_are_cancelled_when_one_fails(engine, tmp_path):
    with pytest.raises(ValueError, match="fails: expected False"):
        list(engine.run(waits_or_fails, [(str(tmp_path), False), (str(tmp_path), True)]))
    found = list(engine.run(meets, [(str(tmp_path), "a", "b"), (str(tmp_path), "b", "a")]))
    assert sorted(one["name"] for one in found) == ["a", "b"]


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'bert_unpad\[ray\]'"):
        Ray()
    with pytest.raises(ValueError, match="workers: expected at least 1, got 0"):
        Ray(0)
