"""Whole runs in processes of their own: killed, stopped, resumed, on the same ranks and on others.

The control is a run that nothing interrupts. A resumed run must repeat its losses bit for bit on as
many ranks, and on another number of ranks use each remaining example of the epoch once.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import yaml
from mp import start_ranks

from bert_unpad.data import DataConfig, prepare
from bert_unpad.pretrain import main
from bert_unpad.pretrain.checkpoint import newest_checkpoint
from bert_unpad.pretrain.metrics import read_json_lines

TIMEOUT = 60
GLOBAL_BATCH = 12


def _settings(folder: Path) -> dict:
    """A tiny model on made-up text, two passes over it, on whatever number of ranks."""
    return {
        "seed": 11,
        "device": "cpu",
        "threads": 1,
        "recompute": "gelu",
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 32,
        },
        "data": {
            "source": str(folder / "corpus.txt"),
            "cache_dir": str(folder / "cache"),
            "max_seq_length": 32,
            "vocab_size": 120,
            "validation_share": 0.1,
        },
        "batching": {"global_batch_size": GLOBAL_BATCH},
        "optimizer": {"lr": 1e-3},
        "schedule": {"epochs": 2, "warmup_share": 0.1},
        "checkpoint": {"every": 4, "keep_last": 2},
        "evaluation": {"every": 0, "examples": 20},
        "logging": {"every": 1, "examples": True, "plots": False},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pretrain")
    words = ["".join(pair) for pair in itertools.product(["ka", "lo", "mi", "tu"], repeat=2)]
    documents = [
        "\n".join(
            " ".join(words[(d * 7 + s * 5 + w * w) % 16] for w in range(2 + (d + s) % 9)) + "."
            for s in range(2 + d % 4)
        )
        + f" d{d}."
        for d in range(150)
    ]
    (path / "corpus.txt").write_text("\n\n".join(documents) + "\n")
    settings = _settings(path)
    (path / "run.yaml").write_text(yaml.safe_dump(settings))
    prepare(DataConfig(**settings["data"]), progress=False)
    return path


def _start(folder: Path, name: str, world_size: int, *arguments: str) -> list[BaseProcess]:
    command = ["--config", str(folder / "run.yaml"), "--run_dir", str(folder / name), *arguments]
    return start_ranks(main, world_size, command, log=folder / f"{name}.log")


def _finish(folder: Path, name: str, processes: list[BaseProcess]) -> tuple[list[int], str]:
    """Exit codes, and the output of rank 0."""
    deadline = time.monotonic() + TIMEOUT
    for process in processes:
        process.join(timeout=max(deadline - time.monotonic(), 0))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    output = (folder / f"{name}.log.0").read_text()
    assert not late, f"{len(late)} of {len(processes)} ranks did not end:\n{output}"
    return [process.exitcode for process in processes], output


def _run(folder: Path, name: str, world_size: int, *arguments: str) -> str:
    codes, output = _finish(folder, name, _start(folder, name, world_size, *arguments))
    assert codes == [0] * world_size, output
    return output


def _wait_for_step(
    run_dir: Path, processes: list[BaseProcess], enough: Callable[[int], bool]
) -> None:
    """Waits until the number of the step logged last is enough."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        lines = [x for x in read_json_lines(run_dir / "metrics.jsonl") if x["kind"] == "train"]
        if lines and enough(lines[-1]["step"]):
            return
        if not all(process.is_alive() for process in processes):
            break
        time.sleep(0.005)
    raise AssertionError(f"{run_dir} did not get that far")


def _losses(run_dir: Path) -> dict[int, tuple[float, ...]]:
    """What must be the same bits, by step; each step must be there once."""
    train = [x for x in read_json_lines(run_dir / "metrics.jsonl") if x["kind"] == "train"]
    names = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "lr", "gradient_norm", "tokens")
    assert [line["step"] for line in train] == list(range(1, len(train) + 1))
    return {line["step"]: tuple(line[name] for name in names) for line in train}


def _uses(run_dir: Path) -> dict[int, Counter]:
    """How often each example was used, by epoch, over all ranks."""
    uses: dict[int, Counter] = {}
    for path in run_dir.glob("examples.rank*.jsonl"):
        for line in read_json_lines(path):
            uses.setdefault(line["epoch"], Counter()).update(line["examples"])
    return uses


@pytest.fixture(scope="module")
def control(folder) -> Path:
    _run(folder, "control", 2)
    return folder / "control"


@pytest.fixture(scope="module")
def killed(folder, control) -> Path:
    """A run of two ranks that SIGKILL has ended in the first epoch, between two checkpoints."""
    run_dir = folder / "killed"
    processes = _start(folder, "killed", 2)

    def past_a_checkpoint(step: int) -> bool:
        saved = newest_checkpoint(run_dir / "checkpoints")
        return saved is not None and step > int(saved.name.removeprefix("step-"))

    _wait_for_step(run_dir, processes, past_a_checkpoint)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    codes, _ = _finish(folder, "killed", processes)
    assert codes == [-signal.SIGKILL] * 2
    done = len(read_json_lines(run_dir / "metrics.jsonl"))
    assert done < len(read_json_lines(control / "metrics.jsonl")) - 3, "killed too late to tell"
    return run_dir


def test_the_control_is_complete(folder, control):
    uses = _uses(control)
    assert sorted(uses) == [0, 1]
    examples = len(prepare(DataConfig(**_settings(folder)["data"])).train)
    assert all(epoch == Counter(range(examples)) for epoch in uses.values())
    summary = json.loads((control / "summary.json").read_text())
    assert summary["steps"] == 2 * -(-examples // GLOBAL_BATCH) == len(_losses(control))
    assert summary["held_out"]["mlm_loss"] > 0
    output = _run(folder, "control", 1)
    assert "nothing to do" in output


def test_killed_and_resumed_on_as_many_ranks(folder, control, killed):
    shutil.copytree(killed, folder / "same")
    assert "continuing from" in _run(folder, "same", 2)
    assert _losses(folder / "same") == _losses(control)
    assert _uses(folder / "same") == _uses(control)


def test_killed_and_resumed_on_more_ranks(folder, control, killed):
    shutil.copytree(killed, folder / "more")
    _run(folder, "more", 3)
    assert _uses(folder / "more") == _uses(control)
    lines = read_json_lines(folder / "more" / "metrics.jsonl")
    assert [x["ranks"] for x in lines if x["kind"] == "start"] == [2, 3]
    # Other examples share a batch now, but the run goes on from where it was.
    ends = [list(_losses(path).values())[-1][0] for path in (folder / "more", control)]
    assert ends[0] == pytest.approx(ends[1], rel=0.1)


def test_sigterm_to_one_rank_saves_and_stops_all(folder, control):
    run_dir = folder / "stopped"
    processes = _start(folder, "stopped", 2, "--checkpoint.every", "0")
    _wait_for_step(run_dir, processes, lambda step: step >= 6)
    for _ in range(2):  # as from a job manager and from torchrun
        os.kill(processes[1].pid, signal.SIGTERM)
    codes, output = _finish(folder, "stopped", processes)
    assert codes == [143, 143], output
    assert len(list((run_dir / "checkpoints").glob("step-*"))) == 1
    output = _run(folder, "stopped", 2)
    assert "settings changed since the last start: checkpoint.every: 0 -> 4" in output
    assert _losses(run_dir) == _losses(control)
    for left, right in zip(_weights(run_dir), _weights(control), strict=True):
        assert torch.equal(left, right)


def _weights(run_dir: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    weights = load_file(run_dir / "model" / "model.safetensors")
    return [weights[name] for name in sorted(weights)]


def test_resume_must_never_or_not_at_all(folder, control):
    codes, output = _finish(folder, "nowhere", _start(folder, "nowhere", 1, "--resume", "must"))
    assert codes == [2]
    assert "resume" in output
    shutil.copytree(control, folder / "again")
    wider = ("--model.hidden_size", "32")
    codes, output = _finish(folder, "again", _start(folder, "again", 1, *wider))
    assert codes == [2]
    assert "resume: " in output
    assert "another model" in output
    saved = [(folder / name / "config.yaml").read_text() for name in ("again", "control")]
    assert saved[0] == saved[1]
    steps = ("--schedule.total_steps", "2", "--schedule.epochs", "null")
    _run(folder, "again", 1, "--resume", "never", *steps)
    assert len(_losses(folder / "again")) == 2
    assert _losses(folder / "again.previous-1") == _losses(control)


def test_two_ranks_train_as_one_does(folder):
    """The same global batches (random strategy) give the same losses, to 1e-4 over 50 steps."""
    same_batches = (
        *("--batching.strategy", "random", "--schedule.epochs", "null"),
        *("--schedule.total_steps", "50", "--checkpoint.every", "0"),
        *("--model.hidden_dropout_prob", "0", "--model.attention_probs_dropout_prob", "0"),
    )
    for ranks in (1, 2):
        _run(folder, f"ranks{ranks}", ranks, *same_batches)
    one, two = (
        torch.tensor([line[0] for line in _losses(folder / name).values()])
        for name in ("ranks1", "ranks2")
    )
    assert len(one) == 50
    assert one[-1] < one[0]
    torch.testing.assert_close(two, one, atol=1e-4, rtol=0)
    assert _uses(folder / "ranks1") == _uses(folder / "ranks2")


@pytest.mark.parametrize("optimizer", ["fused_adam", "lamb"])
def test_every_optimizer_goes_on_with_the_same_bits(folder, optimizer):
    short = (
        *("--optimizer.name", optimizer, "--schedule.epochs", "null"),
        *("--schedule.total_steps", "9", "--checkpoint.keep_last", "9"),
    )
    _run(folder, optimizer, 1, *short)
    resumed = folder / f"{optimizer}_resumed"
    shutil.copytree(folder / optimizer, resumed)
    for checkpoint in (resumed / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) != 4:
            shutil.rmtree(checkpoint)
    assert "continuing from" in _run(folder, resumed.name, 1, *short)
    assert len(_losses(resumed)) == 9
    assert _losses(resumed) == _losses(folder / optimizer)
    for left, right in zip(_weights(resumed), _weights(folder / optimizer), strict=True):
        assert torch.equal(left, right)
