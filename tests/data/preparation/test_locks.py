"""Preparations that meet in one folder."""

import errno
import fcntl
import subprocess
import sys
import threading

import pytest

from bert_unpad.data.preparation import build
from bert_unpad.data.preparation.join import join_parts
from bert_unpad.data.preparation.locks import build_lock, cache_lock
from bert_unpad.data.preparation.parts import Part
from tests.support.pipelines import child, pipeline
from tests.support.prepared_text import contents
from tests.support.processes import TIMEOUT


def test_whole_builds_at_once(corpus, expected, tmp_path):
    processes = [child(corpus, tmp_path / "out") for _ in range(3)]
    for process in processes:
        process.join(TIMEOUT)
    codes = sorted(process.exitcode for process in processes)
    assert codes[0] == 0
    assert set(codes[1:]) <= {0, 1}
    assert contents(tmp_path / "out") == contents(expected)


def test_another_begins_at_once_with_other_settings(corpus, expected, tmp_path, monkeypatch):
    output, original, others = tmp_path / "out", build.one_at_a_time, []

    def late(path):
        if not others:
            others.append(None)
            others[0] = pipeline(corpus, output)
        return original(path)

    monkeypatch.setattr(build, "one_at_a_time", late)
    with pytest.raises(ValueError, match=r"other settings .*block_bytes 6000, got 7000"):
        pipeline(corpus, output, block_bytes=7000)
    others[0].run()
    assert contents(output) == contents(expected)


def test_only_parts_work_side_by_side(corpus, expected, tmp_path):
    output = tmp_path / "out"
    whole = pipeline(corpus, output)
    part = pipeline(corpus, output, part=Part(1, 1))
    message = f"output: expected no other process at work in {output}, got one; wait until"
    with build_lock(output / "work", alone=True):
        for call in (whole.run, part.read, part.plan, part.make_examples):
            with pytest.raises(BlockingIOError, match=message):
                call()
        with pytest.raises(BlockingIOError, match=message):
            join_parts(output)
    with build_lock(output / "work", alone=False):
        part.read()
        part.plan()
        for call in (whole.run, lambda: join_parts(output)):
            with pytest.raises(BlockingIOError, match=message):
                call()
        part.make_examples()
    assert not list(output.glob("work/failed-*"))
    join_parts(output)
    assert contents(output) == contents(expected)


def test_work_that_another_process_has_completed(corpus, expected, tmp_path):
    output = tmp_path / "out"
    late = [pipeline(corpus, output), pipeline(corpus, output, part=Part(2, 2))]
    pipeline(corpus, output).run()
    message = f"output: expected unfinished work in {output}, but another process has just compl"
    for call in (late[0].run, late[1].read):
        with pytest.raises(BlockingIOError, match=message):
            call()
    assert join_parts(output)["documents"] > 100
    assert contents(output) == contents(expected)
    assert not (output / "work").exists()


def test_file_systems_without_locks(corpus, expected, tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    pipeline(corpus, tmp_path / "out").run()
    assert contents(tmp_path / "out") == contents(expected)
    assert "out: the file system has no flock() locks; start no other process" in caplog.text


def test_lock_waits_for_its_holder_and_outlives_no_process(tmp_path):
    path = tmp_path / "x.lock"
    script = (
        "import fcntl, sys, time\nfile = open(sys.argv[1], 'a')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        f"print('held', flush=True)\ntime.sleep({TIMEOUT})\n"
    )
    acquired = threading.Event()

    def acquire():
        with cache_lock(path):
            acquired.set()

    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        thread = threading.Thread(target=acquire, daemon=True)
        thread.start()
        assert not acquired.wait(0.2)
        holder.kill()
        assert acquired.wait(TIMEOUT)
