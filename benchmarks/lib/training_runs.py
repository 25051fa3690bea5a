"""Runs of the trainer that comparisons are made of: started once, then read from their folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bert_unpad.pretrain import main, pretrain
from bert_unpad.pretrain.output.metrics import read_json_lines
from bert_unpad.pretrain.output.report import is_reported

ROOT = Path(__file__).resolve().parents[2]


def train_here(arguments: list[str]) -> int:
    """A run in this process, without its report; its exit code."""
    pretrain.write_report = lambda run, data: None
    return main(arguments)


def as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Settings by their keys, as the trainer's command takes them."""
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def arguments_of(run_dir: Path, steps: int, settings: Mapping[str, Any]) -> list[str]:
    """The trainer's arguments for a run on a CPU.

    Args:
        run_dir: of the run.
        steps: `schedule.total_steps`.
        settings: by their keys, in addition to configs/bert_small.yaml's, with a batch of 32 and a
            warm-up of a tenth, unless they say otherwise.
    """
    every = {
        "config": ROOT / "configs" / "bert_small.yaml",
        "run_dir": run_dir,
        "device": "cpu",
        "batching.global_batch_size": 32,
        "schedule.total_steps": steps,
        "schedule.warmup_share": 0.1,
        "logging.progress": "lines",
    }
    return as_arguments(every | dict(settings))


def trained(
    run_dir: Path, steps: int, settings: Mapping[str, Any], ranks: int = 1
) -> list[dict[str, Any]]:
    """The log of a run on a CPU, of what is there if it is complete; see `arguments_of`.

    Args:
        run_dir: of the run, which is made or continued unless it has been reported.
        steps: `schedule.total_steps`.
        settings: by their keys.
        ranks: processes of one thread each.

    Raises:
        SystemExit: the run has failed; the message ends with what it said.
    """
    if not is_reported(run_dir, steps):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "bert_unpad.pretrain"]
        command += arguments_of(run_dir, steps, settings)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise SystemExit(f"{run_dir.name} has failed:\n{done.stderr[-4000:]}")
    return read_json_lines(run_dir / "metrics.jsonl")
