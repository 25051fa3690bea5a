"""One run at a time in a folder: who holds the lock, when it is taken over, and what is refused."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.output import checkpoint, run_lock
from bert_unpad.pretrain.output.run_lock import RunLock
from bert_unpad.pretrain.ranks import Ranks
from tests.support.pretrain_runs import (
    finish,
    go_on,
    losses,
    make_folder,
    start,
    start_pausing,
)
from tests.support.processes import TIMEOUT

ELSEWHERE = {"host": "elsewhere", "boot": "b", "pid": 4321, "since": "2025-01-02 03:04:05 +0000"}


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(run_lock, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(run_lock, "_DEAD_IF_OLD_AFTER", 0.2)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "run"


def _leave(folder: Path, owner: dict = ELSEWHERE, touched: float | None = None) -> Path:
    """A lock file that another process has left, touched just now by default."""
    folder.mkdir(exist_ok=True)
    path = folder / ".lock"
    path.write_text(json.dumps(owner))
    if touched is not None:
        os.utime(path, (touched, touched))
    return path


@pytest.fixture
def touched(folder) -> Iterator[None]:
    """Touches the lock file all the time, as its owner on another host."""
    ended = threading.Event()

    def touch() -> None:
        seconds = 0
        while not ended.wait(0.001):
            seconds += 1
            if (folder / ".lock").exists():
                os.utime(folder / ".lock", (2e9 + seconds,) * 2)

    thread = threading.Thread(target=touch)
    thread.start()
    yield
    ended.set()
    thread.join()


def test_one_at_a_time_and_nothing_left(folder):
    first = RunLock(folder)
    owner = json.loads((folder / ".lock").read_text())
    assert owner["pid"] == os.getpid()
    shown = f"run_dir: .*{folder}.*process {os.getpid()} on host {owner['host']}.*delete {folder}/"
    with pytest.raises(ConfigError, match=shown):
        RunLock(folder)
    first.retain()  # as while a checkpoint is being written
    first.release()
    with pytest.raises(ConfigError):
        RunLock(folder)
    first.release()
    assert not folder.exists()
    RunLock(folder).release()
    folder.mkdir()
    RunLock(folder).release()
    assert list(folder.iterdir()) == []


def test_a_run_that_fails_keeps_the_lock_until_its_checkpoint_is_written(folder, monkeypatch):
    go_on = threading.Event()
    write = checkpoint.write_checksums

    def write_late(*arguments) -> None:
        go_on.wait()
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write_checksums", write_late)
    lock = RunLock(folder)
    model = torch.nn.Linear(2, 2)
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    checkpointer = checkpoint.Checkpointer(folder / "checkpoints", 2, ranks, lock)
    checkpointer.save(1, model, torch.optim.AdamW(model.parameters()), {})
    lock.release()
    try:
        with pytest.raises(ConfigError):
            RunLock(folder)
    finally:
        go_on.set()
    checkpointer.wait()
    RunLock(folder).release()


def test_an_earlier_run_is_set_aside_underRunLock(folder):
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    lock = RunLock(folder)
    lock.set_aside()
    aside = folder.with_name("run.previous-1")
    assert [path.name for path in aside.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(ConfigError):
        RunLock(folder)
    lock.set_aside()  # nothing but the lock is in it
    assert not folder.with_name("run.previous-2").exists()
    lock.release()


def _start(folder: Path, script: str) -> tuple[subprocess.Popen, str]:
    """A process that holds the folder's lock, and what it prints first."""
    head = "import os, sys, time\nfrom pathlib import Path\n"
    head += "from bert_unpad.pretrain.output import run_lock\n"
    take = "lock = run_lock.RunLock(Path(sys.argv[1]))\n"
    process = subprocess.Popen(
        [sys.executable, "-c", head + script.replace("TAKE\n", take), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()


def test_a_killed_owner_does_not_block_the_next_not_even_by_its_children(folder, caplog):
    caplog.set_level("INFO")
    fork = "TAKE\nchild = os.fork()\nif child: print(child, flush=True)\n"
    fork += f"time.sleep({TIMEOUT})\n"
    process, shown = _start(folder, fork)
    child = int(shown)
    try:
        with pytest.raises(ConfigError, match=f"process {process.pid} on host"):
            RunLock(folder)
        process.kill()
        process.wait()
        os.kill(child, 0)  # is there
        RunLock(folder).release()
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()
    assert f"process {process.pid} on host" in caplog.text
    assert "which is gone" in caplog.text


def test_an_owner_that_has_been_replaced_ends(folder):
    often = "run_lock._TOUCH_EVERY = 0.01\nTAKE\nprint('ready', flush=True)\n"
    often += f"time.sleep({TIMEOUT})\n"
    process, _ = _start(folder, often)
    other = folder / "other"
    other.write_text(json.dumps(ELSEWHERE))
    os.replace(other, folder / ".lock")
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert "process 4321 on host elsewhere" in errors
    assert "has taken over" in errors
    assert json.loads((folder / ".lock").read_text()) == ELSEWHERE


def test_an_owner_on_another_host_is_dead_when_it_has_not_been_heard_of(folder, caplog):
    caplog.set_level("INFO")
    _leave(folder, touched=0)
    lock = RunLock(folder)
    assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()
    lock.release()
    assert re.search(r"taking over .* from process 4321 on host elsewhere", caplog.text)


@pytest.mark.parametrize("touched", [None, 4e9])  # or a time to come: a clock was wrong
def test_waits_for_a_sign_of_an_owner_on_another_host(folder, caplog, monkeypatch, touched):
    caplog.set_level("INFO")
    monkeypatch.setattr(run_lock, "_DEAD_AFTER", 0.3)
    _leave(folder, touched=touched)
    RunLock(folder).release()
    assert "waiting up to 0 s to see whether process 4321 on host elsewhere (since" in caplog.text
    assert f"if it is dead for certain, delete {folder / '.lock'}" in caplog.text
    assert "taking over" in caplog.text


def test_an_old_time_alone_does_not_make_an_owner_dead(folder, monkeypatch, touched):
    """As where the clock of the file system has jumped ahead."""
    monkeypatch.setattr(run_lock, "_now", lambda folder: 9e9)
    _leave(folder)
    with pytest.raises(ConfigError, match="process 4321 on host elsewhere"):
        RunLock(folder)


def test_an_owner_on_another_host_that_is_heard_of_is_not_replaced(folder, touched):
    _leave(folder)
    with pytest.raises(ConfigError, match="process 4321 on host elsewhere"):
        RunLock(folder)
    assert json.loads((folder / ".lock").read_text()) == ELSEWHERE


def test_of_two_hosts_that_take_over_at_once_one_goes_on(folder, monkeypatch):
    path = _leave(folder, touched=0)
    other = ELSEWHERE | {"host": "third"}
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: path.write_text(json.dumps(other)))
    with pytest.raises(ConfigError, match="process 4321 on host third"):
        RunLock(folder)
    assert json.loads(path.read_text()) == other


def test_a_file_system_without_flocks(folder, monkeypatch):
    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)
    monkeypatch.setattr(run_lock, "_TOUCH_EVERY", 0.01)
    lock = RunLock(folder)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on host"):
        RunLock(folder)
    lock.release()
    _leave(folder, run_lock._this_machine() | {"pid": 1, "since": "then"}, touched=0)
    RunLock(folder).release()


def test_a_second_run_is_refused_on_all_ranks_and_the_first_goes_on(tmp_path):
    make_folder(tmp_path)
    run_dir = tmp_path / "run"
    first = start_pausing(tmp_path, "run", 1, 5)
    os.kill(first[0].pid, signal.SIGSTOP)  # which also stops the thread that writes checkpoints
    before = sorted(path.relative_to(run_dir) for path in run_dir.rglob("*"))
    arguments = ("--run_dir", str(run_dir), "--resume", "never")
    codes, output = finish(tmp_path, "second", start(tmp_path, "second", 2, *arguments))
    after = sorted(path.relative_to(run_dir) for path in run_dir.rglob("*"))
    os.kill(first[0].pid, signal.SIGCONT)
    go_on(run_dir)
    assert codes == [2, 2], output
    assert after == before
    for text in (output, (tmp_path / "second.log.1").read_text()):
        assert f"run_dir: expected a folder that no other run uses, got {run_dir}" in text
        assert f"process {first[0].pid} on host" in text
    codes, output = finish(tmp_path, "run", first)
    assert codes == [0], output
    assert len(losses(run_dir)) > 5
    assert not (run_dir / ".lock").exists()
