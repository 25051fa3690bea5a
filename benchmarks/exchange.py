"""Does exchanging examples pay, and does it hide? Real training on gloo, 4 ranks on one machine.

    python -m benchmarks.exchange                        # 3 seeds, 120 steps
    nice -n 19 python -m benchmarks.exchange --steps 300 # beside other work

Trains a small model on the quickstart's text at length 512 with each batching strategy and seed.
Ranks share the machine's cores, so a rank's work in a step is the CPU time of its training thread;
the idle share is what the others of an ideal machine would wait: 1 - mean / greatest of the ranks.
Then it moves examples alone, without training, and counts the CPU time of all threads. What is
complete in --folder is not run again. Writes
benchmarks/results/cpu/exchange.json and exchange.png. Seconds of the clock are printed and not
saved, as other programs may run on the machine, but ratios of them are: `wait_share` is the part of
a step that training waits for data; `hidden` is the part of the exchange's time that training does
not wait for, and `hidden_net` leaves out the wait that the runs without an exchange have, too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.lib import harness
from bert_unpad._plots import new_figure, save_figure
from bert_unpad.data import DataConfig, ExampleExchange, ShardStream, prepare
from bert_unpad.pretrain.config import read_config
from bert_unpad.pretrain.feed import exchange_feed
from bert_unpad.pretrain.output.metrics import read_json_lines
from bert_unpad.pretrain.parallel import Way
from bert_unpad.pretrain.pretrain import pretrain
from bert_unpad.pretrain.ranks import Ranks, join_ranks

STRATEGIES = {  # each with its batching.strategy
    "random": "random",
    "stratified": "stratified",
    "exchange": "exchange",
    "exchange-greedy": "exchange",
}
DEALING = {"exchange-greedy": "greedy"}  # otherwise lpt
SCOPES = ("world", "node", "two_level")
RANKS = 4
NODE = 2  # ranks that count as a node where the scope knows nodes
BATCH = 8  # sequences per rank and step
DATA = {"source": "stdlib", "max_seq_length": 512, "vocab_size": 2048}
MODEL = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
WARMUP = 10  # steps left out: queues fill, buffers grow
LAST = 20  # steps whose mean is the final loss


def settings(run_dir: Path, strategy: str, seed: int, steps: int) -> list[str]:
    values = {
        "run_dir": run_dir,
        "resume": "never",
        "seed": seed,
        "device": "cpu",
        "batching.batch_size_per_rank": BATCH,
        "optimizer.lr": 2e-3,
        "schedule.total_steps": steps,
        "schedule.warmup_share": 0.1,
        "checkpoint.every": 0,
        "evaluation.every": 0,
        "evaluation.examples": 200,
        "logging.every": 1,
        "logging.progress": "none",
        **{f"model.{key}": value for key, value in MODEL.items()},
        **{f"data.{key}": value for key, value in DATA.items()},
    }
    given = [text for key, value in values.items() for text in (f"--{key}", str(value))]
    return [*given, "--batching.strategy", STRATEGIES[strategy]]


def measure_busy() -> list[float]:
    """Makes the trainer note the CPU seconds of its thread in each step's passes."""
    honest, busy = Way.accumulate, []

    def timed(*arguments: Any) -> Tensor:
        started = time.thread_time()
        sums = honest(*arguments)
        busy.append(time.thread_time() - started)
        return sums

    Way.accumulate = timed
    return busy


@contextmanager
def dealt(dealing: str) -> Iterator[None]:
    """Makes the trainer deal examples out in another way than its own."""
    exchange_feed.ExampleExchange = functools.partial(ExampleExchange, dealing=dealing)
    try:
        yield
    finally:
        exchange_feed.ExampleExchange = ExampleExchange


def worker(options: argparse.Namespace) -> None:
    """One rank: all runs one after another, then the exchange alone."""
    busy = measure_busy()
    config, _ = read_config(settings(options.folder / "unused", "random", 0, 1))
    with join_ranks(config) as ranks:
        for seed in range(options.seeds):
            for strategy in STRATEGIES:
                run_dir = options.folder / f"{strategy}-{seed}"
                record = run_dir / f"busy.rank{ranks.rank}.json"
                if record.exists():
                    continue
                busy.clear()
                with dealt(DEALING.get(strategy, "lpt")):
                    pretrain(*read_config(settings(run_dir, strategy, seed, options.steps)), ranks)
                write(record, busy)
        for scope in SCOPES:
            found = move_alone(ranks, scope, options.moves)
            write(options.folder / f"alone-{scope}.rank{ranks.rank}.json", found)
        ranks.barrier()


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def move_alone(ranks: Ranks, scope: str, steps: int) -> dict[str, float]:
    """One rank's CPU seconds, examples and bytes of an exchange that nobody trains beside."""
    data = prepare(DataConfig(**DATA), progress=False).train
    stream = ShardStream(
        data,
        ranks.rank,
        ranks.world_size,
    )
    with ExampleExchange(
        stream, batch_size=BATCH, scope=scope, node_size=NODE, depth=4
    ) as exchange:
        for _ in range(WARMUP):
            next(exchange)
        clock, cpu = time.perf_counter(), time.process_time()
        taken = [next(exchange) for _ in range(steps)]
        clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
    return {
        "seconds": clock,
        "cpu_seconds": cpu,
        "examples": sum(len(step.examples) for step in taken),
        "bytes_sent": sum(step.bytes_sent for step in taken),
    }


def summarise_run(run_dir: Path) -> dict[str, Any]:
    lines = read_json_lines(run_dir / "metrics.jsonl")
    train = [line for line in lines if line["kind"] == "train"]
    busy = np.array([read(run_dir / f"busy.rank{rank}.json") for rank in range(RANKS)])
    idle = 1 - busy.mean(axis=0) / busy.max(axis=0)
    steady = train[WARMUP:]
    waited = sum(line["data_wait"] for line in steady)
    exchanged = sum(line.get("exchange_seconds", 0.0) for line in steady)
    held_out = [line for line in lines if line["kind"] == "evaluation"][-1]
    return {
        "idle_share": float(idle[WARMUP:].mean()),
        "planned_idle_share": 1 - statistics.fmean(x["straggler_efficiency"] for x in steady),
        "final_loss": statistics.fmean(line["loss"] for line in train[-LAST:]),
        "held_out_mlm_loss": held_out["mlm_loss"],
        "wait_share": waited / (train[-1]["seconds"] - train[WARMUP - 1]["seconds"]),
        "hidden": 1 - waited / exchanged if exchanged else None,
        "bytes_per_step": statistics.fmean(x.get("exchange_bytes", 0.0) for x in steady),
        "losses": [line["loss"] for line in train],
        "clock": {"data_wait": waited / len(steady), "exchange": exchanged / len(steady)},
    }


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def summarise_alone(folder: Path, scope: str) -> dict[str, float]:
    ranks = [read(folder / f"alone-{scope}.rank{rank}.json") for rank in range(RANKS)]
    cpu, examples, sent = (
        sum(x[key] for x in ranks) for key in ("cpu_seconds", "examples", "bytes_sent")
    )
    clock = max(x["seconds"] for x in ranks)
    print(
        f"alone, {scope}: {examples / clock:,.0f} examples/s and {sent / clock / 1e6:.2f} MB/s of "
        "the clock"
    )
    return {
        "examples_per_cpu_second": examples / cpu,
        "megabytes_per_cpu_second": sent / cpu / 1e6,
        "bytes_per_example": sent / examples,
    }


def draw(path: Path, runs: list[dict[str, Any]]) -> None:
    figure = new_figure(10, 4)
    bars, curves = figure.subplots(1, 2, width_ratios=(1, 2))
    for number, strategy in enumerate(STRATEGIES):
        mine = [run for run in runs if run["strategy"] == strategy]
        bars.bar(number, 100 * statistics.fmean(run["idle_share"] for run in mine), 0.6)
        for run in mine:
            smooth = np.convolve(run["losses"], np.ones(10) / 10, "valid")
            label = strategy if run["seed"] == 0 else None
            curves.plot(range(10, 10 + len(smooth)), smooth, f"C{number}", label=label, alpha=0.8)
    bars.set(ylabel="idle share of a step (%)", xticks=range(len(STRATEGIES)))
    bars.set_xticklabels(STRATEGIES)
    curves.set(xlabel="step", ylabel="loss (nats, mean of 10 steps)")
    curves.legend()
    for axes in (bars, curves):
        axes.grid(alpha=0.3)
    save_figure(figure, path)


def launch_workers(log: Path) -> None:
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command = [
        sys.executable,
        "-m",
        *launch,
        "-m",
        "benchmarks.exchange",
        "--worker",
        *sys.argv[1:],
    ]
    with log.open("w") as file:
        # 1 alone would count as torchrun's default, which the trainer replaces.
        environment = os.environ | {"OMP_NUM_THREADS": "1,1"}
        done = subprocess.run(command, env=environment, stdout=file, stderr=file, check=False)
    if done.returncode:
        raise SystemExit(f"the runs have failed: see {log}")


def compare(options: argparse.Namespace) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(DataConfig(**DATA))
    if not (options.folder / f"alone-{SCOPES[-1]}.rank{RANKS - 1}.json").exists():
        launch_workers(options.folder / "log.txt")  # does what is missing
    runs = []
    print(f"{'strategy':<15} seed  idle   planned  final loss  held out  hidden")
    for seed in range(options.seeds):
        summaries = {x: summarise_run(options.folder / f"{x}-{seed}") for x in STRATEGIES}
        clocks = {strategy: found.pop("clock") for strategy, found in summaries.items()}
        usual = statistics.fmean(clocks[x]["data_wait"] for x in ("random", "stratified"))
        for strategy, found in summaries.items():
            clock = clocks[strategy]
            extra = max(clock["data_wait"] - usual, 0.0)
            found["hidden_net"] = 1 - extra / clock["exchange"] if clock["exchange"] else None
            runs.append({"strategy": strategy, "seed": seed, **found})
            hidden = "" if found["hidden"] is None else f"{found['hidden']:.3f}"
            if hidden:
                hidden += f", net {found['hidden_net']:.3f}"
            print(
                f"{strategy:<15} {seed:>4}  {found['idle_share']:.3f}  "
                f"{found['planned_idle_share']:.3f}    {found['final_loss']:.3f}       "
                f"{found['held_out_mlm_loss']:.3f}     {hidden}  (a step of the clock: waited "
                f"{1e3 * clock['data_wait']:.2f} ms, exchange {1e3 * clock['exchange']:.2f} ms)"
            )
    payload = {
        "ranks": RANKS,
        "node_size": NODE,
        "batch_size_per_rank": BATCH,
        "steps": options.steps,
        "data": DATA,
        "model": MODEL,
        "results": runs,
        "exchange_alone": {scope: summarise_alone(options.folder, scope) for scope in SCOPES},
    }
    given = (f"--{key} {getattr(options, key)}" for key in ("steps", "seeds", "moves"))
    command = " ".join(["python -m benchmarks.exchange", *given])
    path = harness.save("exchange", "cpu", command, payload)
    draw(path.with_suffix(".png"), runs)
    print(f"written: {path} and {path.with_suffix('.png').name}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark_exchange"))
    parser.add_argument("--steps", type=int, default=120, help="of training, per run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--moves", type=int, default=200, help="steps of the exchange alone")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    if parse().worker:
        worker(parse())
    else:
        compare(parse())
