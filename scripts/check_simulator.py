"""Checks the simulator against real runs: predicted and measured straggler efficiency.

Processes joined by gloo train a small model on sequences as long as Wikipedia's, with random and
with stratified sampling. Each measures what it computes in every step, without waiting for others:
CPU time of the thread that trains, which other programs and more processes than cores do not add
to (what gloo's own threads do does not count either). All steps are run through several times and
the least time of each counts, as neighbours on the same core only ever slow a step down. The
prediction uses a cost model that is fitted to other batches of the same model on one process, and
nothing from these runs. Writes benchmarks/results/cpu/simulator_check.json.

    python scripts/check_simulator.py        # exit status 1 if they differ by more than 3 points
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from benchmarks import harness
from bert_unpad.data.histogram import sample_lengths
from bert_unpad.data.sampler import BalancedSampler, efficiency
from bert_unpad.nn import BertConfig, BertForPreTraining
from bert_unpad.simulate import ComputeCost, StepModel, simulate
from bert_unpad.simulate.timing import fit_step_cost, random_inputs

STRATEGIES = ("random", "stratified")
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


def busy_seconds(
    options: argparse.Namespace, ranks: int, strategy: str, cost: ComputeCost
) -> np.ndarray:
    """CPU seconds of this rank in each step, the least of all rounds: [steps]."""
    lengths = sample_lengths(options.steps * ranks * options.batch, SEED)
    torch.manual_seed(SEED)
    model = DistributedDataParallel(BertForPreTraining(model_config(options)).train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    least = np.full(options.steps, np.inf)
    for number in range(1 + options.rounds):  # the first warms up
        sampler = BalancedSampler(
            lengths, ranks, dist.get_rank(), options.batch, SEED, strategy, work=cost.work
        )
        for step, indices in enumerate(sampler):
            inputs = random_inputs(model_config(options), lengths[indices], SEED + step)
            start = time.thread_time()
            outputs = model(inputs)
            loss = outputs.mlm_loss_sum + outputs.nsp_loss_sum
            (loss / inputs.batch.total).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.thread_time() - start
            if number > 0:
                least[step] = min(least[step], seconds)
    return least


def rank_main(rank: int, ranks: int, options: argparse.Namespace, output: str) -> None:
    """One process of a run; the first writes all ranks' times to a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{output}.store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    cost = ComputeCost.load(f"{output}.cost")
    busy = {}
    for strategy in STRATEGIES:
        mine = torch.from_numpy(busy_seconds(options, ranks, strategy, cost))
        everyone = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(everyone, mine)
        busy[strategy] = torch.stack(everyone, dim=1).tolist()
    if rank == 0:
        Path(output).write_text(json.dumps(busy))
    dist.destroy_process_group()


def compare(options: argparse.Namespace, ranks: int, cost: ComputeCost, folder: Path) -> list[dict]:
    """Runs the processes and sets their efficiency beside the simulator's."""
    output = folder / f"check_{os.getpid()}_{ranks}"
    cost.save(f"{output}.cost")
    try:
        mp.spawn(rank_main, (ranks, options, str(output)), nprocs=ranks)
        busy = {name: np.array(rows) for name, rows in json.loads(output.read_text()).items()}
    finally:
        for path in (output, Path(f"{output}.cost"), Path(f"{output}.store")):
            path.unlink(missing_ok=True)
    lengths = sample_lengths(options.steps * ranks * options.batch, SEED)
    rows = []
    for strategy in STRATEGIES:
        predicted = simulate(
            lengths, ranks, options.batch, strategy, seed=SEED, model=StepModel(cost=cost)
        )
        measured = efficiency(busy[strategy])
        rows.append(
            {
                "ranks": ranks,
                "strategy": strategy,
                "steps": options.steps,
                "predicted": predicted.efficiency,
                "measured": float(measured.mean()),
                "points": 100 * float(measured.mean() - predicted.efficiency),
                "correlation": float(np.corrcoef(predicted.per_step, measured)[0, 1]),
                "mean_step_seconds": float(busy[strategy].mean()),
                "predicted_step_seconds": predicted.step_time.compute,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3, help="times that all steps are measured")
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
    command = " ".join(["python", "scripts/check_simulator.py", *sys.argv[1:]])
    print(f"written: {harness.save('simulator_check', 'cpu', command, payload)}")
    return int(any(abs(row["points"]) > 100 * TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
