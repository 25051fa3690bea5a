"""Whole runs with updates beside the next forward pass: the bits of runs without.

On CPUs, whose second stream does everything as late as it may: see tests/support/lazy_stream.py.
"""

import itertools
from pathlib import Path

import pytest
import torch

from bert_unpad.data import DataConfig, prepare
from bert_unpad.nn import BertForPreTraining
from bert_unpad.pretrain.update import check, overlap
from tests.support.lazy_stream import LazyStream
from tests.support.pretrain_runs import (
    WORDS,
    changed,
    command_in_turn,
    finish,
    go_back,
    in_turn,
    log_lines,
    losses,
    tiny_settings,
    write_corpus,
)
from tests.support.processes import start_ranks

pytestmark = pytest.mark.slow

STEPS = 9
# What gradients are like when an update reads them: parts of DDP's buckets, of one buffer, or on
# their own; and borders of stages, at which the model changes.
RUNS = {
    "bucket": {"clip": {"mode": "bucket"}, "batching": {"accumulation": 2}},
    "before": {"clip": {"mode": "before"}, "optimizer": {"name": "lamb"}},
    "stacking": {"growth": {"name": "stacking"}},
    "layer_drop": {"growth": {"name": "layer_drop"}, "recompute": "layer"},
    "power_sgd": {"comm": {"hook": "power_sgd", "start": 2}},
}
RESUMED = ("before", "stacking")
SAVED = 5  # the step of the checkpoint that they go on from


def _settings(folder: Path) -> dict:
    return tiny_settings(
        folder,
        seed=3,
        model={"num_hidden_layers": 4},
        data={"vocab_size": 100, "validation_share": 0.1},
        batching={"global_batch_size": 12},
        optimizer={"lr": 3e-3, "name": "fused_adam"},
        schedule={"total_steps": STEPS},
        evaluation={"every": 2, "examples": 20},
        checkpoint={"every": 1, "keep_last": 99},
    )


def _overlapped_in_turn(commands: list[tuple[int, list[str]]]) -> int:
    """What each rank does; the updates of the runs are late."""
    overlap.SideStream = LazyStream
    check._check_overlap = lambda config, device: None  # which refuses CPUs
    return in_turn([(port, [*command, "--optimizer.overlap=true"]) for port, command in commands])


def _train(folder: Path, kind: str, names: list[str], overlapped: bool, ranks: int) -> None:
    """Starts, or continues, runs in folders whose names end with one of RUNS."""
    commands = [
        command_in_turn(folder, name, changed(_settings(folder), RUNS[name.split()[-1]]))
        for name in names
    ]
    work = _overlapped_in_turn if overlapped else in_turn
    processes = start_ranks(work, ranks, commands, log=folder / f"{kind}.log")
    codes, output = finish(folder, kind, processes)
    assert codes == [0] * ranks, output


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds a plain and an overlapped run of each kind."""
    path = tmp_path_factory.mktemp("overlap")
    write_corpus(path, WORDS, documents=120, shortest=3, lengths=7)
    prepare(DataConfig(**_settings(path)["data"]), progress=False)
    for kind in ("plain", "overlapped"):
        _train(path, kind, [f"{kind} {name}" for name in RUNS], kind == "overlapped", ranks=2)
    return path


def _assert_same(ours: Path, theirs: Path) -> None:
    assert losses(ours) == losses(theirs)
    for one, other in zip(*(log_lines(run, "evaluation") for run in (ours, theirs)), strict=True):
        assert one["mlm_loss"] == other["mlm_loss"]
    ours, theirs = (
        BertForPreTraining.from_pretrained(run / "model").state_dict() for run in (ours, theirs)
    )
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize("name", RUNS)
def test_a_run_keeps_its_bits(folder, name):
    _assert_same(folder / f"overlapped {name}", folder / f"plain {name}")


def test_a_checkpoint_is_of_finished_updates(folder):
    """A plain run goes on from one of an overlapped run, and the other way round."""
    for kind, other in itertools.permutations(("plain", "overlapped")):
        resumed = [f"{other} after {kind} {name}" for name in RESUMED]
        for to in resumed:
            go_back(folder, to.partition(" after ")[2], SAVED, to)
        _train(folder, f"{other} again", resumed, other == "overlapped", ranks=2)
        for to in resumed:
            _assert_same(folder / to, folder / to.partition(" after ")[2])
