"""The benchmark of optimizers, on a tiny model; its peers against ours."""

import json

import pytest
import torch

from benchmarks.lib import optim_steps
from benchmarks.lib.optim_peers import ForeachLAMB


def test_a_whole_report(capsys) -> None:
    report = optim_steps.run("cpu", "tiny", rounds=2, warmup=1)
    assert json.loads(json.dumps(report)) == report
    rows = {row["contender"]: row for row in report["results"]}
    assert rows.keys() == optim_steps.OPTIMIZERS.keys()
    for name, row in rows.items():
        per_parameter = 40 if "LAMB" in name else 28
        assert row["bytes"] == per_parameter * report["parameters"]
        assert len(row["rounds"]) == 2
        rate = row["bytes"] / row["seconds"]
        assert row["gb_per_s"] == pytest.approx(rate / 1e9)
        assert row["copy_share"] == pytest.approx(rate / report["copy_bytes_per_second"])
    assert rows["bert_unpad, Adam"]["times_of_our_adam"] == 1
    assert "of copy" in capsys.readouterr().out


def test_parameters_are_those_of_the_models() -> None:
    for name, millions in (("bert-base", 110), ("bert-large", 336)):
        with torch.device("meta"):
            model = optim_steps.BertForPreTraining(optim_steps.SIZES[name])
        assert sum(p.numel() for p in model.parameters()) // 1_000_000 == millions
    parameters = optim_steps.parameters_of("tiny", "cpu")
    matrices, vectors = optim_steps.groups_of(parameters)
    assert len(matrices["params"]) + len(vectors["params"]) == len(parameters)
    assert vectors["weight_decay"] == 0 < matrices["weight_decay"]


def test_a_wrong_peer_ends_the_benchmark(monkeypatch) -> None:
    wrong = {"lr": 2e-4, "betas": (0.9, 0.999), "eps": 1e-6}
    monkeypatch.setitem(optim_steps.OPTIMIZERS, "LAMB, foreach", lambda g: ForeachLAMB(g, **wrong))
    with pytest.raises(SystemExit, match="LAMB, foreach and bert_unpad, LAMB differ by"):
        optim_steps.check_peers("cpu")
