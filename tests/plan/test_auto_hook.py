"""`comm.hook: auto`: what it predicts, chooses and says, when links change, and in real runs."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.device import Device
from bert_unpad.costs.gradient_buckets import gradients_of
from bert_unpad.costs.network import Cluster, Link
from bert_unpad.costs.step import StepTime
from bert_unpad.costs.workload import Workload
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.plan import Candidate, Planner, auto_hook
from bert_unpad.plan.auto_hook import GAIN, METHODS, TIE, AutoHook, choose, predict
from bert_unpad.pretrain.config import ConfigError, read_config
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.run import Progress, Run
from tests.support.cost_models import TINY, all_of
from tests.support.pretrain_runs import (
    finish,
    go_back,
    in_turn,
    log_lines,
    losses,
    make_folder,
    mean_losses,
)
from tests.support.processes import free_port, start_ranks

CPU = torch.device("cpu")
SLOW, FAST = Link(1e-5, 1e5), Link(1e-6, 1e9)
NEEDED = ["--batching.global_batch_size", "8", "--schedule.total_steps", "1000"]
AUTO = [*NEEDED, "--comm.hook", "auto", "--model.hidden_size", "16", "--comm.start", "64"]
WINDOW = auto_hook._WINDOW
COMPRESS = 0.01  # seconds that power_sgd computes


def work(ranks: int = 4) -> Workload:
    return Workload(TINY, all_of(32), 2 * ranks, 1, precision="fp32")


def device(memory: float = 1e9, **compress: float) -> Device:
    return Device("by hand", memory, ComputeCost(1e-4), 0.01, compress=compress, one_bucket=True)


def predicted(
    nodes: int, local: int, link: Link, in_use: str = "allreduce", **changes
) -> dict[str, float]:
    cluster = Cluster(local, FAST, link, "ring", flat=True)
    found = predict(
        *(work(nodes * local), device(**changes), cluster, Candidate(nodes, 2)),
        period=8,
        in_use=in_use,
    )
    return {name: time.total for name, time in found.items()}


def test_predictions_are_those_of_a_plan():
    cluster = Cluster(2, FAST, SLOW, "ring", flat=True)
    found = predict(work(), device(bf16=0.5), cluster, Candidate(2, 2), period=8)
    planner = Planner(work(), device(bf16=0.5), cluster)
    assert list(found) == list(METHODS)
    assert found["hierarchical"] == planner.update_time(Candidate(2, 2))
    bf16 = planner.update_time(Candidate(2, 2, compression="bf16"))
    assert found["hierarchical in bf16"] == bf16
    assert found["power_sgd"] == planner.update_time(Candidate(2, 2, compression="power_sgd"))
    assert found["post_local_sgd"] == planner.update_time(Candidate(2, 2, local_sgd_period=8))
    whole = 4 * planner.workload.parameters
    assert found["allreduce"].allreduce == pytest.approx(cluster.allreduce(whole, 4), rel=0.02)


@pytest.mark.parametrize(
    ("nodes", "local", "missing"),
    [
        (2, 1, {"hierarchical", "hierarchical in bf16"}),
        (1, 2, {"hierarchical", "hierarchical in bf16", "post_local_sgd"}),
        (2, 2, set()),
    ],
)
def test_methods_that_ranks_can_use(nodes, local, missing):
    assert set(METHODS) - set(predicted(nodes, local, SLOW)) == missing


def test_what_does_not_fit_is_left_out():
    assert "power_sgd" not in predicted(2, 1, SLOW, memory=1.0)
    assert list(predicted(2, 1, SLOW, memory=1.0)) == ["allreduce", "post_local_sgd"]
    assert "power_sgd" in predicted(2, 1, SLOW, in_use="power_sgd", memory=1.0)


def test_the_fastest_is_chosen_a_simpler_one_about_as_fast_or_the_one_in_use():
    seconds = {"allreduce": 1.0, "allreduce in bf16": 0.9, "power_sgd": 0.9 * (1 - TIE / 2)}
    assert choose(seconds) == "allreduce in bf16"
    assert choose(seconds | {"power_sgd": 0.8}) == "power_sgd"
    kept = 0.8 * (1 + GAIN / 2)
    assert choose(seconds | {"power_sgd": 0.8, "allreduce": kept}, "allreduce") == "allreduce"
    assert choose(seconds | {"power_sgd": 0.8}, "allreduce") == "power_sgd"
    assert choose({"allreduce": 1.0}, "power_sgd") == "allreduce"


class World:
    """Two ranks on a link, whose updates take what a plan says, or some times that."""

    def __init__(self, monkeypatch, *options: str, saved: dict[str, str] | None = None) -> None:
        self.now, self.link, self.measured = 0.0, SLOW, 0
        self.slower: dict[str, float] = {}
        monkeypatch.setattr(auto_hook, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(auto_hook, "link_times", self._link_times)
        monkeypatch.setattr(auto_hook, "common_node_size", lambda *_: 1)
        monkeypatch.setattr(auto_hook.dist, "all_reduce", lambda *_: None)
        monkeypatch.setattr(AutoHook, "_measure_compression", lambda _: {"power_sgd": COMPRESS})
        config, _ = read_config([*AUTO, *options])
        progress = Progress(sequences=2, tokens=64, comm=saved or {})
        model = EncoderForPreTraining(TINY)
        self.run = Run(config, Ranks(0, 2, CPU, None), model, progress)
        self.hook = AutoHook(self.run)

    def _link_times(self, device, seconds, lengths, group) -> tuple[list[float], list[float]]:
        sizes = [4.0 * numbers for numbers in lengths]
        times = [self.link.ring_allreduce(size, 2) for size in sizes]
        self.now += 0.1
        self.measured += 1
        return sizes, times

    @staticmethod
    @functools.cache
    def _predicted(link: Link) -> dict[str, StepTime]:
        cluster = Cluster(1, link, link, "ring", flat=True)
        return predict(work(2), device(), cluster, Candidate(2, 4), period=8)

    def seconds(self) -> float:
        """What an update takes now."""
        found = self._predicted(self.link)[self.hook.method]
        compress = COMPRESS if self.hook.method == "power_sgd" else 0.0
        total = found.total - found.weights + compress
        return total * self.slower.get(self.hook.method, 1.0) + 0.05

    def train(self, updates: int) -> list[dict]:
        """Makes updates; what it says of choices."""
        found = []
        for _ in range(updates):
            self.run.progress.step += 1
            passes = 4 * 32 * 1e-4  # with one bucket, it is compressed when the clock has stopped
            end = self.now + self.seconds()
            begin = end - 0.05
            spans = [(begin - 0.01 - passes, begin - 0.01), (begin - 0.01, begin)]
            self.now = end
            found.append(self.hook.after_update(spans))
        return [one for one in found if one is not None]


@pytest.mark.parametrize(
    ("guarantee", "methods"),
    [
        ("exact", ["allreduce"]),
        ("bounded", ["allreduce in bf16", "power_sgd"]),
        ("any", ["allreduce in bf16", "post_local_sgd"]),
    ],
)
def test_what_is_chosen_keeps_the_guarantee_and_waits_for_the_start(
    monkeypatch, guarantee, methods
):
    world = World(monkeypatch, "--comm.guarantee", guarantee, "--comm.local_sgd_period", "99999")
    assert (world.run.comm.hook, world.run.clip.wire_dtype) == ("allreduce", "fp32")
    world.train(WINDOW - 1)
    assert world.hook.method == "allreduce"
    (first,) = world.train(1)
    assert first["method"] == world.hook.method == methods[0]
    assert first["changed"] == (methods[0] != "allreduce")
    world.train(64 - WINDOW - 1)
    assert world.hook.method == methods[0]
    world.train(WINDOW + 1)
    assert world.hook.method == methods[-1]
    chosen = METHODS[methods[-1]]
    assert (world.run.comm.hook, world.run.clip.wire_dtype) == (chosen.hook, chosen.wire_dtype)
    assert world.run.config.comm.hook == "auto"


def test_it_says_why(monkeypatch, caplog):
    caplog.set_level("INFO")
    world = World(monkeypatch, "--comm.guarantee", "bounded")
    (line,) = world.train(WINDOW)
    json.dumps(line)
    for text in ("allreduce in bf16 instead of allreduce", "comm.guarantee bounded", "power_sgd"):
        assert text in line["why"]
    assert caplog.messages == [f"comm.hook auto: {line['why']}"]
    assert line["links"]["network"]["bandwidth"] == pytest.approx(SLOW.bandwidth)
    # Beyond the prediction there are 50 ms of the host's.
    before = line["measured"]
    assert before["seconds"] == pytest.approx(line["predicted"]["allreduce"] + 0.05, rel=0.01)
    assert line["expected"]["allreduce in bf16"] == pytest.approx(
        line["predicted"]["allreduce in bf16"] + 0.05, rel=0.01
    )


@pytest.mark.parametrize("bucket_mb", [None, 0.005])
@pytest.mark.parametrize("method", ["allreduce", "allreduce in bf16", "power_sgd"])
def test_predictions_are_the_same_whatever_is_in_use(monkeypatch, method, bucket_mb):
    # The clock has counted what was synced before the last gradient, the word embedding's.
    options = ("--comm.guarantee", "bounded", "--comm.start", "0")
    options += () if bucket_mb is None else ("--comm.bucket_mb", str(bucket_mb))
    world = World(monkeypatch, *options, saved=METHODS[method].settings)
    world.hook._compress = {"none": 0.002, "bf16": 0.004, "power_sgd": 0.008}
    late = 1.0 if bucket_mb is None or method == "power_sgd" else _share_at_the_end(bucket_mb)
    counted = (1 - late) * world.hook._compress[METHODS[method].compression]
    times = world.hook._predict(4 * 32 * 1e-4 + counted, 0.01)
    assert times["allreduce"].compute == pytest.approx(4 * 32 * 1e-4)
    for name, other in METHODS.items():
        if name in times:
            assert times[name].compress == world.hook._compress[other.compression]


def _share_at_the_end(bucket_mb: float) -> float:
    """Share of the numbers in those of DDP's buckets that the last gradients fill."""
    gradients = gradients_of(TINY)
    tensors, limit = [torch.empty(one.shape) for one in gradients], int(bucket_mb * 2**20)
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, [limit, limit])
    late = [part for part in indices if any(gradients[index].ready == 1 for index in part)]
    assert 1 <= len(late) < len(indices)
    return sum(tensors[i].numel() for part in late for i in part) / sum(t.numel() for t in tensors)


def test_a_change_of_the_link_is_noticed_and_measuring_takes_little_time(monkeypatch):
    world = World(monkeypatch, "--comm.guarantee", "bounded")
    world.train(2000)
    assert world.hook.method == "power_sgd"
    assert 0.1 * world.measured < 0.015 * world.now
    world.link = FAST
    (change,) = [line for line in world.train(500) if line["changed"]]
    assert change["method"] == "allreduce"
    assert change["links"]["network"]["bandwidth"] == pytest.approx(FAST.bandwidth)
    world.link = SLOW
    lines = [line for line in world.train(4 * WINDOW) if line["changed"]]
    assert [line["method"] for line in lines] == ["power_sgd"]


@pytest.mark.parametrize(
    ("guarantee", "then"), [("bounded", "allreduce in bf16"), ("any", "post_local_sgd")]
)
def test_a_method_that_is_slower_than_predicted_is_left_for_good(monkeypatch, guarantee, then):
    world = World(monkeypatch, "--comm.guarantee", guarantee, "--comm.local_sgd_period", "3")
    world.slower = {"power_sgd": 20.0}
    changes = [line["method"] for line in world.train(400) if line["changed"]]
    assert changes == ["allreduce in bf16", "power_sgd", then]


@pytest.mark.parametrize(
    ("guarantee", "method"), [("bounded", "power_sgd"), ("exact", "allreduce")]
)
def test_a_run_goes_on_with_what_was_chosen_if_that_is_allowed(monkeypatch, guarantee, method):
    saved = METHODS["power_sgd"].settings
    world = World(monkeypatch, "--comm.guarantee", guarantee, saved=saved)
    assert world.hook.method == world.run.comm.hook == method
    world.run.progress.step = 100
    assert world.train(2 * WINDOW) == [] or guarantee == "exact"
    assert world.hook.method == method


def test_a_size_of_buckets_gives_way_to_one_bucket(monkeypatch):
    saved = METHODS["power_sgd"].settings
    options = ("--comm.guarantee", "bounded", "--comm.bucket_mb", "0.5")
    world = World(monkeypatch, *options, saved=saved)
    assert world.run.comm.bucket_mb is None
    world.run.progress.comm = METHODS["allreduce in bf16"].settings
    assert world.run.comm.bucket_mb == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*NEEDED, "--comm.guarantee", "any"], "comm.guarantee: expected exact with comm.hook all"),
        ([*AUTO, "--comm.guarantee", "best"], "comm.guarantee: expected one of exact, bounded, an"),
        ([*AUTO, "--clip.mode", "before"], "comm.hook: expected .* with clip.mode before, .* auto"),
        ([*AUTO, "--clip.wire_dtype", "bf16"], "clip.wire_dtype: expected fp32 with comm.hook aut"),
        ([*AUTO, "--optimizer.name", "onebit_adam"], "optimizer.name: expected another than "),
        ([*AUTO, "--optimizer.shard", "world"], "optimizer.shard: expected none with comm.hook au"),
        ([*AUTO, "--growth.name", "stacking"], "comm.hook: expected allreduce with growth.name s"),
    ],
)
def test_settings_that_do_not_go_together(options, message):
    with pytest.raises(ConfigError, match=message):
        read_config(options)


BASE = ["--schedule.epochs", "null", "--schedule.total_steps", "30", "--optimizer.lr", "3e-3"]
BASE += ["--checkpoint.every", "5", "--checkpoint.keep_last", "9", "--logging.examples", "false"]
BASE += ["--logging.progress", "none", "--comm.start", "8", "--comm.local_sgd_period", "3"]
CHOICES = ["allreduce in bf16", "power_sgd", "post_local_sgd", "allreduce in bf16"]
CHOICES += ["post_local_sgd", "allreduce"]
RUNS = {
    "plain": [],
    "exact": ["--comm.hook", "auto"],
    "any": ["--comm.hook", "auto", "--comm.guarantee", "any", "--precision", "bf16"],
}


def _with_choices(commands: list[tuple[int, list[str]]], choices: list[str], node_size: int) -> int:
    """Runs in turn that choose what they are told to, every 4 updates; prints what they know."""
    left: list[str] = []

    def told(seconds: dict[str, float], now: str | None) -> str:
        print("numbers", json.dumps(seconds))
        return left.pop(0) if left and left[0] in seconds else "allreduce"

    auto_hook.choose, auto_hook._LINK_NUMBERS = told, (64, 4096)
    auto_hook._WINDOW, auto_hook._USUAL_SHARE = 4, 1e9  # links are measured after each window
    for command in commands:
        left[:] = choices
        if code := in_turn([command], node_size):
            return code
    return 0


def _train(
    folder: Path,
    runs: dict[str, list[str]],
    choices: list[str],
    ranks: int = 2,
    node_size: int = 1,
) -> None:
    commands = []
    for name, more in runs.items():
        options = ["--config", str(folder / "run.yaml"), *BASE, *more]
        commands.append((free_port(), [*options, "--run_dir", str(folder / name)]))
    log = folder / f"{' and '.join(runs)}.log"
    processes = start_ranks(_with_choices, ranks, commands, choices, node_size, log=log)
    codes, output = finish(folder, log.stem, processes)
    assert codes == [0] * ranks, output


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("auto")
    make_folder(path)
    _train(path, RUNS, CHOICES)
    return path


@pytest.mark.slow
def test_runs_change_their_hook_while_they_train(folder):
    lines = log_lines(folder / "any", "comm")
    assert [line["method"] for line in lines] == [*CHOICES, "allreduce"]
    assert [line["step"] for line in lines] == list(range(4, 29, 4))
    assert all(line["changed"] for line in lines[:-1])
    summary = json.loads((folder / "any" / "summary.json").read_text())
    assert summary["comm"]["why"] == lines[-1]["why"]
    found = mean_losses(folder / "any", 30)
    assert len(found) == 30
    assert sum(found[-4:]) / 4 < found[0] - 0.1


@pytest.mark.slow
def test_all_ranks_choose_from_the_same_numbers(folder):
    one, other = (
        [x for x in path.read_text().splitlines() if "numbers {" in x]
        for path in sorted(folder.glob("plain*.log.*"))
    )
    assert len(one) == 14
    assert one == other


@pytest.mark.slow
def test_exact_has_the_bits_of_an_allreduce(folder):
    assert losses(folder / "exact") == losses(folder / "plain")
    assert {line["method"] for line in log_lines(folder / "exact", "comm")} == {"allreduce"}
    assert log_lines(folder / "plain", "comm") == []
    assert json.loads((folder / "plain" / "summary.json").read_text())["comm"] is None


@pytest.mark.slow
def test_a_resumed_run_begins_with_what_it_had_chosen(folder):
    copy = go_back(folder, "any", 10)
    _train(folder, {copy: RUNS["any"]}, ["power_sgd"])
    lines = [line for line in log_lines(folder / copy, "comm") if line["step"] > 10]
    assert lines[0]["step"] == 14
    assert lines[0]["measured"]["method"] == CHOICES[1] == "power_sgd"
    assert not lines[0]["changed"]
    assert losses(folder / copy).keys() == losses(folder / "any").keys()


@pytest.mark.slow
def test_machines_with_several_ranks_average_within_first(folder):
    choices = ["hierarchical", "hierarchical in bf16", "post_local_sgd", "allreduce"]
    _train(folder, {"machines": RUNS["any"]}, choices, ranks=4, node_size=2)
    lines = log_lines(folder / "machines", "comm")
    assert [line["method"] for line in lines][:4] == choices
    assert list(lines[0]["predicted"]) == list(METHODS)
    links = lines[0]["links"]
    assert links["node"]["bandwidth"] != 2 * links["network"]["bandwidth"]
    assert len(losses(folder / "machines")) == 30
