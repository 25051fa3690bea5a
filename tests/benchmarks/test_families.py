"""Families at equal compute: what each contender trains, with made-up runs."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import families, tables
from benchmarks.lib import harness, report
from tests.support.seeds import derived

HELD_OUT = {"BERT": 5.0, "ModernBERT": 4.5, "ALBERT": 5.5, "ELECTRA": 6.0}


@pytest.fixture
def runs(tmp_path, monkeypatch) -> dict[str, dict]:
    """Runs the benchmark on made-up examples and logs; the settings of each run by its folder."""
    lengths = np.random.default_rng(derived(1)).integers(5, families.LENGTH, 300).astype(np.uint16)
    data = SimpleNamespace(
        train=SimpleNamespace(lengths=lengths), tokenizer=SimpleNamespace(vocab_size=500)
    )
    monkeypatch.setattr(families, "prepare", lambda config: data)
    called = {}

    def trained(run_dir, steps, settings, ranks):
        called[run_dir.name] = {"steps": steps, "ranks": ranks, **settings}
        name = run_dir.name.partition("-")[0]
        every, lines = settings["evaluation.every"], []
        for step in sorted({*range(every, steps, every), steps}):
            spent = {"step": step, "flops": 1e9 * step, "seconds": 0.1 * step}
            found = {"mlm_loss": HELD_OUT[name] + settings["seed"] / step, "mlm_accuracy": 0.1}
            if settings["data.objective"] == "rtd":
                found |= {"rtd_loss": 0.4, "rtd_accuracy": 0.9}
            lines += [{"kind": "train"} | spent, {"kind": "evaluation", "step": step} | found]
        return lines

    monkeypatch.setattr(families, "trained", trained)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    return called


def run(monkeypatch, tmp_path, *arguments: str) -> dict:
    sizes = ["--hidden", "32", "--layers", "2", "--vocab", "512", "--folder", str(tmp_path / "x")]
    monkeypatch.setattr("sys.argv", ["families.py", *sizes, *arguments])
    families.main()
    assert (tmp_path / "cpu" / "families.png").stat().st_size > 1000
    return json.loads((tmp_path / "cpu" / "families.json").read_text())


def test_all_contenders_spend_the_same(runs, monkeypatch, tmp_path) -> None:
    found = run(monkeypatch, tmp_path, "--steps", "200", "--seeds", "2")
    assert len(runs) == 2 * len(families.CONTENDERS)
    rows = {row["contender"]: row for row in found["results"]}
    budget = 200 * rows["BERT"]["flops_of_update"]
    for name, row in rows.items():
        spent = row["updates"] * row["flops_of_update"]
        assert spent == pytest.approx(budget, abs=row["flops_of_update"] / 2)
        seeds = [runs[f"{name}-seed{seed}-updates{row['updates']}"] for seed in range(2)]
        assert [(x["steps"], x["ranks"], x["seed"]) for x in seeds] == [
            (row["updates"], 2, seed) for seed in range(2)
        ]
        assert row["mlm_loss_of_seeds"][0] == HELD_OUT[name]
        assert row["mlm_loss"] == pytest.approx(HELD_OUT[name] + 0.5 / row["updates"])
    assert rows["BERT"]["updates"] == 200 < rows["ModernBERT"]["updates"]
    assert rows["ELECTRA"]["updates"] < 200
    assert rows["ALBERT"]["parameters"] < rows["BERT"]["parameters"]
    assert rows["ELECTRA"]["rtd_accuracy"] == 0.9
    assert "seconds" not in found["runs"][0]["curve"][0]
    monkeypatch.setattr(report, "RESULTS", tmp_path / "cpu")
    text = tables.training_tables.families()
    assert "| ELECTRA's generator | " in text
    assert "| 90.0% |" in text


def test_seconds_are_noted_if_asked_for(runs, monkeypatch, tmp_path) -> None:
    found = run(monkeypatch, tmp_path, "--steps", "30", "--seeds", "1", "--times")
    assert found["runs"][0]["curve"][0]["seconds"] == pytest.approx(0.3)


def test_settings_are_those_of_a_run(runs, monkeypatch, tmp_path) -> None:
    """The trainer takes them, and resolves the model that the contender's file describes."""
    run(monkeypatch, tmp_path, "--steps", "10", "--seeds", "1")
    for settings in runs.values():
        steps, _ = settings.pop("steps"), settings.pop("ranks")
        config, _ = families.read_config(families.arguments_of(tmp_path / "run", steps, settings))
        assert config.schedule.total_steps == steps
        sizes = config.model.resolve(512, config.data)
        assert (sizes.hidden_size, sizes.num_hidden_layers, sizes.vocab_size) == (32, 2, 512)
        assert not sizes.has_dropout
