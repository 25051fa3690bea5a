"""The load-balancing simulation and its command line."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from bert_unpad.costs.gradient_buckets import num_parameters
from bert_unpad.costs.timing import fit_step_cost
from bert_unpad.data.sampling.balanced_sampler import BalancedSampler
from bert_unpad.data.sampling.histogram import measure_histogram, sample_lengths
from bert_unpad.data.sampling.speed_sampler import SpeedSampler
from bert_unpad.data.store.shard_writer import ShardWriter
from bert_unpad.simulate import Fill, StepModel, simulate
from bert_unpad.simulate.cli import main
from bert_unpad.simulate.epoch import STRATEGIES
from tests.support.cost_models import TINY
from tests.support.processes import TIMEOUT


def test_simulation_is_of_what_the_sampler_does():
    lengths = sample_lengths(3000, seed=1)
    for strategy in ("stratified", "random"):
        result = simulate(lengths, 4, 8, strategy, seed=2)
        work = StepModel().cost.work
        sampler = BalancedSampler(lengths, 4, 0, 8, seed=2, strategy=strategy, work=work)
        steps = [sampler.straggler_efficiency(i) for i in range(sampler.steps_per_epoch)]
        np.testing.assert_allclose(result.per_step, steps)
        assert result.steps == len(steps)
        assert result.efficiency == pytest.approx(np.mean(steps))
        assert result.efficiency_p5 == pytest.approx(np.percentile(steps, 5))
        assert result.efficiency_min == pytest.approx(min(steps))
        assert result.work_variation == pytest.approx(sampler.work_variation())
    fill = Fill.of(lengths)
    assert fill.padded == pytest.approx(lengths.mean() / 512)
    assert fill.padded < 0.6 < 0.98 < fill.packed <= 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_can_be_simulated(strategy):
    result = simulate(sample_lengths(500, seed=1), 4, 8, strategy)
    assert result.steps == 16
    assert 0 < result.efficiency_min <= result.efficiency <= 1
    assert (result.exchange_bytes > 0) == ("/node/" in strategy or "/world/" in strategy)


def test_ranks_of_unequal_speed():
    """Dealt alike, all wait for the slowest; dealt by speed, the same work takes all alike."""
    lengths, speeds, cost = sample_lengths(4000, seed=1), [1.0, 0.5], StepModel().cost
    equal, by_speed = (
        simulate(lengths, 4, 32, strategy, speeds=speeds)
        for strategy in ("stratified", "stratified/speed")
    )
    np.testing.assert_allclose(equal.per_step[:-1], 0.75, rtol=0.01)
    sizes = lengths.astype(float)
    total = cost.linear * sizes.sum() + cost.quadratic * (sizes**2).sum()
    least = total / 3 / by_speed.steps  # of 1 + 0.5 + 1 + 0.5
    assert by_speed.efficiency > 0.97
    assert least <= by_speed.step_time.compute + by_speed.step_time.straggler < 1.05 * least
    sampler = SpeedSampler(
        BalancedSampler(lengths, 1, 0, 128, work=cost.work), 0, [1.0, 0.5] * 2, work=cost.work
    )
    steps = [sampler.straggler_efficiency() for _ in sampler]
    np.testing.assert_allclose(by_speed.per_step, steps)
    with pytest.raises(ValueError, match="speeds: expected a list of finite numbers > 0"):
        simulate(lengths, 4, 32, speeds=[1.0, 0.0])


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
    arguments = ["--ranks", "8", "--batch", "4", "--samples", "5000", "--json", "--no-scaling"]
    assert main([*arguments, "--strategy", "stratified,random,random/world/lpt"]) == 0
    printed = json.loads(capsys.readouterr().out)
    setup, results = printed["setup"], printed["results"]
    assert (setup["ranks"], setup["batch"], setup["samples"]) == (8, 4, 5000)
    assert 0 < printed["fill_padded"] < printed["fill_packed"] <= 1
    assert printed["scaling"] == []
    names = ["stratified", "random", "random/world/lpt"]
    assert [result["strategy"] for result in results] == names
    for result in results:
        assert 0 < result["efficiency_min"] <= result["efficiency_p5"] <= 1
        step = result["step_time"]
        parts = sum(step[name] for name in ("compute", "straggler", "allreduce", "exchange"))
        assert step["total"] == pytest.approx(parts)
    assert results[0]["efficiency"] > results[1]["efficiency"]
    assert results[0]["step_time"]["total"] < results[1]["step_time"]["total"]
    assert [result["exchange_bytes"] > 0 for result in results] == [False, False, True]


def test_command_prints_a_table():
    command = [sys.executable, "-m", "bert_unpad.simulate", "--ranks=4", "--batch=2"]
    found = subprocess.run(
        [*command, "--samples=1000", "--strategy=random", "--no-scaling"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    assert "4 ranks x 2, 1,000 examples, 125 steps" in found.stdout
    assert found.stdout.splitlines()[-1].startswith("random ")


def test_own_histogram(tmp_path, capsys):
    path = tmp_path / "counts.txt"
    path.write_text("\n".join(["0"] * 9 + ["40"] + ["0"] * 9 + ["24"]))
    arguments = ["--ranks", "2", "--batch", "2", "--histogram", str(path), "--samples", "all"]
    assert main([*arguments, "--json", "--no-scaling", "--strategy", "stratified"]) == 0
    printed = json.loads(capsys.readouterr().out)
    [result] = printed["results"]
    assert (printed["setup"]["samples"], result["steps"]) == (64, 16)
    assert printed["fill_padded"] == pytest.approx((40 * 10 + 24 * 20) / (64 * 20))
    assert printed["fill_packed"] == 1.0  # two of 10 fill a row of 20
    # Two lengths, both in numbers that the ranks can share: no rank ever waits.
    assert result["efficiency_min"] == pytest.approx(1.0)


def test_histogram_of_prepared_data(tmp_path, capsys):
    folder = tmp_path / "train"
    lengths = np.array([5, 7, 7, 2, 7])
    with ShardWriter(folder, vocab_size=9, unmaskable_ids=(), max_seq_length=8) as writer:
        writer.append(np.zeros(28, np.int64), lengths, lengths, np.zeros(5, np.int8))
    assert measure_histogram(folder).tolist() == [0, 0, 1, 0, 0, 1, 0, 3]
    arguments = ["--ranks=1", "--batch=2", "--samples=all", "--json", "--no-scaling"]
    assert main([*arguments, f"--histogram={tmp_path}", "--strategy=random"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["setup"]["samples"], printed["fill_padded"]) == (5, 28 / 35)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--ranks, --batch"),
        (["--fit", "cost.json", "--ranks", "2"], "required: --batch"),
        (["--ranks-per-node", "3"], "ranks: expected a multiple of ranks_per_node"),
        (["--model", "bert-huge"], "argument --model: expected one of bert-base, bert-large, "),
        (["--cost", "no/such/file"], "argument --cost: .*No such file"),
        (["--cost=-1,2"], "argument --cost: linear: expected seconds of 0 or more"),
        (["--tflops", "0"], "argument --tflops: expected a number above 0"),
        (["--histogram", "tests"], "argument --histogram: .*manifest.json is missing"),
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
    if arguments and (arguments[0] != "--ranks"):
        given = [] if "--fit" in arguments else ["--ranks", "4", "--batch", "2"]
        arguments = [*given, "--samples", "50", "--no-scaling", *arguments]
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
    assert main([*arguments, "--no-scaling"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in tmp_path.iterdir()] == ["plot.png"]
    assert "stratified" in capsys.readouterr().out


def test_plot_says_what_is_missing(tmp_path, capsys, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "plot.png"
    with pytest.raises(SystemExit):
        main(["--ranks=2", "--batch=2", "--samples=50", "--no-scaling", f"--plot={path}"])
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not path.exists()


def test_fit_of_a_real_model(tmp_path, capsys):
    with pytest.raises(ValueError, match="rounds: expected 1 or more"):
        fit_step_cost(TINY, rounds=0)
    path, config = tmp_path / "cost.json", tmp_path / "config.json"
    config.write_text(json.dumps(TINY.to_dict()))
    assert main([f"--model={config}", f"--fit={path}"]) == 0
    assert capsys.readouterr().out == ""
    stored = json.loads(path.read_text())
    assert stored["threads"] == torch.get_num_threads()
    assert [timing["tokens"] for timing in stored["timings"]] == [64] * 4 + [256] * 4
    assert all(timing["seconds"] > 0 for timing in stored["timings"])
    given = [f"--model={config}", "--ranks=2", "--batch=2", "--samples=50", "--no-scaling"]
    assert main([*given, f"--cost={path}", "--json"]) == 0
    setup = json.loads(capsys.readouterr().out)["setup"]
    assert setup["cost"]["linear"] == stored["linear"]
    assert setup["overlap"]["gradient_bytes"] == 4 * num_parameters(TINY)
