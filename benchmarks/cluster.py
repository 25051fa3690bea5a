"""What each way of sending less buys on slow links: real runs of the trainer on several hosts.

    python -m benchmarks.cluster                                # about 50 minutes on quiet cores
    python -m benchmarks.cluster --hosts 2 --rates 200mbit --only "plain DDP" "+ bf16"

Trains a small BERT (configs/bert_small.yaml) with gloo, one process of one thread on each host.
Hosts are network namespaces joined by links of limited rate (where the rights for that are missing
it says so and uses loopback). All contenders take turns, `--rounds` times, `--steps` updates each,
of which those after `--settle` count (8 times `--settle` of `auto`, which chooses in them). What
they learn: `python -m benchmarks.convergence`.

What is done is kept in FOLDER: the same command continues where it was stopped.

The first `comm.start` updates are plain DDP's for all contenders that need a warm-up. Bytes are
what leaves the first host, headers and acknowledgements included. Writes
benchmarks/results/cpu/cluster.json and cluster.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.lib import harness
from benchmarks.lib.cluster_plot import draw
from benchmarks.lib.network import Hosts, joined_hosts, loopback
from benchmarks.lib.processes import RankPool, serve
from benchmarks.lib.training_runs import ROOT, as_arguments, train_here
from bert_unpad._files import replacing
from bert_unpad.data import prepare
from bert_unpad.pretrain.config import read_config
from bert_unpad.pretrain.output.metrics import read_json_lines
from bert_unpad.pretrain.parallel import Way

WORKER = "--worker"
CLIP = {"clip.mode": "bucket", "clip.policy": "adaptive"}
SMALL = {"comm.bucket_mb": 2}
OVERLAP = CLIP | SMALL
BF16 = {"clip.wire_dtype": "bf16", "clip.error_feedback": "true"}
LOCAL = {"comm.hook": "post_local_sgd", "comm.local_sgd_group": 1}
ALONE = "no exchange"
PLAIN = "plain DDP"
MT_DAO = "MT-DAO"
AUTO = "auto"
CONTENDERS: dict[str, dict[str, Any]] = {
    # What a step takes without any exchange: each rank trains a model of its own.
    ALONE: OVERLAP | LOCAL | {"comm.start": 0, "comm.local_sgd_period": 10**9},
    PLAIN: {"clip.mode": "after"},  # 25 MiB in a bucket: this model is one
    "+ bucket overlap": OVERLAP,
    "+ bf16": OVERLAP | BF16,
    "PowerSGD": CLIP | {"comm.hook": "power_sgd"},
    "1-bit Adam": OVERLAP | {"optimizer.name": "onebit_adam"},
    "1-bit LAMB": OVERLAP | {"optimizer.name": "onebit_lamb", "optimizer.lr": 1e-2},
    "0/1 Adam": OVERLAP | {"optimizer.name": "zero_one_adam"},
    "local SGD": OVERLAP | LOCAL,
    "local SGD, period 64": OVERLAP | LOCAL | {"comm.local_sgd_period": 64},
    "DreamDDP": OVERLAP | {"comm.hook": "dream_ddp"},
    "DreamDDP, period 16": OVERLAP | {"comm.hook": "dream_ddp", "comm.local_sgd_period": 16},
    MT_DAO: OVERLAP | {"optimizer.name": "mt_dao"},
    "GradientFlow": OVERLAP | {"comm.hook": "gradient_flow"},
    AUTO: OVERLAP | {"comm.hook": "auto", "comm.guarantee": "any"},
    "sharded overlap": OVERLAP | {"optimizer.shard": "overlap", "optimizer.name": "fused_adam"},
    # The cost of clipping, beside "+ bucket overlap" and "+ bf16".
    "clip.mode none": {"clip.mode": "none"} | SMALL,
    "clip.mode after": {"clip.mode": "after"} | SMALL,
    "clip.mode before": {"clip.mode": "before"},
}
CHOOSES = 8  # times as many updates until `auto` has chosen
SENT = 8  # place of the sent bytes behind a device's name in /proc/net/dev


def sent_bytes() -> int:
    """Bytes that have left this process's host, by the device that gloo uses."""
    device = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() == device:
            # All ranks send on one loopback device, each as much as the others.
            ranks = int(os.environ["WORLD_SIZE"]) if device == "lo" else 1
            return int(values.split()[SENT]) // ranks
    raise SystemExit(f"no network device {device}")


@contextmanager
def counted() -> Iterator[list[int]]:
    """Notes the bytes sent so far at the beginning of each update."""
    honest, seen = Way.accumulate, []

    def counting(*arguments: Any) -> Tensor:
        seen.append(sent_bytes())
        return honest(*arguments)

    Way.accumulate = counting
    try:
        yield seen
    finally:
        Way.accumulate = honest


def work(arguments: list[str]) -> list[int] | None:
    """One run on one rank; the bytes sent by each of its updates, None where it has failed."""
    with counted() as seen:
        return None if train_here(arguments) else seen


def settings_of(
    name: str, run_dir: Path, options: argparse.Namespace, **more: Any
) -> dict[str, Any]:
    """The run's settings, as pretrain.py names them; the contender's win over `more`."""
    return {
        "config": ROOT / "configs" / "bert_small.yaml",  # first: what comes later wins
        "run_dir": run_dir,
        "resume": "never",
        "device": "cpu",
        "batching.global_batch_size": options.batch,
        "schedule.warmup_share": 0.1,
        "comm.local_sgd_period": options.period,
        "checkpoint.every": 0,
        "evaluation.every": 0,
        "logging.every": 1,
        "logging.progress": "none",
        **more,
        **CONTENDERS[name],
        **({"optimizer.arguments": f'{{"period": {options.period}}}'} if name == MT_DAO else {}),
    }


def train(ranks: RankPool, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
    """The log of a run, and the bytes that the first host had sent at the start of each update."""
    sent = ranks.run(as_arguments(settings))
    if sent is None:
        raise SystemExit("a run has failed; its message is above")
    return read_json_lines(Path(settings["run_dir"]) / "metrics.jsonl"), sent


def kept(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What an earlier call of the same command has measured, or measures it now."""
    if not path.exists():
        found = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(found))
    return json.loads(path.read_text())


def timed(ranks: RankPool, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of the updates of one run that count.

    At least a period of the contender's own counts. One more update is made, at whose beginning the
    bytes of the last that counts are known.
    """
    period = 0 if name == ALONE else CONTENDERS[name].get("comm.local_sgd_period", 0)
    settle = options.settle * (CHOOSES if name == AUTO else 1)
    # A multiple of `options.settle`: the update has a line in the log.
    count = -(-max(options.steps - options.settle, period) // options.settle) * options.settle
    end = settle + count
    more = {
        "schedule.total_steps": end + 1,
        "evaluation.examples": 0,
        "comm.start": options.timed_start,
        "logging.every": options.settle,  # a line makes the ranks meet
    }
    lines, sent = train(ranks, settings_of(name, options.folder / "timed", options, **more))
    seconds = {line["step"]: line["seconds"] for line in lines if line["kind"] == "train"}
    found = {
        "step": (seconds[end] - seconds[settle]) / count,
        "bytes": (sent[end] - sent[settle]) / count,
    }
    chosen = [line for line in lines if line["kind"] == "comm"]
    return found | ({"chosen": chosen[-1]} if chosen else {})


def measure_link(
    hosts: Hosts, count: int, rate: str, options: argparse.Namespace
) -> dict[str, Any]:
    """All contenders in turns on one kind of link."""
    ranks = RankPool([sys.executable, "-m", "benchmarks.cluster", WORKER], count, hosts)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.only}
    done = options.folder / f"{count} hosts, {rate}"
    try:
        timed(ranks, PLAIN, options)  # warm-up
        for number in range(options.rounds):
            for name in options.only:
                path = done / f"{name.replace('/', '-')}, round {number + 1}.json"
                rounds[name].append(kept(path, partial(timed, ranks, name, options)))
                last = rounds[name][-1]["step"]
                print(
                    f"{count} hosts, {rate}, round {number + 1}: {name}: {last:.3f} s", flush=True
                )
    finally:
        ranks.close()
    rows = []
    for name, found in rounds.items():
        means = [x["step"] for x in found]
        row = {
            "contender": name,
            "step_seconds": statistics.median(means),
            "step_seconds_of_rounds": means,
            "bytes_per_step": statistics.median(x["bytes"] for x in found),
        }
        if name == AUTO:
            row["chosen"] = [x["chosen"] for x in found]
        if ALONE in rounds:
            alone = [x["step"] for x in rounds[ALONE]]
            row["of_no_exchange"] = statistics.median(
                a / b for a, b in zip(means, alone, strict=True)
            )
        rows.append(row)
    return {"hosts": count, "rate": rate, "results": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark_cluster"))
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"], help="as tc reads them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help="updates of a timed run")
    parser.add_argument("--settle", type=int, default=8, help="its first, which do not count")
    parser.add_argument("--timed-start", type=int, default=3, help="its first, by plain allreduces")
    parser.add_argument("--batch", type=int, default=32, help="sequences, of all hosts")
    parser.add_argument("--period", type=int, default=8, help="updates between averages of models")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    harness.add_name(parser, "cluster")
    options = parser.parse_args()
    if options.steps % options.settle or options.steps == options.settle:
        parser.error("--steps must be two or more times --settle")
    for name in options.only:
        more = {"schedule.total_steps": 1}
        settings = settings_of(name, options.folder / "x", options, **more)
        config, _ = read_config([f"--{key}={value}" for key, value in settings.items()])
    prepare(config.data)  # before any clock runs
    load = os.getloadavg()[0]  # above 1: the machine has other work to do
    links = []
    for count, rate in itertools.product(options.hosts, options.rates):
        with ExitStack() as stack:
            try:
                hosts = stack.enter_context(joined_hosts(rate, count))
            except PermissionError as error:
                print(f"no link of limited rate, using loopback: {error}", file=sys.stderr)
                hosts, rate = loopback(), "loopback"
            links.append(measure_link(hosts, count, rate, options))
    show(links)
    left_out = ("folder", "only", "name", "hosts", "rates")
    payload = {k: v for k, v in vars(options).items() if k not in left_out}
    payload |= {"load_average_before": load, "links": links}
    payload["settings"] = {name: CONTENDERS[name] for name in options.only}
    path = harness.save(options.name, "cpu", harness.command(), payload)
    draw(path.with_suffix(".png"), links)
    print(f"written: {path} and {path.with_suffix('.png').name}")


def show(links: list[dict[str, Any]]) -> None:
    for link in links:
        print(f"\n{link['hosts']} hosts, {link['rate']}")
        for row in link["results"]:
            spread = row["step_seconds_of_rounds"]
            print(
                f"  {row['contender']:<20} {row['step_seconds']:.3f} s ({min(spread):.3f} to "
                f"{max(spread):.3f})  {row['bytes_per_step'] / 1e6:8.3f} MB a step"
                + (f"  {row['of_no_exchange']:.2f}x" if "of_no_exchange" in row else "")
            )


if __name__ == "__main__":
    serve(work) if sys.argv[1:] == [WORKER] else main()
