"""The time of a training step by how gradients are clipped: two processes, joined by a slow link.

    python -m benchmarks.comm --rate 200mbit

The processes run in two network namespaces joined by a link of limited rate; where the rights for
that are missing it says so and uses loopback. Gloo, DDP with small buckets, one thread a process.
All contenders take turns in the same run, and every figure is a ratio to `none` in the same round.
Writes benchmarks/results/cpu/comm.json, an entry a rate, and comm_<rate>.png: when one step of each
computes its backward pass and when its gradients travel.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lib import harness, timeline
from benchmarks.lib.network import Hosts, joined_hosts, loopback
from benchmarks.lib.processes import run_ranks
from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.distributed import BucketClip, ClipBefore
from bert_unpad.nn import BertConfig, BertForPreTraining

MODES = ("none", "bucket", "before", "after", "bucket, bf16 wire")
MAX_NORM = 1.0


def make_inputs(sequences: int, length: int, vocab: int, seed: int) -> PackedInputs:
    """Sequences of one length: unequal work would measure the balance of the ranks."""
    generator = torch.Generator().manual_seed(seed)
    batch = VarlenBatch.from_lengths([length] * sequences)
    ids = torch.randint(0, vocab, (batch.total,), generator=generator)
    positions = torch.arange(3, batch.total, 7)
    return PackedInputs.build(
        batch=batch,
        input_ids=ids,
        masked_positions=positions,
        masked_labels=ids[positions],
        next_sentence_labels=torch.randint(0, 2, (sequences,), generator=generator),
    )


def loss_of(model: nn.Module, inputs: PackedInputs) -> Tensor:
    outputs = model(inputs)
    return outputs.mlm_loss_sum / inputs.num_masked + outputs.nsp_loss_sum / inputs.batch.batch_size


class Contender:
    """A model of its own with one way of clipping; called, it makes a step."""

    def __init__(self, mode: str, config: BertConfig, inputs: PackedInputs, cap_mb: float) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = BertForPreTraining(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.replica = DistributedDataParallel(
            self.model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True
        )
        self.mode, self.inputs = mode, inputs
        self.before: ClipBefore | None = None
        if mode.startswith("bucket"):
            wire = torch.bfloat16 if "bf16" in mode else None
            self.clip = BucketClip(MAX_NORM, "adaptive", wire).attach(self.replica)
        elif mode == "before":
            self.before = ClipBefore(self.model.parameters(), MAX_NORM)

    def __call__(self) -> None:
        with nullcontext() if self.before is None else self.replica.no_sync():
            loss_of(self.replica, self.inputs).backward()
        if self.before is not None:
            self.before.sync()
        elif self.mode == "after":
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


def work(options: argparse.Namespace) -> None:
    """What each of the two processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = BertConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        intermediate_size=4 * options.hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    inputs = make_inputs(options.sequences, options.length, options.vocab, dist.get_rank())
    contenders = {mode: Contender(mode, config, inputs, options.bucket_mb) for mode in MODES}

    def alone() -> None:
        contender = contenders["none"]
        with contender.replica.no_sync():
            loss_of(contender.replica, inputs).backward()
        contender.model.zero_grad()

    parameters = sum(p.numel() for p in contenders["none"].model.parameters())
    flat = torch.zeros(parameters)
    timed: dict[str, Callable[[], object]] = {
        **contenders,
        "forward and backward alone": alone,
        "one allreduce of all gradients": lambda: dist.all_reduce(flat),
    }
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(options.warmup + options.rounds):
        for name, step in timed.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            # The slower of the two: both wait for each other once a step.
            taken = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if number >= options.warmup:
                seconds[name].append(float(taken))
    buckets = len(contenders["bucket"].clip.report().norms)
    timelines = {}
    for mode, step in contenders.items():
        dist.barrier()
        timelines[mode] = timeline.record(step)
    if dist.get_rank() == 0:
        sizes = {"parameters": parameters, "buckets": buckets}
        print(json.dumps({"seconds": seconds, "timelines": timelines, **sizes}))
    dist.destroy_process_group()


def measure(hosts: Hosts, arguments: list[str]) -> dict:
    """Runs both processes; returns what the first has printed."""
    command = [sys.executable, "-m", "benchmarks.comm", "--worker", *arguments]
    output = run_ranks(command, 2, hosts, timeout=900)
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="200mbit", help="of the link, as tc reads it")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--sequences", type=int, default=4, help="a process")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--bucket-mb", type=float, default=2.0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    arguments = sys.argv[1:]
    try:
        with joined_hosts(options.rate) as hosts:
            result, link = measure(hosts, arguments), options.rate
    except PermissionError as error:
        print(f"no link of limited rate, using loopback: {error}", file=sys.stderr)
        result, link = measure(loopback(), arguments), "loopback"

    result["load_average"] = os.getloadavg()[0]  # above 2: the machine had other work to do
    seconds = result.pop("seconds")
    rows = []
    for name, rounds in seconds.items():
        ratios = [a / b for a, b in zip(rounds, seconds["none"], strict=True)]
        rows.append(
            {
                "contender": name,
                "seconds": statistics.median(rounds),
                "to_none": statistics.median(ratios),
                "to_none_range": [min(ratios), max(ratios)],
                "rounds": rounds,
            }
        )
        print(f"{name:<32} {rows[-1]['seconds']:8.3f} s   {rows[-1]['to_none']:6.3f} of none")
    picture = harness.RESULTS / "cpu" / f"comm_{link}.png"
    timeline.draw(picture, result.pop("timelines"), link)
    settings = {k: v for k, v in vars(options).items() if k not in ("worker", "rate")}
    entry = {"link": link, **settings, **result, "results": rows}
    path = harness.RESULTS / "cpu" / "comm.json"
    links = json.loads(path.read_text())["links"] if path.exists() else []
    links = [old for old in links if old["link"] != link] + [entry]
    command = harness.command()
    print(f"written: {harness.save('comm', 'cpu', command, {'links': links})}")


if __name__ == "__main__":
    main()
