"""Checks the simulator against real runs: predicted and measured straggler efficiency.

Processes joined by gloo train a small model by DDP on sequences as long as Wikipedia's, with random
and with stratified sampling. Processes that compute side by side slow each other down (caches,
shared cores) by varying amounts, and the slowest of several varying times is too high. So they take
turns: only the process that holds a baton computes. The clock is the CPU time of the thread that
trains. All steps are run several times and the least time of each counts, because other programs
only ever slow one down. The error that is left is measured too, in steps in which all ranks have
the same batch: their true efficiency is 1.

The prediction uses a cost model that is fitted to other batches of the same model on one process,
and nothing from these runs. Writes benchmarks/results/cpu/simulator_check.json.

    python -m benchmarks.check_simulator

Exits with status 1 if they differ by more than 3 points beyond that error.
"""

import argparse
import json
import os
import sys
import time
from multiprocessing.synchronize import Lock
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lib import harness
from bert_unpad.costs.timing import fit_step_cost, random_inputs
from bert_unpad.data.sampling.balanced_sampler import BalancedSampler, efficiency
from bert_unpad.data.sampling.histogram import sample_lengths
from bert_unpad.nn import BertConfig, BertForPreTraining
from bert_unpad.simulate import ComputeCost, StepModel, simulate

EQUAL = "same batch"
EQUAL_OF = "random"  # where those batches, of rank 0, come from: long and short ones
STRATEGIES = ("random", "stratified", EQUAL)
TOLERANCE = 0.03
SEED = 5


def model_config(options: argparse.Namespace) -> BertConfig:
    """A model so small that a step takes tens of milliseconds, with heads of 32."""
    return BertConfig(
        vocab_size=1024,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        intermediate_size=4 * options.hidden,
    )


class Baton:
    """Lets one process at a time compute, and sums up its thread's CPU time meanwhile.

    Args:
        lock: that of all ranks.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._start = 0.0
        self.seconds = 0.0
        self.goes_round = False
        """Not in DDP's first steps: its forward pass then agrees on buckets with all ranks."""

    def take(self) -> None:
        """Waits for it, then starts the clock."""
        if self.goes_round:
            self._lock.acquire()
        self._start = time.thread_time()

    def hand_on(self) -> None:
        """Stops the clock."""
        self.seconds += time.thread_time() - self._start
        if self.goes_round:
            self._lock.release()


# DDP checks this annotation, so this file has no "from __future__ import annotations".
def hand_on_and_reduce(baton: Baton, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's hook: this rank has computed its gradient when the last bucket is full."""
    if bucket.is_last():
        baton.hand_on()
    return allreduce_hook(None, bucket)


def busy_seconds(
    options: argparse.Namespace, ranks: int, cost: ComputeCost, baton: Baton
) -> dict[str, np.ndarray]:
    """CPU seconds of this rank in each step, the least of all rounds, by way of sampling: [steps].

    All ways take turns within each round, so that a busy minute of the machine hits them alike.
    """
    lengths = sample_lengths(options.steps * ranks * options.batch, SEED)
    torch.manual_seed(SEED)
    model = DistributedDataParallel(BertForPreTraining(model_config(options)).train())
    model.register_comm_hook(baton, hand_on_and_reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(indices: np.ndarray, seed: int) -> float:
        inputs = random_inputs(model_config(options), lengths[indices], seed)
        baton.seconds = 0.0
        baton.take()
        outputs = model(inputs)
        loss = outputs.mlm_loss_sum + outputs.nsp_loss_sum
        (loss / inputs.batch.total).backward()  # ends the baton's turn, then waits for the others
        baton.take()
        optimizer.step()
        optimizer.zero_grad()
        baton.hand_on()
        return baton.seconds

    rows = []
    for number in range(1 + options.rounds):  # the first warms up
        baton.goes_round = number > 0
        for name in STRATEGIES:
            strategy, rank = (EQUAL_OF, 0) if name == EQUAL else (name, dist.get_rank())
            sampler = BalancedSampler(
                lengths, ranks, rank, options.batch, SEED, strategy, work=cost.work
            )
            rows.append([step(indices, SEED + i) for i, indices in enumerate(sampler)])
        if dist.get_rank() == 0:
            print(f"{ranks} ranks: round {number} of {options.rounds}", flush=True)
    seconds = np.array(rows).reshape(1 + options.rounds, len(STRATEGIES), options.steps)
    return dict(zip(STRATEGIES, seconds[1:].min(axis=0), strict=True))


def rank_main(rank: int, ranks: int, options: argparse.Namespace, output: str, lock: Lock) -> None:
    """One process of a run; the first writes all ranks' times to a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{output}.store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    cost = ComputeCost.load(f"{output}.cost")
    busy = {}
    for name, seconds in busy_seconds(options, ranks, cost, Baton(lock)).items():
        mine = torch.from_numpy(seconds)
        everyone = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(everyone, mine)
        busy[name] = torch.stack(everyone, dim=1).tolist()
    if rank == 0:
        Path(output).write_text(json.dumps(busy))
    dist.destroy_process_group()


def compare(options: argparse.Namespace, ranks: int, cost: ComputeCost, folder: Path) -> list[dict]:
    """Runs the processes and sets their efficiency beside the simulator's."""
    output = folder / f"check_{os.getpid()}_{ranks}"
    cost.save(f"{output}.cost")
    lock = mp.get_context("spawn").Lock()
    try:
        mp.spawn(rank_main, (ranks, options, str(output), lock), nprocs=ranks)
        busy = {name: np.array(rows) for name, rows in json.loads(output.read_text()).items()}
    finally:
        for path in (output, Path(f"{output}.cost"), Path(f"{output}.store")):
            path.unlink(missing_ok=True)
    lengths = sample_lengths(options.steps * ranks * options.batch, SEED)
    rows = []
    for name in STRATEGIES:
        measured = efficiency(busy[name])
        row = {"ranks": ranks, "strategy": name, "steps": options.steps, "predicted": 1.0}
        if name != EQUAL:
            predicted = simulate(
                lengths, ranks, options.batch, name, seed=SEED, model=StepModel(cost=cost)
            )
            row |= {
                "predicted": predicted.efficiency,
                "correlation": float(np.corrcoef(predicted.per_step, measured)[0, 1]),
                "predicted_step_seconds": predicted.step_time.compute,
            }
        row |= {
            "measured": float(measured.mean()),
            "points": 100 * float(measured.mean() - row["predicted"]),
            "mean_step_seconds": float(busy[name].mean()),
        }
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=9, help="times that all steps are measured")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("."), help="for files in between")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cost, timings = fit_step_cost(
        model_config(options), rounds=options.rounds, seed=SEED, clock=time.thread_time
    )
    rows = [row for ranks in options.ranks for row in compare(options, ranks, cost, options.folder)]
    print(f"{'ranks':>5}  {'strategy':<12}{'predicted':>10}{'measured':>10}{'points':>8}")
    for row in rows:
        print(
            f"{row['ranks']:>5}  {row['strategy']:<12}{row['predicted']:>10.4f}"
            f"{row['measured']:>10.4f}{row['points']:>8.2f}"
        )
    payload = {
        "cost": vars(cost),
        "timings": timings,
        "settings": {k: v for k, v in vars(options).items() if k != "folder"},
        "results": rows,
    }
    command = harness.command()
    print(f"written: {harness.save('simulator_check', 'cpu', command, payload)}")
    missed = {row["ranks"]: row["points"] for row in rows if row["strategy"] == EQUAL}
    return int(any(abs(row["points"] - missed[row["ranks"]]) > 100 * TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
