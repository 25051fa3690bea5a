"""The lock of a folder of prepared data."""

import subprocess
import sys
import threading

from bert_unpad.data.store.cache import cache_lock
from tests.support.processes import TIMEOUT


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
