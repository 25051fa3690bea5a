"""Worker processes end with the process that started them, however that one ends."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bert_unpad.data.preparation.engines import Processes
from tests.support.paths import ROOT
from tests.support.processes import SLOWNESS, TIMEOUT

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl")


def hold(folder: Path) -> dict:
    """A job in a function of C that keeps Python's lock."""
    (folder / str(os.getpid())).touch()
    ctypes.PyDLL(None).sleep(600)
    return {}


def run_jobs(folder: str) -> None:
    with Processes(2) as engine:
        list(engine.run(hold, [(Path(folder),)] * 2))


def _wait(enough: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    until = time.monotonic() + seconds
    while not enough():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextmanager
def _started(folder: Path) -> Iterator[subprocess.Popen]:
    code = f"from {__name__} import run_jobs; run_jobs({str(folder)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _children(process: subprocess.Popen) -> list[int]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(number) for number in text.split()]


def _is_running(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_workers_in_c_end_with_a_killed_process(tmp_path):
    with _started(tmp_path) as process:
        _wait(lambda: len(list(tmp_path.iterdir())) == 2)
    numbers = [int(path.name) for path in tmp_path.iterdir()]
    _wait(lambda: not any(map(_is_running, numbers)), 10 * SLOWNESS)
    assert process.returncode == -9


def test_workers_that_begin_end_with_a_killed_process(tmp_path):
    with _started(tmp_path) as process:
        _wait(lambda: len(_children(process)) == 3)  # one tracks resources
        children = _children(process)
    _wait(lambda: not any(map(_is_running, children)), 10 * SLOWNESS)
    assert not list(tmp_path.iterdir())
