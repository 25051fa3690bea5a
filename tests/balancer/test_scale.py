"""What planning an epoch of 16 million examples for 1,024 ranks takes: CPU time and memory."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bert_unpad.data.sampling.histogram import sample_lengths
from tests.support.processes import TIMEOUT

# A process of its own, so that its peak is the balancer's.
# CPU time, as a test machine may have other work, beside that of a sort, as it may be slow.
PLAN = """
import json, sys, time
from pathlib import Path
import numpy as np
from bert_unpad import _balancer as balancer

lengths = np.resize(np.load(sys.argv[1]), 16_000_000)

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
before, begin = status("VmRSS"), time.process_time()
plan = balancer.EpochPlan(
    lengths, strategy="stratified", num_replicas=1024, batch_size=16, seed=1, epoch=0,
    work=balancer.WorkModel.for_hidden(1024), pool_steps=64,
)
planned = time.process_time() - begin
indices, ends = plan.rank_steps(5, 0, plan.steps)
read, size = time.process_time() - begin - planned, status("VmHWM") - before
begin = time.process_time()
np.argsort(lengths, kind="stable")  # a radix sort
print(json.dumps({
    "planned": planned, "read": read, "sorted": time.process_time() - begin,
    "bytes": size, "examples": len(indices), "steps": plan.steps,
}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures as Linux does")
def test_16_million_examples_for_1024_ranks(tmp_path):
    np.save(tmp_path / "lengths.npy", sample_lengths(2**18, seed=0))
    command = [sys.executable, "-c", PLAN, str(tmp_path / "lengths.npy")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    result = json.loads(found.stdout)
    assert result["steps"] == -(-16_000_000 // (1024 * 16))
    assert result["examples"] in (16_000_000 // 1024, 16_000_000 // 1024 + 1)
    assert result["planned"] + result["read"] < 4 * result["sorted"]
    assert result["bytes"] < 200e6
