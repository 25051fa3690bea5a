"""The GPU tests on a CPU: what they call still exists, and takes and gives what they say."""

import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
def test_one_case_of_each_gpu_test():
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.gpu_rehearsal", "tests/cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100
