"""A worker killed under torchrun: the agent starts all of them again, and the run goes on alone."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bert_unpad.pretrain import main
from bert_unpad.pretrain.config import read_config
from tests.support.paths import ROOT
from tests.support.pretrain_runs import (
    go_on,
    log_lines,
    tiny_settings,
    wait_until_paused,
    write_corpus,
)
from tests.support.processes import TIMEOUT, free_port, join_ranks, start_ranks

pytestmark = pytest.mark.slow

STEPS = 30
KILLED_AT = 6
# Python runs this first in every process; the workers are those with a rank.
PAUSE = """
import os
if "RANK" in os.environ:
    from pathlib import Path
    from tests.support.pretrain_runs import pause_after
    pause_after({step}, Path({signs!r}))
"""


def _settings(folder: Path) -> dict:
    words = ["".join(pair) for pair in itertools.product(["ka", "lo", "mi"], repeat=2)]
    write_corpus(folder, words, documents=100)
    return tiny_settings(
        folder,
        seed=5,
        data={"vocab_size": 100},
        batching={"global_batch_size": 8},
        schedule={"total_steps": STEPS, "warmup_steps": 2},
        checkpoint={"every": 1, "background": False},
    )


def _worker(agent: int, rank: int) -> int:
    """The process of one rank below an agent of torchrun."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    for child in children:
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_launch_scripts_are_bash(name):
    subprocess.run(["bash", "-n", str(ROOT / "launch" / name)], check=True)


def test_the_job_for_kubernetes_starts_what_exists():
    job = yaml.safe_load((ROOT / "launch" / "pytorchjob.yaml").read_text())
    workers = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = workers["template"]["spec"]["containers"]
    program, script, *arguments = container["command"]
    assert program == "torchrun"
    assert (ROOT / script).is_file()
    config, _ = read_config([x.replace("configs/", f"{ROOT}/configs/") for x in arguments])
    policy = job["spec"]["elasticPolicy"]
    assert workers["replicas"] == policy["maxReplicas"]
    for nodes in (policy["minReplicas"], policy["maxReplicas"]):
        config.batching.per_rank(nodes * int(job["spec"]["nprocPerNode"]))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds workers in /proc")
def test_a_worker_killed_under_torchrun_is_replaced(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(_settings(tmp_path)))
    run = tmp_path / "killed"
    (tmp_path / "sitecustomize.py").write_text(PAUSE.format(step=KILLED_AT, signs=str(run)))
    command = ["bash", str(ROOT / "launch" / "torchrun.sh")]
    environment = {
        "MASTER": f"127.0.0.1:{free_port()}",
        "GPUS": "2",  # processes: the configuration asks for the CPU
        "RESTARTS": "1",
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT))),
        "PET_MONITOR_INTERVAL": "0.1",
    }
    with (tmp_path / "log").open("w") as log:
        agent = subprocess.Popen(
            [*command, "--config", str(file), "--run_dir", str(run)],
            stdout=log,
            stderr=log,
            env=os.environ | environment,
        )
        control = start_ranks(
            *(main, 2, ["--config", str(file), "--run_dir", str(tmp_path / "control")]),
            log=tmp_path / "control.log",
        )
        try:
            wait_until_paused(run, lambda: agent.poll() is None, tmp_path / "log")
            os.kill(_worker(agent.pid, 1), signal.SIGKILL)
            go_on(run)
            agent.wait(timeout=TIMEOUT)
        finally:
            agent.kill()
    output = (tmp_path / "log").read_text()
    assert agent.returncode == 0, output
    starts = [line["step"] for line in log_lines(run, "start")]
    assert len(starts) == 2, output
    # A step is logged before its checkpoint is written, for which the next one waits.
    assert starts[0] == 0 < KILLED_AT - 1 <= starts[1] < STEPS
    assert join_ranks(control) == []
    assert [process.exitcode for process in control] == [0, 0]
    ours, theirs = (log_lines(path, "train") for path in (run, tmp_path / "control"))
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]
    held_out = [log_lines(path, "evaluation")[-1] for path in (run, tmp_path / "control")]
    assert held_out[0] == held_out[1]
