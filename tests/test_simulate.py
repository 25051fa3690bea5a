"""The load-balancing simulation and its command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from bert_unpad.data.histogram import sample_lengths
from bert_unpad.data.sampler import BalancedSampler
from bert_unpad.simulate import simulate
from bert_unpad.simulate.cli import main


def test_simulation_is_of_what_the_sampler_does():
    lengths = sample_lengths(3000, seed=1)
    for strategy in ("stratified", "random"):
        result = simulate(lengths, 4, 8, strategy, seed=2)
        sampler = BalancedSampler(lengths, 4, 0, 8, seed=2, strategy=strategy)
        steps = [sampler.straggler_efficiency(i) for i in range(sampler.steps_per_epoch)]
        np.testing.assert_allclose(result.per_step, steps)
        assert result.steps == len(steps)
        assert result.efficiency == pytest.approx(np.mean(steps))
        assert result.efficiency_p5 == pytest.approx(np.percentile(steps, 5))
        assert result.efficiency_min == pytest.approx(min(steps))
        assert result.fill_padded == pytest.approx(lengths.mean() / 512)
        assert result.fill_padded < 0.6 < 0.98 < result.fill_packed <= 1


@pytest.mark.parametrize(("ranks", "batch"), [(1024, 16), (8, 56)])
def test_random_baseline_is_that_of_independent_draws(ranks, batch):
    lengths = sample_lengths(2**20, seed=3)
    result = simulate(lengths, ranks, batch, "random")
    steps = 2**20 // (ranks * batch)
    draws = sample_lengths(steps * ranks * batch, seed=4).astype(float).reshape(steps, ranks, batch)
    work = (draws * (24 * 1024**2) + draws**2 * (4 * 1024)).sum(axis=2)
    expected = (work.mean(axis=1) / work.max(axis=1)).mean()
    assert result.efficiency == pytest.approx(expected, abs=0.01)


def test_json(capsys):
    arguments = ["--ranks", "8", "--batch", "4", "--samples", "5000", "--json"]
    assert main([*arguments, "--strategy", "stratified,random"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["strategy"] for result in results] == ["stratified", "random"]
    for result in results:
        assert {"efficiency", "efficiency_p5", "fill_padded", "seconds"} < set(result)
        assert (result["ranks"], result["batch"], result["samples"]) == (8, 4, 5000)
        assert 0 < result["efficiency_min"] <= result["efficiency_p5"] <= 1
    assert results[0]["efficiency"] > results[1]["efficiency"]


def test_command_prints_a_table():
    command = [sys.executable, "-m", "bert_unpad.simulate", "--ranks=4", "--batch=2"]
    found = subprocess.run(
        [*command, "--samples=1000", "--strategy=random"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "4 ranks x 2, 1,000 examples, 125 steps" in found.stdout
    assert found.stdout.splitlines()[-1].startswith("random ")


def test_own_histogram(tmp_path, capsys):
    path = tmp_path / "counts.txt"
    path.write_text("\n".join(["0"] * 9 + ["40"] + ["0"] * 9 + ["24"]))
    arguments = ["--ranks", "2", "--batch", "2", "--histogram", str(path), "--samples", "all"]
    assert main([*arguments, "--json", "--strategy", "stratified"]) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert (result["samples"], result["steps"]) == (64, 16)
    assert result["fill_padded"] == pytest.approx((40 * 10 + 24 * 20) / (64 * 20))
    assert result["fill_packed"] == 1.0  # two of 10 fill a row of 20
    # Two lengths, both in numbers that the ranks can share: no rank ever waits.
    assert result["efficiency_min"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--ranks, --batch"),
        (["--ranks", "0", "--batch", "1"], "argument --ranks: expected an integer of 1 or more"),
        (["--ranks", "1", "--batch", "x"], "argument --batch: expected an integer of 1 or more"),
        (["--samples", "some"], "argument --samples: expected an integer of 1 or more"),
        (["--strategy", "stratified,best"], "argument --strategy: expected a comma-separated"),
        (["--histogram", "no/such/file"], "argument --histogram: .*No such file"),
        (["--seed", "-1"], "argument --seed: expected an integer of 0 or more"),
        (["--plot", "no/such/folder/plot.png"], "No such file or directory"),
        (["--plot", "plot.doc"], "doc"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    if arguments and "--ranks" not in arguments:
        arguments = ["--ranks", "2", "--batch", "2", "--samples", "50", *arguments]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err.splitlines()[-1])


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    arguments = ["--ranks", "8", "--batch", "4", "--samples", "2000", "--plot", str(path)]
    assert main(arguments) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in tmp_path.iterdir()] == ["plot.png"]
    assert "stratified" in capsys.readouterr().out


def test_plot_says_what_is_missing(tmp_path, capsys, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "plot.png"
    with pytest.raises(SystemExit):
        main(["--ranks", "2", "--batch", "2", "--samples", "50", "--plot", str(path)])
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not path.exists()
