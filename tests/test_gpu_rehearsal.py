"""The GPU tests on a CPU: what they call still exists, and takes and gives what they say; and that
a test that loses the device fails alone."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.processes import TIMEOUT


@pytest.mark.slow
def test_one_case_of_each_gpu_test():
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.gpu_rehearsal", "tests/cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 40


LOST = """
import pytest
import torch

lost = False


def synchronize():
    if lost:
        raise RuntimeError("an illegal memory access was encountered")


torch.cuda.is_initialized = lambda: True
torch.cuda.synchronize = synchronize


@pytest.mark.parametrize("number", range(5))
def test_kernel(number):
    global lost
    torch.cuda.synchronize()
    lost = number == 1
"""


@pytest.mark.parametrize(
    ("processes", "ended"), [(["-n", "1"], "1 failed, 5 passed"), ([], "2 passed")]
)
def test_a_test_that_loses_the_device_is_the_only_one_to_fail(tmp_path, processes, ended):
    """The kernel's error may show after its test: that has passed, and its process crashed."""
    imported = "from tests.support.gpu_hooks import pytest_runtest_protocol"
    (tmp_path / "conftest.py").write_text(imported)
    (tmp_path / "test_some.py").write_text(LOST)
    (tmp_path / "pytest.ini").touch()  # whatever options are in folders above
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *processes]
    # As where this test itself is run by a worker of pytest-xdist, whose variables are no sign.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_XDIST_WORKER": "gw0"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode != 0
    assert ended in done.stdout
    assert re.search(r"crashed while running '?\S*test_kernel\[1\]|the device is lost", done.stdout)
