"""Checkpoints: complete or invisible, a snapshot of one moment, loadable by any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mp import run_ranks

from bert_unpad.pretrain.checkpoint import Checkpointer, newest_checkpoint
from bert_unpad.pretrain.metrics import JsonLines, Window, read_json_lines
from bert_unpad.pretrain.ranks import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"), None)


@pytest.fixture(autouse=True)
def _one_thread():
    """Bits depend on the number of threads, and other processes of these tests have one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.LayerNorm(40))
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2, fused=True)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(8, 40)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _save_while_training(rank: int, world_size: int, directory: str) -> dict[str, torch.Tensor]:
    """Saves after 3 steps and trains on at once; returns the weights after 6."""
    group = dist.new_group(backend="gloo") if world_size > 1 else None
    ranks = Ranks(rank, world_size, torch.device("cpu"), group)
    model, optimizer = _make(seed=0)
    _train(model, optimizer, range(3))
    checkpointer = Checkpointer(Path(directory), 2, ranks)
    checkpointer.save(3, model, optimizer, {"rank": rank})
    _train(model, optimizer, range(3, 6))
    checkpointer.wait()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_is_a_snapshot_that_any_number_of_ranks_loads(tmp_path, world_size):
    if world_size == 1:
        expected = _save_while_training(0, 1, str(tmp_path))
    else:
        expected = run_ranks(_save_while_training, world_size, str(tmp_path))[0]
    path = newest_checkpoint(tmp_path)
    assert path is not None
    assert path.name == "step-000000003"
    model, optimizer = _make(seed=1)
    rest = Checkpointer(tmp_path, 2, ALONE).load(path, model, optimizer)
    assert rest == {"rank": 0}
    _train(model, optimizer, range(3, 6))
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_hyperparameters_come_from_the_configuration(tmp_path):
    model, optimizer = _make(seed=0)
    _train(model, optimizer, range(2))
    checkpointer = Checkpointer(tmp_path, 2, ALONE)
    checkpointer.save(2, model, optimizer, {})
    checkpointer.wait()
    model, optimizer = _make(seed=1)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    checkpointer.load(newest_checkpoint(tmp_path), model, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert len(optimizer.state) == 4


def test_incomplete_checkpoints_are_never_found(tmp_path):
    model, optimizer = _make(seed=0)
    _train(model, optimizer, range(1))
    checkpointer = Checkpointer(tmp_path, 3, ALONE)
    assert newest_checkpoint(tmp_path) is None
    checkpointer.save(5, model, optimizer, {})
    checkpointer.wait()
    # Being written by a process that was killed; copied by hand and interrupted.
    shutil.copytree(tmp_path / "step-000000005", tmp_path / ".saving-step-000000009")
    shutil.copytree(tmp_path / "step-000000005", tmp_path / "step-000000007")
    (tmp_path / "step-000000007" / ".metadata").unlink()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000000005"
    Checkpointer(tmp_path, 3, ALONE)
    assert not (tmp_path / ".saving-step-000000009").exists()


def test_only_the_last_checkpoints_stay(tmp_path):
    model, optimizer = _make(seed=0)
    _train(model, optimizer, range(1))
    checkpointer = Checkpointer(tmp_path, 2, ALONE)
    for step in (1, 2, 10, 100):
        checkpointer.save(step, model, optimizer, {})
    checkpointer.wait()
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["step-000000010", "step-000000100"]


def test_a_failed_save_is_reported(tmp_path):
    model, optimizer = _make(seed=0)
    _train(model, optimizer, range(1))
    checkpointer = Checkpointer(tmp_path / "here", 2, ALONE)
    (tmp_path / "here" / "step-000000001").mkdir()
    (tmp_path / "here" / "step-000000001" / "in the way").touch()
    checkpointer.save(1, model, optimizer, {})
    with pytest.raises(OSError, match="step-000000001"):
        checkpointer.wait()


def test_metrics_of_steps_past_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, step=0)
    for step in (1, 2, 3):
        lines.write({"step": step, "loss": 1 / step})
    lines.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    assert [line["step"] for line in read_json_lines(path)] == [1, 2, 3]
    JsonLines(path, step=2).close()
    assert read_json_lines(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]
    JsonLines(path, step=0).close()
    assert path.read_text() == ""


def test_an_interval_cut_by_a_checkpoint_has_the_same_mean():
    torch.manual_seed(3)
    outputs = [torch.rand(4) * 1000 for _ in range(50)]
    whole, first = Window(ALONE), Window(ALONE)
    for values in outputs:
        whole.add_outputs(tuple(values))
    for values in outputs[:17]:
        first.add_outputs(tuple(values))
    second = Window(ALONE, first.fold())
    for values in outputs[17:]:
        second.add_outputs(tuple(values))
    assert second.close() == whole.close()
    assert all(value == 0 for value in whole.fold().values())
