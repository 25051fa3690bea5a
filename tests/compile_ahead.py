"""A pytest hook: compiles the host model's libraries beside the tests, which mostly use one core.

They are a tenth of the time that the tests take on a fresh checkout. A test that needs one before
it is made waits for it, or compiles it itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from host_cuda import build

# Which tests need which; in a module named test_host_<name>, <name>.cpp.
OTHERS = {"test_host_cuda": ["faults.cpp", "conformance.cpp"]}


def _libraries(modules: list[str]) -> list[str]:
    names = []
    for module in modules:
        own = f"{module.removeprefix('test_host_')}.cpp"
        names += OTHERS.get(module, [own] if module.startswith("test_host_") else [])
    return [name for name in names if (build.HERE / name).exists()]


def pytest_collection_finish(session: pytest.Session) -> None:
    modules = dict.fromkeys(item.path.stem for item in session.items)
    libraries = _libraries(list(modules))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # One library is needed at once, and one core has no time to spare.
    if session.config.option.collectonly or len(libraries) < 2 or cores < 2:
        return
    if build.compiler() is None:
        return
    command = [sys.executable, str(build.HERE / "build.py"), *libraries]
    # A compiler's error is reported by the test that needs the library.
    compiling = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    session.config.add_cleanup(lambda: _stop(compiling))


def _stop(process: subprocess.Popen) -> None:
    """Ends it and the compiler that it runs, if tests were stopped early."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    process.wait()
