"""The audit of plans: its data, how it counts errors, and that its result is what code computes."""

import json
import re

import numpy as np
import pytest

from benchmarks import check_published
from benchmarks.lib import published
from benchmarks.lib.published import RUNS, lengths_of, measured_here, predict
from benchmarks.lib.report import folder
from bert_unpad.costs.cards import CARDS
from bert_unpad.costs.error_band import PUBLISHED
from bert_unpad.plan.candidates import SHARDS

NAMES = [run["name"] for run in RUNS]
RESULT = json.loads((folder("model") / "published.json").read_text())


def test_there_are_many_runs_each_with_a_source():
    assert len(RUNS) >= 40
    assert len(set(NAMES)) == len(NAMES)
    for run in RUNS:
        assert re.fullmatch(r"https://(github\.com|arxiv\.org)/\S+", run["source"]), run["name"]
        assert re.search(r"\d", run["says"]), run["name"]  # a figure, as the source has it
        assert "Samsung" not in run["source"]


def test_configurations_are_whole():
    for run in RUNS:
        for name in ("gpus", "gpus_per_node", "adapters", "batch", "accumulation"):
            assert run[name] > 0, (run["name"], name)
        assert run["sequences_per_second"] > 0
        assert run["gpus"] % run["gpus_per_node"] == 0
        assert run["card"] in CARDS
        assert run["shard"] in SHARDS
        assert run["kernels"] in ("fused", "scores", "eager")
        assert set(run.get("assumed", ())) < set(run)


def test_what_is_assumed_of_passes_matters_little():
    assumed = [run for run in RUNS if "accumulation" in run.get("assumed", ())]
    assert assumed
    for run in (run for run in assumed if run["batch"] % 2 == 0):
        halved = {"batch": run["batch"] / 2, "accumulation": 2 * run["accumulation"]}
        assert predict(run | halved) == pytest.approx(predict(run), rel=0.12), run["name"]


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_every_run_is_planned_as_the_result_says(run):
    (row,) = (row for row in RESULT["runs"] if row["name"] == run["name"])
    assert row["published"] == run["sequences_per_second"]
    assert predict(run) == pytest.approx(row["predicted"], rel=1e-6)
    assert row["error"] == pytest.approx(row["predicted"] / row["published"] - 1)


def test_plans_print_the_bands_of_the_result():
    everything = RESULT["halves"]["all"]
    assert everything == check_published.summary([row["error"] for row in RESULT["runs"]])
    for name, value in PUBLISHED._asdict().items():
        assert value == pytest.approx(everything[name], abs=0.0006), name
    assert {half: found["runs"] for half, found in RESULT["halves"].items()} == {
        "fitted": len(RUNS) // 2,
        "shown": len(RUNS) // 2,
        "all": len(RUNS),
    }


def test_this_packages_own_steps_are_met():
    errors = [abs(row["error"]) for row in measured_here()]
    assert len(errors) == 8
    assert max(errors) < 0.10


def test_a_summary_by_hand():
    errors = [0.1, -0.2, 0.3, 0, 0, 0, 0, 0, 0, -0.9]
    assert check_published.summary(errors) == {
        "runs": 10,
        "median": 0.0,
        "most": 0.3,
        "worst": 0.9,
    }


def test_lengths_of_a_run():
    assert lengths_of({"lengths": 5}).tolist() == [0, 0, 0, 0, 0, 1]
    whole, padded = lengths_of({"lengths": "wikipedia"}), lengths_of({"lengths": "wikipedia_64"})
    assert padded.sum() == whole.sum()
    assert np.flatnonzero(padded).tolist() == list(range(64, 513, 64))
    assert padded[64] == whole[1:65].sum()


def test_slower_kernels_are_slower():
    run = next(run for run in RUNS if run["kernels"] == "fused" and run["gpus"] == 1)
    rates = [predict(run | {"kernels": kind}) for kind in ("fused", "scores", "eager")]
    assert rates[0] > rates[1] > rates[2]


def test_the_fit_takes_only_what_makes_the_loss_smaller(monkeypatch):
    constants = {"x": 1.0, "y": 4.0}
    ways = {
        name: (lambda name=name: constants[name], lambda v, name=name: constants.update({name: v}))
        for name in constants
    }
    monkeypatch.setattr(check_published, "CONSTANTS", ways)

    def loss() -> float:
        return (constants["x"] - 1.2) ** 2 + (constants["y"] - 4) ** 2

    monkeypatch.setattr(check_published, "_loss", loss)
    found = check_published.fit(rounds=12)
    assert found == constants
    assert found["x"] == pytest.approx(1.2, abs=0.02)
    assert found["y"] == pytest.approx(4, abs=0.02)


def test_halves_take_turns():
    assert [check_published.half_of(number) for number in range(3)] == ["fitted", "shown", "fitted"]


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "published.png"
    check_published.plot(RESULT["runs"], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_models_are_presets_or_other_sizes():
    assert published.config_of({"model": "bert-large"}).num_hidden_layers == 24
    sizes = {"preset": "esm2-8m", "num_hidden_layers": 33}
    assert published.config_of({"model": sizes}).num_hidden_layers == 33
