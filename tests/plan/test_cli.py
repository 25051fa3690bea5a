"""The command `python -m bert_unpad.plan`, its calibration, and how it reads recipes."""

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch.distributed as dist

from bert_unpad.costs.error_band import error_sentence
from bert_unpad.costs.measure import fit_link
from bert_unpad.nn import BertConfig
from bert_unpad.plan import (
    Allowed,
    Candidate,
    Device,
    Planner,
    Workload,
    best,
    intra_node_link,
    network_link,
)
from bert_unpad.plan.calibrate import Calibration
from bert_unpad.plan.cli import main
from bert_unpad.plan.inputs import hardware_of, workload_of
from bert_unpad.plan.options import make_parser
from bert_unpad.plan.report import Plan
from bert_unpad.simulate import ComputeCost, Link
from tests.support.cost_models import TINY, all_of
from tests.support.paths import CONFIGS
from tests.support.processes import TIMEOUT, run_ranks

SMALL = ["--model=large", "--global-batch=512", "--steps=1000", "--nodes=3", "--network=1G"]


@pytest.fixture(scope="module")
def planned() -> dict:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main([*SMALL, "--json", "--price=2"]) == 0
    return json.loads(output.getvalue())


def test_the_json_is_stable(planned):
    assert planned["format"] == "bert_unpad plan, version 1"
    assert list(planned) == [
        *("format", "inputs", "basis", "best", "arguments", "cheapest_nodes", "curve"),
        *("alternatives", "left_out"),
    ]
    assert list(planned["inputs"]) == [
        *("parameters", "global_batch", "updates", "mean_length", "longest", "precision"),
        *("optimizer", "strategy", "nodes", "device", "cluster", "price"),
    ]
    for choice in (planned["best"], *planned["curve"], *planned["alternatives"]):
        assert list(choice) == [
            *("nodes", "batch", "accumulation", "compression", "shard", "recompute"),
            *("local_sgd_period", "ranks", "update_seconds", "memory_bytes", "shares"),
            *("bottleneck", "updates", "days", "days_band", "cost"),
        ]
        seconds = choice["update_seconds"]
        parts = ("compute", "recompute", "straggler", "compress", "network", "update")
        assert list(seconds) == [*parts, "total"]
        assert seconds["total"] == pytest.approx(sum(seconds[name] for name in parts))
        assert set(choice["shares"]) == {"compute", "network", "memory", "stragglers"}
        assert choice["shares"][choice["bottleneck"]] == max(choice["shares"].values())
        assert choice["days"] == pytest.approx(1000 * seconds["total"] / 86400)
        assert choice["cost"] == pytest.approx(choice["days"] * 24 * choice["ranks"] * 2)


def test_the_plan_is_of_the_fastest_nodes(planned):
    # 1 Gbit/s between two nodes of eight A100s costs more than the second node brings.
    assert [choice["nodes"] for choice in planned["curve"]] == [1, 2]
    assert planned["best"] == planned["curve"][0]
    assert planned["cheapest_nodes"] == 1
    assert list(planned["left_out"]) == ["3"]
    assert [choice["nodes"] for choice in planned["alternatives"]] == [2] * 4


def test_the_tables(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    assert main([*SMALL, f"--plot={picture}"]) == 0
    printed = capsys.readouterr().out
    assert "336 M parameters, 1,000 updates of 512 sequences of 256 tokens" in printed
    assert "1 node, 8 ranks: " in printed
    assert "Bottleneck: computing, " in printed
    assert "All 2 nodes would take " in printed
    assert "lost to the network" in printed
    assert "modelled: products reach 62% of 312 TFLOP/s, the peak in bf16" in printed
    assert error_sentence() in printed
    assert "a card costs 2.5 US dollars an hour" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--card=v100"], "compute capability 7.0"),
        (["--card=t4"], "precision: expected fp16 or fp32 on t4"),
        (["--card=b9"], "argument --card: expected one of"),
        (["--network=slow"], "argument --network: expected a rate"),
        (["--intra-node=slow"], "argument --intra-node: expected nvlink"),
        (["--model=huge"], "argument --model: expected base, large"),
        (["--model=missing.yaml"], "argument --model: expected a recipe"),
        (["--set=precision=bf16"], "argument --set: expected --model to be a recipe"),
        (["--model=RECIPE", "--set=precision"], "argument --set: expected KEY=VALUE"),
        (["--model=RECIPE", "--set=batching.strategy=packed"], "expected batching.strategy"),
        (
            [f"--model={CONFIGS / 'electra_small.yaml'}", "--calibrate"],
            "argument --calibrate: expected a recipe whose data.objective is not rtd",
        ),
        (["--card=a100-80", "--precision=fp8"], "precision: expected bf16, fp16 or fp32 on a100"),
        (
            ["--model=RECIPE", "--set=optimizer.name=torch.optim.SGD"],
            "expected optimizer.name of one of adamw, fused_adam, lamb, lans, stable_adamw, muon, ",
        ),
        (
            ["--model=RECIPE", "--set=model.preset=lost/config.json"],
            "bert_small.yaml: model.preset: expected one of albert-base, bert-base, ",
        ),
        (
            ["--model=RECIPE", "--set=model.preset=lost/config.json"],
            "got 'lost/config.json' (--set model.preset=bert-large plans with that preset, --set "
            "model.preset=PATH with the sizes in another config.json)",
        ),
        (["--model=RECIPE", "--set=optimizer.name=torch.optim.SGD"], "(--optimizer plans with"),
        (["--max-length=513"], "argument --max-length: expected at most 512"),
        (["--data=/nonexistent"], "argument --data"),
        (["--nodes=0"], "argument --nodes: expected an integer of 1"),
        (["--price=-1"], "argument --price: expected a number of 0"),
        (["--products-share=1.5"], "argument --products-share: expected a share"),
        (["--shard=rack"], "argument --shard: expected a comma-separated"),
        (["--compression=fp8"], "argument --compression: expected a comma-separated"),
        (["--steps=5", "--epochs=1"], "not allowed with argument"),
        (["--steps=5", "--tokens=1e9"], "argument --tokens: expected with --epochs"),
        (["--card=l4,h900"], "argument --card: expected one of"),
        (["--card=l4", "--calibrate"], "not allowed with argument"),
        (["--global-batch=7"], "does not divide by 8 ranks"),
        (["--model=large", "--memory-share=0.01"], "the smallest configuration needs"),
    ],
)
def test_bad_input(arguments, message, capsys):
    recipe = str(CONFIGS / "bert_small.yaml")
    with pytest.raises(SystemExit, match="2"):
        main([argument.replace("RECIPE", recipe) for argument in arguments])
    assert message in capsys.readouterr().err


def workload(*arguments: str) -> Workload:
    return workload_of(make_parser().parse_args(arguments))[0]


def test_what_is_trained():
    assert workload("--epochs=2", "--global-batch=1000").updates == 32560  # 16,279,552 examples
    assert workload("--examples=1000", "--global-batch=100").updates == 10
    work = workload("--tokens=1e6", "--max-length=64", "--global-batch=8")
    assert work.longest == 64
    assert work.updates * 8 * work.mean_length == pytest.approx(1e6, rel=1e-3)


def test_recipes():
    pytest.importorskip("jsonargparse")
    work = workload(f"--model={CONFIGS / 'bert_small.yaml'}")
    assert work.config == BertConfig(
        vocab_size=8192,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    assert (work.global_batch, work.updates, work.precision) == (16, 700, "fp32")
    assert (work.longest, work.optimizer) == (128, "adamw")
    changed = ["--set=comm.bucket_mb=2", "--set=precision=fp16"]
    options = make_parser().parse_args([f"--model={CONFIGS / 'bert_small.yaml'}", *changed])
    work, bucket_mb = workload_of(options)
    assert (bucket_mb, work.precision) == (2, "fp16")
    path = CONFIGS / "bert_large_mlperf.yaml"
    changed = ["--set=model.preset=bert-large", "--set=batching.strategy=stratified"]
    work = workload(f"--model={path}", *changed, "--global-batch=64")
    assert (work.global_batch, work.updates, work.optimizer) == (64, 6700, "lamb")
    assert work.parameters == pytest.approx(336e6, rel=0.01)


def test_the_trainer_takes_what_is_planned():
    config = pytest.importorskip("bert_unpad.pretrain.config")
    recipe = ["--config", str(CONFIGS / "bert_small.yaml")]
    for candidate in (
        Candidate(2, 4, 4, "bf16", "world", "layer"),
        Candidate(2, 4, 4, "power_sgd", "node", "gelu"),
        Candidate(2, 16, local_sgd_period=4),
    ):
        run, _ = config.read_config([*recipe, *candidate.trainer_arguments(128)])
        assert run.batching.global_batch_size == 128
        assert run.batching.accumulation == candidate.accumulation
        assert (run.optimizer.shard, run.recompute) == (candidate.shard, candidate.recompute)
        assert (run.clip.wire_dtype == "bf16") == (candidate.compression == "bf16")
        assert (run.comm.hook == "power_sgd") == (candidate.compression == "power_sgd")
        assert (run.comm.hook == "post_local_sgd") == (candidate.local_sgd_period > 1)
        assert run.comm.local_sgd_period in (candidate.local_sgd_period, 8)


@pytest.mark.parametrize(("device", "per_node"), [("cpu", 2), ("cpu", 1), ("cuda", 2)])
def test_the_options_printed_are_those_predicted(device, per_node, monkeypatch):
    """gloo's allreduce is one ring through all ranks, unless gradients go by the hook."""
    config = pytest.importorskip("bert_unpad.pretrain.config")
    found = Calibration(Device("this", 1e12, ComputeCost(1e-6, 1e-9, 1e-3), 0.07, 0.03), None, [])
    monkeypatch.setattr("bert_unpad.plan.calibrate.calibrate", lambda *_, **__: found)
    arguments = [f"--model={CONFIGS / 'bert_small.yaml'}", "--calibrate", f"--device={device}"]
    arguments += [f"--gpus-per-node={per_node}", "--nodes=2", "--network=100M"]
    options = make_parser().parse_args(arguments)
    work, _ = workload_of(options)
    planner = Planner(work, *hardware_of(options, work)[:2])
    chosen = best(planner, 2, Allowed())
    plan = Plan(planner, 2, None, [], [chosen], [], {}).to_dict()
    recipe = ["--config", str(CONFIGS / "bert_small.yaml")]
    run, _ = config.read_config([*recipe, *plan["arguments"]])
    within = device == "cpu" and per_node == 2
    assert run.comm.hook == ("hierarchical" if within else "allreduce")
    hops = Planner(work, planner.device, replace(planner.cluster, flat=False))
    assert chosen.time.total == hops.update_time(chosen.candidate).total
    for other in (Candidate(2, 4, 2, "power_sgd"), Candidate(2, 4, 2, local_sgd_period=4)):
        slower = planner.update_time(other).network / hops.update_time(other).network
        assert slower > 1.2 if within else slower == 1


def test_the_commands_need_no_package_of_the_trainer():
    code = """
import sys
import bert_unpad.plan.cli, bert_unpad.simulate.cli
found = {name.partition(".")[0] for name in sys.modules} & {"jsonargparse", "tokenizers", "yaml"}
assert not found, found
assert "bert_unpad.pretrain" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT, check=True)


def test_links_are_fitted():
    sizes = [1e3, 1e5, 1e7]
    seconds = [2 * 3 * (1e-4 + size / 4 / 1e9) for size in sizes]
    link = fit_link(sizes, seconds, 4)
    assert (link.latency, link.bandwidth) == (pytest.approx(1e-4), pytest.approx(1e9))
    noisy = fit_link([1e3, 1e7], [1e-9, 1.0], 2)
    assert (noisy.latency, noisy.bandwidth) == (0, pytest.approx(1e7))
    for arguments in (([1e3], [1.0], 2), (sizes, seconds, 1), (sizes, seconds[:2], 2)):
        with pytest.raises(ValueError, match="expected 2 or more"):
            fit_link(*arguments)


def test_the_command_calibrates(tmp_path, capsys):
    TINY.to_json(tmp_path / "config.json")
    arguments = ["--calibrate=1", "--json", "--nodes=2", "--gpus-per-node=1", "--precision=fp32"]
    assert main([f"--model={tmp_path / 'config.json'}", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    device = found["inputs"]["device"]
    assert device["name"] == "this CPU"
    assert device["passes"]["linear"] >= 0
    assert device["update"] > 0
    assert set(device["compress"]) == {"none", "bf16", "power_sgd"}
    assert found["inputs"]["price"] is found["best"]["cost"] is None
    assert found["basis"][0].startswith("measured on this CPU: a pass takes ")
    assert not dist.is_initialized()


def _hardware(rank: int, world_size: int):
    options = make_parser().parse_args(["--calibrate=1", "--gpus-per-node=4", "--network=1G"])
    work = Workload(TINY, all_of(64), 8, 1, precision="fp32")
    return hardware_of(options, work), dist.is_initialized()


def test_ranks_calibrate_together():
    (first, there), (second, _) = run_ranks(_hardware, 2)
    assert first == second  # all agree on the means
    assert there  # a process group that was there stays
    device, cluster, price, basis = first
    assert device.one_bucket
    assert price is None
    rate = f"{cluster.node.bandwidth / 1e9:.3g} GB/s"
    assert basis[-1].startswith(f"measured between ranks of a node: {rate}")
    assert cluster.network == network_link("1G", 4)


def test_a_link_measured_between_nodes_is_shared(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    device = Device("this CPU", 1e9, ComputeCost(1e-6, 1e-9, 1e-3), 0.07, 0.03)
    found = Calibration(device, Link(1e-4, 1e9), [])
    monkeypatch.setattr("bert_unpad.plan.calibrate.calibrate", lambda *_, **__: found)
    options = make_parser().parse_args(["--calibrate", "--gpus-per-node=4", "--price=1"])
    work = Workload(TINY, all_of(64), 8, 1)
    _, cluster, price, basis = hardware_of(options, work)
    assert cluster.network == Link(1e-4, 0.25e9)
    assert cluster.node == intra_node_link("pcie")
    assert price == 1
    assert basis == [
        "measured on this CPU: a pass takes 1 ms and 1.06 us a token, an update 100 ms",
        "measured between nodes: 1 GB/s and 100 us a message",
    ]
