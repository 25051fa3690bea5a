"""Whole runs in processes of their own: killed, stopped, resumed, on the same ranks and on others.

The control is a run that nothing interrupts. A resumed run must repeat its losses bit for bit on as
many ranks, and on another number of ranks use each remaining example of the epoch once.
"""

import json
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from bert_unpad.data import DataConfig, prepare
from bert_unpad.pretrain.output.checkpoint_files import newest_checkpoint
from tests.support.pretrain_runs import (
    GLOBAL_BATCH,
    finish,
    go_on,
    log_lines,
    losses,
    make_folder,
    run,
    settings,
    start,
    start_pausing,
    uses,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("pretrain")
    make_folder(path)
    return path


@pytest.fixture(scope="module")
def control(folder) -> Path:
    run(folder, "control", 2)
    return folder / "control"


@pytest.fixture(scope="module")
def killed(folder, control) -> Path:
    """A run of two ranks that SIGKILL has ended in the first epoch, between two checkpoints."""
    run_dir = folder / "killed"
    # Every fourth step is saved in the background, after the one before it.
    processes = start_pausing(folder, "killed", 2, 10)
    saved = newest_checkpoint(run_dir / "checkpoints")
    assert int(saved.name.removeprefix("step-")) in (4, 8)
    for process in reversed(processes):  # rank 0 pauses, and so does not see that rank 1 ends
        os.kill(process.pid, signal.SIGKILL)
    codes, _ = finish(folder, "killed", processes)
    assert codes == [-signal.SIGKILL] * 2
    assert len(losses(run_dir)) == 10 < len(losses(control)) // 2
    return run_dir


def test_the_control_is_complete(folder, control):
    used = uses(control)
    assert sorted(used) == [0, 1]
    examples = len(prepare(DataConfig(**settings(folder)["data"])).train)
    assert all(epoch == Counter(range(examples)) for epoch in used.values())
    summary = json.loads((control / "summary.json").read_text())
    assert summary["steps"] == 2 * -(-examples // GLOBAL_BATCH) == len(losses(control))
    assert summary["held_out"]["mlm_loss"] > 0
    output = run(folder, "control", 1)
    assert "nothing to do" in output


def test_killed_and_resumed_on_as_many_ranks(folder, control, killed):
    shutil.copytree(killed, folder / "same")
    output = run(folder, "same", 2)
    assert "continuing from" in output
    assert re.search(r"taking over \S+/same/\.lock from process \d+ on host", output)
    assert losses(folder / "same") == losses(control)
    assert uses(folder / "same") == uses(control)


def test_killed_and_resumed_on_more_ranks(folder, control, killed):
    shutil.copytree(killed, folder / "more")
    run(folder, "more", 3)
    assert uses(folder / "more") == uses(control)
    assert [x["ranks"] for x in log_lines(folder / "more", "start")] == [2, 3]
    # Other examples share a batch now, but the run goes on from where it was.
    ends = [list(losses(path).values())[-1][0] for path in (folder / "more", control)]
    assert ends[0] == pytest.approx(ends[1], rel=0.1)


def test_killed_and_resumed_on_fewer_ranks(folder, control, killed):
    """The rank that is gone has written of steps past the checkpoint, which are made again."""
    shutil.copytree(killed, folder / "fewer")
    run(folder, "fewer", 1)
    assert uses(folder / "fewer") == uses(control)


def test_damaged_checkpoints_are_left_out(folder, control):
    run_dir = folder / "damaged"
    shutil.copytree(control, run_dir)
    older, newest = sorted((run_dir / "checkpoints").iterdir())
    tensors = newest / "__0_0.distcp"
    os.truncate(tensors, tensors.stat().st_size - 1)
    output = run(folder, "damaged", 2, "--resume", "must")
    assert f"{newest} is damaged and left out: __0_0.distcp: expected" in output
    assert f"continuing from {older}" in output
    assert losses(run_dir) == losses(control)
    for path in (run_dir / "checkpoints").glob("step-?????????"):
        (path / ".metadata").unlink()
    lines = (run_dir / "metrics.jsonl").read_text()
    codes, output = finish(folder, "damaged", start(folder, "damaged", 2))
    assert codes == [2, 2]
    assert "resume: expected a whole checkpoint" in output
    assert (run_dir / "metrics.jsonl").read_text() == lines


def test_sigterm_to_one_rank_saves_and_stops_all(folder, control):
    run_dir = folder / "stopped"
    processes = start_pausing(folder, "stopped", 2, 6, "--checkpoint.every", "0")
    for _ in range(2):  # as from a job manager and from torchrun
        os.kill(processes[1].pid, signal.SIGTERM)
    go_on(run_dir)
    codes, output = finish(folder, "stopped", processes)
    assert codes == [143, 143], output
    assert 6 <= len(losses(run_dir)) <= 8
    assert len(list((run_dir / "checkpoints").glob("step-*"))) == 1
    output = run(folder, "stopped", 2)
    assert "settings changed since the last start: checkpoint.every: 0 -> 4" in output
    assert losses(run_dir) == losses(control)
    for left, right in zip(_weights(run_dir), _weights(control), strict=True):
        assert torch.equal(left, right)


def _weights(run_dir: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    weights = load_file(run_dir / "model" / "model.safetensors")
    return [weights[name] for name in sorted(weights)]


def test_resume_must_never_or_not_at_all(folder, control):
    codes, output = finish(folder, "nowhere", start(folder, "nowhere", 1, "--resume", "must"))
    assert codes == [2]
    assert "resume" in output
    shutil.copytree(control, folder / "again")
    wider = ("--model.hidden_size", "32")
    codes, output = finish(folder, "again", start(folder, "again", 1, *wider))
    assert codes == [2]
    assert "resume: " in output
    assert "expected a checkpoint of this model" in output
    saved = [(folder / name / "config.yaml").read_text() for name in ("again", "control")]
    assert saved[0] == saved[1]
    steps = ("--schedule.total_steps", "2", "--schedule.epochs", "null")
    run(folder, "again", 1, "--resume", "never", *steps)
    assert len(losses(folder / "again")) == 2
    assert losses(folder / "again.previous-1") == losses(control)


def test_two_ranks_train_as_one_does(folder):
    """The same global batches (random strategy) give the same losses, to 1e-4 over 50 steps."""
    same_batches = (
        *("--batching.strategy", "random", "--schedule.epochs", "null"),
        *("--schedule.total_steps", "50", "--checkpoint.every", "0"),
        *("--model.hidden_dropout_prob", "0", "--model.attention_probs_dropout_prob", "0"),
    )
    for ranks in (1, 2):
        run(folder, f"ranks{ranks}", ranks, *same_batches)
    one, two = (
        torch.tensor([line[0] for line in losses(folder / name).values()])
        for name in ("ranks1", "ranks2")
    )
    assert len(one) == 50
    assert one[-1] < one[0]
    torch.testing.assert_close(two, one, atol=1e-4, rtol=0)
    assert uses(folder / "ranks1") == uses(folder / "ranks2")


# The checkpoint of step 4 lies within an interval of three updates.
@pytest.mark.parametrize(("optimizer", "every"), [("fused_adam", 1), ("lamb", 3)])
def test_every_optimizer_goes_on_with_the_same_bits(folder, optimizer, every):
    short = (
        *("--optimizer.name", optimizer, "--schedule.epochs", "null"),
        *("--schedule.total_steps", "9", "--checkpoint.keep_last", "9"),
        *("--logging.every", str(every)),
    )
    run(folder, optimizer, 1, *short)
    resumed = folder / f"{optimizer}_resumed"
    shutil.copytree(folder / optimizer, resumed)
    for checkpoint in (resumed / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) != 4:
            shutil.rmtree(checkpoint)
    assert "continuing from" in run(folder, resumed.name, 1, *short)
    assert len(losses(resumed, every)) == 9 // every
    assert losses(resumed, every) == losses(folder / optimizer, every)
    for left, right in zip(_weights(resumed), _weights(folder / optimizer), strict=True):
        assert torch.equal(left, right)
