"""The search for optimizers' settings, with made-up runs."""

import argparse
import math
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna", reason="the search needs the extra `tune`")

from benchmarks import tune

CONTENDERS = ("fused_adam/none", "lamb/bucket")


def lines_of(run_dir: Path, lr: float, best: float) -> list[dict]:
    """A run that ends the lower the nearer its rate is to the best one; far above it diverges."""
    end = 2 + abs(math.log(lr / best))
    lines = [{"kind": "train", "step": i + 1, "mlm_loss": 9 - (9 - end) * i / 9} for i in range(10)]
    if lr < 10 * best:
        lines.append({"kind": "evaluation", "step": 10, "mlm_loss": end})
    return lines


@pytest.fixture
def tuner(tmp_path, monkeypatch):
    options = argparse.Namespace(
        folder=tmp_path,
        config=tmp_path / "some.yaml",
        trials=7,
        steps=10,
        batch=8,
        ranks=1,
        seed=0,
        seeds=2,
        rest=[],
    )
    made = tune.Tuner(options)
    made.calls = []
    logs = {}

    def train(run_dir, settings):
        made.calls.append(settings)
        best = 2e-3 if settings["optimizer.name"] == "fused_adam" else 2e-2
        logs[run_dir / "metrics.jsonl"] = lines_of(run_dir, settings["optimizer.lr"], best)
        return logs[run_dir / "metrics.jsonl"]

    monkeypatch.setattr(made, "train", train)
    monkeypatch.setattr(tune, "read_json_lines", logs.__getitem__)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return made


def test_a_search_that_was_killed_goes_on(tuner):
    tuner.options.trials = 3
    killed = tuner.study("fused_adam/none").ask()  # and never told
    rate = killed.suggest_float("lr", *tune.DEFAULT_LEARNING_RATES, log=True)
    tuner.options.trials = 7
    study = tuner.study("fused_adam/none")
    states = [trial.state.name for trial in study.trials]
    assert states.count("COMPLETE") + states.count("PRUNED") == 7
    assert states[3] == "FAIL"
    assert study.trials[4].params["lr"] == rate
    assert len(tuner.calls) == 7
    tuner.study("fused_adam/none")  # nothing is left to do
    assert len(tuner.calls) == 7


def test_a_report(tuner, tmp_path):
    studies = {name: tuner.study(name) for name in CONTENDERS}
    rows = tune.report(tuner, studies)
    for name, row in rows.items():
        assert len(row["trials"]) == 7
        losses = [trial["loss"] for trial in row["trials"] if trial["loss"] is not None]
        assert row["held_out_mlm_loss"] == pytest.approx(min(losses))
        settings = row["best_settings"]
        assert f"{settings['optimizer.name']}/{settings['clip.mode']}" == name
        assert settings["optimizer.lr"] > 0
        assert len(row["training_loss_of_seeds"]) == 2
        (other,) = rows.keys() - {name}
        (steps,) = row["steps_to_final_training_loss_of"].values()
        end = rows[other]["training_loss_of_seeds"][0][-1]
        curve = row["training_loss_of_seeds"][0]
        assert steps == [tune.steps_to(curve, end)] * 2
    tune.draw(tmp_path / "tune.png", rows)
    assert (tmp_path / "tune.png").stat().st_size > 1000


def test_steps_to() -> None:
    assert tune.steps_to([3.0, 2.0, 1.5, 1.0], 1.5) == 3
    assert tune.steps_to([3.0, 2.0], 1.5) is None
    assert tune.held_out([{"kind": "evaluation", "mlm_loss": math.nan}]) is None
