"""Checkpoints: whole or left out, a snapshot of one moment, loadable by any number of ranks."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.output import checkpoint
from bert_unpad.pretrain.output.checkpoint import Checkpointer
from bert_unpad.pretrain.output.checkpoint_files import newest_checkpoint, write_checksums
from bert_unpad.pretrain.output.metrics import JsonLines, Window, read_json_lines
from bert_unpad.pretrain.ranks import Ranks
from tests.support.processes import run_ranks
from tests.support.seeds import derived

ALONE = Ranks(0, 1, torch.device("cpu"), None)


@pytest.fixture(autouse=True)
def _one_thread():
    """Bits depend on the number of threads, and other processes of these tests have one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(derived(seed))
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.LayerNorm(40))
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2, fused=True)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(derived(step))
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
    checkpointer = Checkpointer(tmp_path, 2, ALONE)
    assert checkpointer.read(path) == ({"rank": 0}, {})
    checkpointer.load(path, model, optimizer)
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
    (tmp_path / "here" / ".saving-step-000000001").write_text("in the way")
    checkpointer.save(1, model, optimizer, {})
    with pytest.raises(CheckpointException, match="saving-step-000000001"):
        checkpointer.wait()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _link_to_device(path: Path) -> None:
    """Puts a link to a device in the place of a file, recorded with the size that devices have."""
    path.unlink()
    path.symlink_to("/dev/zero")
    checksums = path.with_name("checksums.json")
    files = json.loads(checksums.read_text())
    files["files"][path.name]["bytes"] = 0
    checksums.write_text(json.dumps(files))


DAMAGES = {
    "no metadata": (".metadata", Path.unlink),
    "half of the metadata": (".metadata", _cut),
    "half of the tensors": ("__0_0.distcp", _cut),
    "a bit of the tensors": ("__0_0.distcp", _flip_a_bit),
    "no checksums": ("checksums.json", Path.unlink),
    "half of the checksums": ("checksums.json", _cut),
    "other checksums": ("checksums.json", lambda path: path.write_text('{"files": {}}')),
    "a list of checksums": ("checksums.json", lambda path: path.write_text("[]")),
    "nested checksums": ("checksums.json", lambda path: path.write_text("[" * 10_000)),
    "a pipe of checksums": ("checksums.json", lambda path: (path.unlink(), os.mkfifo(path))),
    "an endless device": ("__0_0.distcp", lambda path: _link_to_device(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_whole_checkpoint_is_found(tmp_path, caplog, damage):
    model, optimizer = _make(seed=0)
    _train(model, optimizer, range(1))
    checkpointer = Checkpointer(tmp_path, 2, ALONE)
    for step in (3, 7):
        checkpointer.save(step, model, optimizer, {"step": step})
    checkpointer.wait()
    old, new = tmp_path / "step-000000003", tmp_path / "step-000000007"
    caplog.clear()
    assert newest_checkpoint(tmp_path) == new
    assert not caplog.messages
    file, apply = DAMAGES[damage]
    apply(new / file)
    assert newest_checkpoint(tmp_path) == old
    (message,) = caplog.messages
    assert f"{new} is damaged and left out: {file}" in message
    assert checkpointer.read(old)[0] == {"step": 3}
    checkpointer.load(old, model, optimizer)
    # It neither stands in the way of new ones nor counts as one of the last two.
    for step in (5, 7):
        checkpointer.save(step, model, optimizer, {"step": step})
    checkpointer.wait()
    assert newest_checkpoint(tmp_path) == new
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["step-000000005", new.name, f"{new.name}.damaged-1"]


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    model, optimizer = _make(seed=0)
    checkpointer = Checkpointer(tmp_path, 2, ALONE)
    checkpointer.save(3, model, optimizer, {})
    checkpointer.wait()
    (tmp_path / "step-000000003" / ".metadata").unlink()
    with pytest.raises(ConfigError, match=r"resume: expected a whole .* step-000000003: \.metad"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_called_like_a_checkpoint_does_not_stop_a_save(tmp_path, kind):
    model, optimizer = _make(seed=0)
    checkpointer = Checkpointer(tmp_path, 2, ALONE)
    in_the_way = tmp_path / "step-000000003"
    if kind == "folder":
        in_the_way.mkdir()
        (in_the_way / "__0_0.distcp").touch()
    else:
        in_the_way.touch()
    checkpointer.save(3, model, optimizer, {})
    checkpointer.wait()
    assert newest_checkpoint(tmp_path) == in_the_way
    assert (tmp_path / "step-000000003.damaged-1").exists()


class _Call:
    """A pickle of it calls `os.mkdir(path)` when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, (str(self.path),)

    def __deepcopy__(self, memo: dict) -> _Call:
        return self  # saving copies the state


def _save_poisoned(directory: Path, file: str, poison: object) -> Path:
    """A checkpoint with right checksums, of which a file or entry calls a function when read."""
    model, optimizer = _make(seed=0)
    _train(model, optimizer, range(1))
    checkpointer = Checkpointer(directory, 2, ALONE)
    if file == "optimizer":
        optimizer.state[model[0].weight]["poison"] = poison
    checkpointer.save(1, model, optimizer, {})
    checkpointer.wait()
    path = directory / "step-000000001"
    if file == ".metadata":
        metadata = pickle.loads((path / file).read_bytes())
        metadata.planner_data = poison
        (path / file).write_bytes(pickle.dumps(metadata))
    files = json.loads((path / "checksums.json").read_text())["files"]
    write_checksums(path, files)
    assert newest_checkpoint(directory) == path
    return path


@pytest.mark.parametrize("file", [".metadata", "optimizer"])
def test_nothing_in_a_checkpoint_is_called(tmp_path, file, monkeypatch):
    monkeypatch.setattr(checkpoint, "check_state", lambda *_: None)
    path = _save_poisoned(tmp_path, file, _Call(tmp_path / "made"))
    checkpointer = Checkpointer(tmp_path, 2, ALONE)
    model, optimizer = _make(seed=0)
    _train(model, optimizer, range(1))
    if file == "optimizer":
        optimizer.state[model[0].weight]["poison"] = 0
    shown = r"__0_0\.distcp: entry optimizer\S+poison" if file == "optimizer" else r"\.metadata"
    with pytest.raises(ConfigError, match=rf"resume: {path}/{shown}: it names \w+\.mkdir"):
        checkpointer.load(path, model, optimizer)
    assert not (tmp_path / "made").exists()


class _Method:
    """A pickle of it gets a class's function by its name."""

    def __reduce__(self) -> tuple[Callable, tuple[type, str]]:
        return getattr, (type(Path()), "unlink")


def test_members_of_enumerations_may_be_written_by_name(tmp_path, monkeypatch):
    """As Python 3.11.2 does; nothing else can be got so."""
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
    )
    model, optimizer = _make(seed=0)
    checkpointer = Checkpointer(tmp_path, 2, ALONE)
    checkpointer.save(1, model, optimizer, {})
    checkpointer.wait()
    path = newest_checkpoint(tmp_path)
    assert b"getattr" in (path / ".metadata").read_bytes()
    other, optimizer = _make(seed=1)
    checkpointer.load(path, other, optimizer)
    assert all(
        torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True)
    )
    path = _save_poisoned(tmp_path / "poisoned", ".metadata", _Method())
    with pytest.raises(ConfigError, match=rf"resume: {path}/\.metadata: it names \w+\.getattr"):
        Checkpointer(path.parent, 2, ALONE).load(path, other, optimizer)


def test_what_is_local_to_a_rank_comes_back(tmp_path):
    model, optimizer = _make(seed=0)
    checkpointer = Checkpointer(tmp_path, 2, ALONE)
    local = {"memory": torch.arange(5), "position": [1, "two", None]}
    checkpointer.save(1, model, optimizer, {}, local)
    checkpointer.wait()
    _, loaded = checkpointer.read(newest_checkpoint(tmp_path))
    assert torch.equal(loaded["memory"], local["memory"])
    assert loaded["position"] == local["position"]


def test_metrics_of_steps_past_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, step=0)
    for step in (1, 2, 3):
        lines.write({"kind": "train", "step": step, "loss": 1 / step})
    lines.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    assert [line["step"] for line in read_json_lines(path)] == [1, 2, 3]
    JsonLines(path, step=2).close()
    kept = [(line["step"], line["loss"]) for line in read_json_lines(path)]
    assert kept == [(1, 1.0), (2, 0.5)]
    assert not (tmp_path / "metrics.jsonl.damaged-1").exists()
    JsonLines(path, step=0).close()
    assert path.read_text() == ""


BAD_LINES = {
    "bad byte": b'{"kind": "train", "step": 1, "device": "\xff"}',
    "no step": b'{"kind": "train"}',
    "no kind": b'{"step": 1}',
    "list": b"[1, 2]",
    "text for a step": b'{"kind": "train", "step": "1"}',
    "nested": b"[" * 10_000,
    "half": b'{"kind": "tr',
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_damaged_line_costs_no_other(tmp_path, caplog, line):
    path = tmp_path / "metrics.jsonl"
    whole = [{"kind": "train", "step": step} for step in (1, 2)]
    content = b"\n".join(
        [json.dumps(whole[0]).encode(), BAD_LINES[line], b'{"kind": "train", "step": 2}\n']
    )
    path.write_bytes(content)
    JsonLines(path, step=2).close()
    assert read_json_lines(path) == whole
    assert (tmp_path / "metrics.jsonl.damaged-1").read_bytes() == content
    assert f"{path} is damaged and now called metrics.jsonl.damaged-1 (line 2" in caplog.text


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_log_is_set_aside(tmp_path, kind):
    path = tmp_path / "metrics.jsonl"
    {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
    }[kind]()
    JsonLines(path, step=2).close()
    assert path.read_text() == ""
    assert os.path.lexists(tmp_path / "metrics.jsonl.damaged-1")


def test_an_interval_cut_by_a_checkpoint_has_the_same_mean():
    torch.manual_seed(derived(3))
    outputs = [torch.rand(4) * 1000 for _ in range(50)]
    whole, first = Window(ALONE), Window(ALONE)
    for values in outputs:
        whole.add_losses(values.double())
    for values in outputs[:17]:
        first.add_losses(values.double())
    second = Window(ALONE, first.fold())
    for values in outputs[17:]:
        second.add_losses(values.double())
    assert second.close() == whole.close()
    assert all(value == 0 for value in whole.fold().values())
