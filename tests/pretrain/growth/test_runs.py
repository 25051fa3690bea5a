"""Whole runs across the borders of stages, and back to them."""

from pathlib import Path

import pytest
import torch

from bert_unpad.data import DataConfig, prepare
from bert_unpad.nn import BertForPreTraining
from bert_unpad.pretrain import main
from tests.support.pretrain_runs import (
    WORDS,
    changed,
    command_in_turn,
    finish,
    go_back,
    in_turn,
    log_lines,
    tiny_settings,
    write_corpus,
)
from tests.support.processes import start_ranks

pytestmark = pytest.mark.slow

STEPS = 12
MSLT = {"growth": {"name": "mslt", "layers": [1, 2, 4], "joint_share": 0.25}}
BUCKET = {"clip": {"mode": "bucket", "policy": "adaptive", "max_norm": 0.3}}

# What a run is told, and the checkpoints that another one goes on from: before, at and after
# borders of stages (3, 6, 9; 4, 8; 6).
RUNS = {
    "mslt": (MSLT | BUCKET, (3, 8)),
    "rewarm": (
        {
            "growth": MSLT["growth"] | {"learning_rate": "rewarm"},
            "optimizer": {"name": "fused_adam"},
        },
        (6,),
    ),
    "stacking": ({"growth": {"name": "stacking"}, "clip": {"mode": "before"}}, (3,)),
    "layer_drop": ({"growth": {"name": "layer_drop"}} | BUCKET, (1,)),
    "lengths": ({"growth": {"name": "lengths", "lengths": [16, 32]}}, (6,)),
}


def _settings(folder: Path) -> dict:
    return tiny_settings(
        folder,
        seed=3,
        model={"num_hidden_layers": 4},
        data={"vocab_size": 100, "validation_share": 0.1},
        batching={"global_batch_size": 12},
        optimizer={"lr": 3e-3},
        schedule={"total_steps": STEPS, "warmup_steps": 2},
        checkpoint={"every": 1, "keep_last": 99},
        logging={"progress": "lines", "examples": True},
    )


def _train(folder: Path, ranks: int, names: list[str]) -> None:
    """Starts, or continues, runs in folders whose names begin with that of an entry in RUNS."""
    commands = [
        command_in_turn(folder, name, changed(_settings(folder), RUNS[name.split("@")[0]][0]))
        for name in names
    ]
    processes = start_ranks(in_turn, ranks, commands, log=folder / "train.log")
    codes, output = finish(folder, "train", processes)
    assert codes == [0] * ranks, output


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds a run of each kind, on two ranks, that nothing has interrupted."""
    path = tmp_path_factory.mktemp("growth")
    write_corpus(path, WORDS, documents=120, shortest=3, lengths=7)
    prepare(DataConfig(**_settings(path)["data"]), progress=False)
    _train(path, 2, list(RUNS))
    return path


def _lines(run: Path) -> list[dict]:
    lines = log_lines(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return lines


def test_runs_go_through_their_stages(folder):
    layers = {name: [line["layers"] for line in _lines(folder / name)] for name in RUNS}
    assert layers["mslt"] == [1] * 3 + [2] * 3 + [4] * 6
    assert layers["stacking"] == [1] * 4 + [2] * 4 + [4] * 4
    assert layers["layer_drop"] == [4] * 12
    for name in RUNS:
        lines = _lines(folder / name)
        assert lines[-1]["loss"] < lines[0]["loss"], name
    tokens = [line["tokens"] for line in _lines(folder / "lengths")]
    assert tokens[5] <= 16 * 12 * 6 < tokens[11]
    saved = folder / "mslt" / "model"
    assert BertForPreTraining.from_pretrained(saved).config.num_hidden_layers == 4


def test_a_run_goes_on_across_borders_with_the_same_bits(folder):
    resumed = {f"{name}@{step}": (name, step) for name in RUNS for step in RUNS[name][1]}
    for to, (name, step) in resumed.items():
        go_back(folder, name, step, to)
    _train(folder, 2, list(resumed))
    same = ("loss", "mlm_accuracy", "gradient_norm", "clipped_share", "lr", "tokens", "layers")
    for to, (name, _) in resumed.items():
        for ours, theirs in zip(_lines(folder / to), _lines(folder / name), strict=True):
            assert [ours[key] for key in same] == [theirs[key] for key in same], (to, ours["step"])
        weights = [
            BertForPreTraining.from_pretrained(folder / run / "model").state_dict()
            for run in (to, name)
        ]
        for key, value in weights[0].items():
            assert torch.equal(value, weights[1][key]), (to, key)


def test_a_run_goes_on_in_another_stage_on_another_number_of_ranks(folder):
    names = ["mslt@5 on 1", "lengths@7 on 1"]
    for to in names:
        name, step = to.removesuffix(" on 1").split("@")
        go_back(folder, name, int(step), to)
    _train(folder, 1, names)
    for to in names:
        ours, theirs = _lines(folder / to), _lines(folder / to.split("@")[0])
        assert [line["layers"] for line in ours] == [line["layers"] for line in theirs]
        assert ours[-1]["loss"] == pytest.approx(theirs[-1]["loss"], rel=0.1)


def test_a_checkpoint_of_other_stages_is_refused(folder, capsys):
    go_back(folder, "mslt", 5, "mslt@other")
    arguments = ["--config", str(folder / "mslt.yaml"), "--run_dir", str(folder / "mslt@other")]
    assert main([*arguments, "--growth.layers", "[1, 3, 4]"]) == 2
    assert "growth: " in capsys.readouterr().err
