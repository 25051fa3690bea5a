"""Checks plans against real runs: predicted and measured time of an update.

    python -m benchmarks.check_plan        # exit status 1 if any differs by more than 15 %

One process of one thread on each of two hosts, and then two on each, train a small model over a
link of limited rate between two network namespaces (DDP on gloo), by each way to sync gradients and
with 1 and 4 passes per update; two on a host average by the hook that the plan prints. The
prediction knows the rate of the link, and what `python -m bert_unpad.plan --calibrate` measures:
passes, updates and the computing of compression. All processes measure these at the same time,
each for itself, so what they take from each other (cores, caches, memory) counts, but no sync does;
and in turn with the updates that they predict, round by round, so that a slow phase of the machine
hits both. Where the rights for namespaces are missing it says so and uses loopback,
whose rate is measured instead. Writes benchmarks/results/cpu/plan_check.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.lib import harness
from benchmarks.lib.network import Hosts, joined_hosts, loopback
from benchmarks.lib.processes import run_ranks
from bert_unpad.costs.links import network_link
from bert_unpad.costs.measure import (
    CompressionTimer,
    PassTimer,
    fit_link,
    link_times,
    make_replica,
    time_together,
)
from bert_unpad.costs.network import Cluster, Link
from bert_unpad.costs.sync import HOOK_COMPRESSIONS
from bert_unpad.costs.timing import random_inputs, run_pass
from bert_unpad.costs.workload import Workload
from bert_unpad.nn import BertConfig, BertForPreTraining
from bert_unpad.plan.calibrate import measured_device, process_group
from bert_unpad.plan.candidates import Candidate
from bert_unpad.plan.choose import update_seconds
from bert_unpad.plan.planner import Planner
from bert_unpad.pretrain.config import OptimizerConfig
from bert_unpad.pretrain.update.optimizer import build_optimizer

TOLERANCE = 0.15
_LOOPBACK = 1e9  # bytes/s between two processes of a host, about what gloo reaches
HOSTS = 2


def make_workload(options: argparse.Namespace) -> Workload:
    """Sequences of one length; benchmarks/check_simulator.py checks what differs between ranks."""
    config = BertConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        intermediate_size=4 * options.hidden,
        max_position_embeddings=options.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    counts = np.zeros(options.length + 1, np.int64)
    counts[options.length] = 1
    sequences = HOSTS * options.per_host * options.sequences
    return Workload(config, counts, sequences, updates=1, precision="fp32")


class Contender:
    """A model that syncs gradients in one way; `update` makes one update."""

    def __init__(
        self, workload: Workload, compression: str, bucket_mb: float, node_size: int | None
    ) -> None:
        torch.manual_seed(0)
        model = BertForPreTraining(workload.config).train()
        self.replica, _ = make_replica(model, compression, bucket_mb=bucket_mb, node_size=node_size)
        self.optimizer = build_optimizer(model, OptimizerConfig(name=workload.optimizer, lr=1e-5))

    def update(self, passes: list) -> None:
        for inputs in passes[:-1]:
            with self.replica.no_sync():
                run_pass(self.replica, inputs)
        run_pass(self.replica, passes[-1])
        torch.nn.utils.clip_grad_norm_(self.replica.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def work(options: argparse.Namespace) -> None:
    """What each process does; the first prints the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = make_workload(options)
    device = torch.device("cpu")
    rank = dist.get_rank()
    with process_group(device) as alone:
        torch.manual_seed(0)
        model = BertForPreTraining(workload.config).train()
        compress = {
            name: CompressionTimer(workload, model, name, alone) for name in HOOK_COMPRESSIONS
        }
        passes = PassTimer(workload, model, rows=4)  # up to as many tokens as the updates have
        updates, taken = {}, {}
        for name in HOOK_COMPRESSIONS:
            node_size = options.per_host if options.per_host > 1 else None
            contender = Contender(workload, name, options.bucket_mb, node_size)
            contender.update([random_inputs(workload.config, [8])])  # makes the optimizer's state
            for accumulation in options.accumulation:
                candidate = Candidate(HOSTS, options.sequences // accumulation, accumulation, name)
                lengths = [options.length] * candidate.batch
                seeds = range(100 * rank, 100 * rank + accumulation)
                inputs = [random_inputs(workload.config, lengths, seed) for seed in seeds]
                updates[candidate] = partial(contender.update, inputs)
                taken[candidate] = []
        for number in range(options.rounds):
            start = time.perf_counter()
            for timer in (*compress.values(), passes):
                timer.sample()
            for candidate, update in updates.items():
                taken[candidate].append(time_together(update, device))
            if rank == 0:
                spent = time.perf_counter() - start
                print(f"  round {number + 1}: {spent:.1f} s", file=sys.stderr, flush=True)
        seconds = {name: timer.median() for name, timer in compress.items()}
        found, timings = measured_device(device, passes, seconds)
        if options.rate is None:
            link = fit_link(*link_times(device, 5.0), HOSTS * options.per_host)
        else:
            link = network_link(
                options.rate, ranks_per_node=options.per_host, latency=options.latency * 1e-6
            )
    if rank == 0:
        inside = Link(options.latency * 1e-6, _LOOPBACK)
        cluster = Cluster(options.per_host, inside, link, algorithm="ring", flat=True)
        planner = Planner(workload, found, cluster, bucket_bytes=options.bucket_mb * 2**20)
        rows = [compare(planner, candidate, taken[candidate]) for candidate in updates]
        result = {"device": found.to_dict(), "timings": timings, "results": rows}
        print(json.dumps(result | {"bandwidth": link.bandwidth, "latency": link.latency}))
    dist.destroy_process_group()


def compare(planner: Planner, candidate: Candidate, taken: list[float]) -> dict:
    """Sets a prediction beside the median of what was measured."""
    predicted, measured = planner.update_time(candidate), statistics.median(taken)
    return {
        "compression": candidate.compression,
        "accumulation": candidate.accumulation,
        "predicted": predicted.total,
        "measured": measured,
        "error": predicted.total / measured - 1,
        "parts": update_seconds(predicted),
        "rounds": taken,
    }


def measure(hosts: Hosts, per_host: int, arguments: list[str]) -> dict:
    """Runs all processes; returns what the first has printed."""
    arguments = [*arguments, "--per-host", str(per_host)]
    output = run_ranks(
        [sys.executable, "-m", "benchmarks.check_plan", "--worker", *arguments],
        *(HOSTS * per_host, hosts, 600),
    )
    return json.loads(output.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["200M", "1G"], help="of the link")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--latency", type=float, default=100.0, help="of the link, microseconds")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=16000)
    parser.add_argument("--sequences", type=int, default=8, help="of a rank and update")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--bucket-mb", type=float, default=2.0)
    harness.add_name(parser, "plan_check")
    parser.add_argument("--ranks-per-host", type=int, nargs="+", default=[1, 2])
    # Of one run, to its processes.
    parser.add_argument("--per-host", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    links = []
    for rate, per_host in product(options.rates, options.ranks_per_host):
        print(f"link of {rate}bit/s, {per_host} ranks a host", file=sys.stderr)
        try:
            with joined_hosts(f"{rate.lower()}bit") as hosts:
                result, link = measure(hosts, per_host, [*sys.argv[1:], "--rate", rate]), rate
        except PermissionError as error:
            print(f"no link of limited rate, using loopback: {error}", file=sys.stderr)
            result, link = measure(loopback(), 1, sys.argv[1:]), "loopback"
        name = link if per_host == 1 else f"{link}, {per_host} a host"
        links.append({"link": name, "load_average": os.getloadavg()[0], **result})
        if link == "loopback":
            break  # another rate would be the same again, and there is one host only
    print(f"{'link':<15}{'gradients':<11}{'passes':>6}{'predicted s':>13}{'measured s':>12}  error")
    worst = 0.0
    for link in links:
        for row in link["results"]:
            worst = max(worst, abs(row["error"]))
            print(
                f"{link['link']:<15}{row['compression']:<11}{row['accumulation']:>6}"
                f"{row['predicted']:>13.3f}{row['measured']:>12.3f}{row['error']:>9.1%}"
            )
    ignored = ("worker", "rate", "rates", "per_host", "name")
    settings = {name: value for name, value in vars(options).items() if name not in ignored}
    command = harness.command()
    payload = {"tolerance": TOLERANCE, "worst": worst, "settings": settings, "links": links}
    print(f"written: {harness.save(options.name, 'cpu', command, payload)}")
    if worst > TOLERANCE:
        print(f"FAILED: a prediction is off by {worst:.1%}, more than {TOLERANCE:.0%}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
