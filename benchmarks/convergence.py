"""What a small encoder learns with each way of clipping, of sending less, optimizer and precision.

    python -m benchmarks.convergence                         # about an hour on two quiet cores
    python -m benchmarks.convergence --tables optimizers --seeds 1

The testbed is configs/quickstart.yaml's ModernBERT on the quickstart's text, 128 wide. All runs
begin with the weights of one that has reached a masked accuracy above 30 %: models use the context
from the first update on. (Runs from fresh weights differ most in when they begin to use it, which
seeds decide as much as methods do.) `plain` has --seeds seeds in any case; they say how far equal
runs are apart. In some runs one rank multiplies its gradient by a large number now and then. Of
each optimizer, LEARNING_RATES are tried with seed 0 before the best has more seeds. Runs may go on
beside other work: no times are taken.

Runs are kept in --folder and not repeated, so that the same command continues where it was stopped;
--only takes some contenders, and two commands may run at once. After each run all that is there is
written to benchmarks/results/cpu/convergence.json and convergence.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.clip_bound import kept_in, recorded
from benchmarks.cluster import CONTENDERS, OVERLAP
from benchmarks.lib import harness
from benchmarks.lib.processes import RankPool, serve
from benchmarks.lib.training_runs import ROOT, as_arguments, train_here
from bert_unpad._files import replacing
from bert_unpad._plots import new_figure, save_figure
from bert_unpad.pretrain.output.metrics import read_json_lines
from bert_unpad.pretrain.parallel import Way

WORKER = "--worker"
POISON = "poison"
POISON_EVERY = 25
PLAIN = "plain"
ONE_RANK = "plain, one rank"
START = "start"
STEPS = {START: 800, "continued": 300}
TESTBED = {
    "config": ROOT / "configs" / "quickstart.yaml",
    "device": "cpu",
    "resume": "never",
    "checkpoint.every": 0,
    "evaluation.every": 0,
    "evaluation.examples": 1000,
    "logging.every": 10,
    "logging.progress": "none",
}
FIRST = {
    "model.hidden_size": 128,
    "model.num_attention_heads": 2,
    "model.intermediate_size": 192,
    "optimizer.lr": 3e-3,
    "schedule.total_steps": STEPS[START],
}
CONTINUED = {
    "model.hidden_size": "null",  # the start's
    "model.num_hidden_layers": "null",
    "model.num_attention_heads": "null",
    "model.intermediate_size": "null",
    "model.max_position_embeddings": "null",
    "optimizer.lr": 1.5e-3,
    "schedule.total_steps": STEPS["continued"],
    "comm.start": STEPS["continued"] // 5,  # updates with plain allreduces, where some are needed
    "comm.local_sgd_period": 8,
}
ADAM = f"AdamW, lr {CONTINUED['optimizer.lr']:g}"
_SENT_LESS = ("local SGD", "DreamDDP", "PowerSGD", "GradientFlow")
# A variance that stays as it is needs a long memory before, and an eps that limits the updates of
# weights whose gradients were small until then.
_LONG = {"optimizer.betas": "[0.9, 0.999]"}
_STEADY = _LONG | {"optimizer.eps": 1e-4}
_FROZEN = {"optimizer.name": "onebit_adam"}  # on one rank nothing is compressed


def _one_bit(name: str, **arguments: Any) -> dict[str, Any]:
    given = {"optimizer.arguments": json.dumps(arguments)} if arguments else {}
    return CONTENDERS[name] | _STEADY | given


SMALL_BUCKETS = {"comm.bucket_mb": 0.25}  # 10 of them
# After comm.start 2, 4, then 8 updates between exchanges, each for 60 updates.
_LOCAL_STEPS = {"local_step_scaler": 60, "local_step_clipper": 8}
# Of each table: a contender's settings in place of the testbed's.
TABLES: dict[str, dict[str, dict[str, Any]]] = {
    "frozen": {
        "frozen variance alone, beta2 0.98": _FROZEN,
        "frozen variance alone, beta2 0.999": _FROZEN | _LONG,
        "AdamW, beta2 0.999": _LONG,
        "frozen variance alone, eps 1e-4": _FROZEN | _STEADY,
        "AdamW, eps 1e-4": _STEADY,
        "frozen variance alone, after half of the run": _FROZEN | _LONG | {"comm.start": 150},
    },
    "sync": {
        "1-bit Adam": _one_bit("1-bit Adam"),
        "1-bit Adam, scale element": _one_bit("1-bit Adam", scale="element"),
        "1-bit Adam, lr 3e-3": _one_bit("1-bit Adam") | {"optimizer.lr": 3e-3},
        "1-bit Adam, scale element, lr 3e-3": _one_bit("1-bit Adam", scale="element")
        | {"optimizer.lr": 3e-3},
        "1-bit Adam, scale row": _one_bit("1-bit Adam", scale="row"),
        "1-bit Adam, scale tensor": _one_bit("1-bit Adam", scale="tensor"),
        "0/1 Adam, scale element, local steps": _one_bit(
            "0/1 Adam", scale="element", **_LOCAL_STEPS
        ),
        "bf16, error feedback": CONTENDERS["+ bf16"],
        "1-bit Adam, beta2 0.98": CONTENDERS["1-bit Adam"],
        "1-bit Adam, beta2 0.98, scale element": CONTENDERS["1-bit Adam"]
        | {"optimizer.arguments": '{"scale": "element"}'},
        **{name: CONTENDERS[name] for name in _SENT_LESS},
        "MT-DAO": CONTENDERS["MT-DAO"]
        | {"optimizer.betas": "[0.999, 0.98]", "optimizer.arguments": '{"period": 8}'},
        "0/1 Adam": _one_bit("0/1 Adam"),
        "0/1 Adam, local steps": _one_bit("0/1 Adam", **_LOCAL_STEPS),
        "0/1 Adam, scale element": _one_bit("0/1 Adam", scale="element"),
        "1-bit LAMB": _one_bit("1-bit LAMB"),
        "1-bit LAMB, scale element": _one_bit("1-bit LAMB", scale="element"),
    },
    "clipping": {
        "none": {"clip.mode": "none"},
        "bucket, adaptive": OVERLAP,
        "before": {"clip.mode": "before"},
        "bucket, equal": OVERLAP | {"clip.policy": "equal"},
    },
    # Bounds that clip half of what each mode clips, by the norms of benchmarks.clip_bound.
    "bounds": {
        f"{name}, half clipped": settings | {"clip.max_norm": bound}
        for name, settings, bound in (
            ("after", {"clip.mode": "after"}, 1.98),
            ("before", {"clip.mode": "before"}, 2.75),
            ("bucket, equal", OVERLAP | {"clip.policy": "equal"}, 3.0),
            ("bucket, adaptive", OVERLAP, 2.75),
            ("bucket, equal, small", OVERLAP | {"clip.policy": "equal"} | SMALL_BUCKETS, 1.4),
            ("bucket, adaptive, small", OVERLAP | SMALL_BUCKETS, 2.7),
        )
    },
    "poison": {
        f"{name}, poisoned": settings | {POISON: 1e6}
        for name, settings in (
            ("none", {"clip.mode": "none"}),
            ("after", {"clip.mode": "after"}),
            ("before", {"clip.mode": "before"}),
            ("bucket, adaptive", OVERLAP),
        )
    },
    "optimizers": {
        "AdamW": {},
        "LAMB": {"optimizer.name": "lamb"},
        "LANS": {"optimizer.name": "lans"},
        "MERIT": {"optimizer.name": "bert_unpad.experimental.MERIT"},
        "StableAdamW": {"optimizer.name": "stable_adamw"},
        "Muon": {"optimizer.name": "muon"},
        "CAME": {
            "optimizer.name": "pytorch_optimizer.CAME",
            "optimizer.betas": "null",
            "optimizer.arguments": '{"betas": [0.9, 0.98, 0.9999]}',
        },
    },
    # As many tokens in an update, 2 % apart at most.
    "packing": {
        "unpadded": {"batching.global_batch_size": 17},
        "unpadded, random order": {
            "batching.global_batch_size": 17,
            "batching.strategy": "random",
        },
        "packed rows": {"batching.global_batch_size": 7, "batching.strategy": "packed"},
    },
    "precision": {"bf16": {"precision": "bf16"}, "fp8": {"precision": "fp8"}},
}
ONE_RANK_TABLES = ("frozen", "precision", "packing")
LEARNING_RATES = {
    "LAMB": (5e-3, 1e-2, 2e-2),
    "LANS": (5e-3, 1e-2, 2e-2),
    "MERIT": (1.5e-3, 3e-3, 6e-3),
    "CAME": (1e-4, 2e-4, 4e-4),
}
DEFAULT_LEARNING_RATES = (7.5e-4, 1.5e-3, 3e-3)


@contextmanager
def poisoned(factor: float) -> Iterator[None]:
    """Makes rank 1 multiply its gradient in every POISON_EVERY-th update."""
    honest, calls = Way.accumulate, 0

    def with_poison(way: Way, step: int, counts: Any) -> Tensor:
        nonlocal calls
        calls += 1
        handles = []
        if dist.get_rank() == 1 and calls % POISON_EVERY == 0:
            handles = [p.register_hook(lambda g: g * factor) for p in way.run.model.parameters()]
        sums = honest(way, step, counts)
        for handle in handles:
            handle.remove()
        return sums

    if factor != 1:
        Way.accumulate = with_poison
    try:
        yield
    finally:
        Way.accumulate = honest


def work(job: dict[str, Any]) -> int:
    """One run on one rank; its exit code, 0 too where it has diverged."""
    with poisoned(job["poison"]), recorded(Path(job["run_dir"]), STEPS["continued"]):
        try:
            return train_here(job["arguments"])
        except FloatingPointError:
            return 0


class Testbed:
    """Runs, each made once and kept.

    Args:
        folder: of what is kept.
        ranks: of the runs.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self._count = folder, ranks
        self._ranks: RankPool | None = None

    def path(self, name: str, seed: int) -> Path:
        return self.folder / f"{name.replace('/', '-')}, seed {seed}.json"

    def run_dir(self, name: str, seed: int) -> Path:
        return self.path(name, seed).with_suffix("")

    def continued(self, name: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
        """A run from the weights of the start; see `run`."""
        weights = {"model.preset": self.run_dir(START, 0) / "model"}
        return self.run(name, seed, CONTINUED | weights | settings)

    def run(self, name: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
        """What a run has reached; loss and accuracy are None where it has diverged."""
        path, run_dir = self.path(name, seed), self.run_dir(name, seed)
        settings = TESTBED | settings | {"run_dir": run_dir, "seed": seed}
        poison = settings.pop(POISON, 1.0)
        job = {"arguments": as_arguments(settings), "poison": poison, "run_dir": str(run_dir)}
        if not path.exists():
            if self._ranks is None:
                command = [sys.executable, "-m", "benchmarks.convergence", WORKER]
                self._ranks = RankPool(command, self._count)
            if code := self._ranks.run(job):
                raise SystemExit(f"{name} has failed with code {code}; its message is above")
            lines = read_json_lines(run_dir / "metrics.jsonl")
            train = [line for line in lines if line["kind"] == "train"]
            end = [line for line in lines if line["kind"] == "evaluation"]
            found = {
                "job": job,
                "seed": seed,
                "mlm_loss": end[-1]["mlm_loss"] if end else None,
                "mlm_accuracy": end[-1]["mlm_accuracy"] if end else None,
                "clipped_share": statistics.fmean(line["clipped_share"] or 0.0 for line in train),
                "direction_kept": kept_in(run_dir),
                "tokens": train[-1]["tokens"],
                "training_loss": [round(line["loss"], 4) for line in train],
            }
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(found))
            print(f"{name}, seed {seed}: {found['mlm_loss']}", flush=True)
        kept = json.loads(path.read_text())
        if kept["job"] != job:
            raise SystemExit(f"{path}: expected a run with today's settings; delete it")
        return kept

    def found(self, name: str) -> list[dict[str, Any]]:
        """The kept runs of that name, by seed."""
        paths = self.folder.glob(f"{name.replace('/', '-')}, seed *.json")
        return sorted((json.loads(path.read_text()) for path in paths), key=lambda x: x["seed"])


def rates_of(name: str) -> tuple[float, ...]:
    """The learning rates that are tried for an optimizer first."""
    return LEARNING_RATES.get(name, DEFAULT_LEARNING_RATES)


def tried(testbed: Testbed, name: str) -> dict[float, list[dict[str, Any]]]:
    """The runs of an optimizer by its learning rates, of those that there are."""
    low, *_, high = rates_of(name)
    rates = (low / 2, *rates_of(name), high * 2)
    found = {rate: testbed.found(f"{name}, lr {rate:g}") for rate in rates}
    return {rate: runs for rate, runs in found.items() if runs}


def best_rate(testbed: Testbed, name: str) -> float:
    """The one whose run with seed 0 has the least loss, of those that have been tried."""
    losses = {rate: runs[0]["mlm_loss"] for rate, runs in tried(testbed, name).items()}
    return min((rate for rate in losses if losses[rate] is not None), key=losses.__getitem__)


def search(testbed: Testbed, name: str, settings: dict[str, Any], seed: int) -> None:
    """Runs of an optimizer: with seed 0 all rates, and one beyond the best if that is at an edge;
    with others the best."""

    def run(rate: float) -> None:
        testbed.continued(f"{name}, lr {rate:g}", seed, settings | {"optimizer.lr": rate})

    if seed:
        run(best_rate(testbed, name))
        return
    low, *_, high = rates_of(name)
    for rate in rates_of(name):
        run(rate)
    best = best_rate(testbed, name)
    if best in (low, high):
        run(low / 2 if best == low else high * 2)


def row_of(name: str, settings: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    losses = [run["mlm_loss"] for run in runs]
    accuracies = [run["mlm_accuracy"] for run in runs]
    sound = None not in losses
    return {
        "contender": name,
        "settings": {key: str(value) for key, value in settings.items()},
        "mlm_loss": statistics.fmean(losses) if sound else None,
        "mlm_loss_of_seeds": losses,
        "mlm_accuracy": statistics.fmean(accuracies) if sound else None,
        "mlm_accuracy_of_seeds": accuracies,
        "clipped_share": statistics.fmean(run["clipped_share"] for run in runs),
        "direction_kept_of_seeds": [run.get("direction_kept") for run in runs],
        "tokens_of_seeds": [run.get("tokens") for run in runs],
        "training_loss_of_seeds": [run["training_loss"] for run in runs],
    }


def collect(folder: Path) -> dict[str, Any]:
    """All that has been run: rows of each table."""
    testbed = Testbed(folder, 0)
    tables: dict[str, list[dict[str, Any]]] = {}
    for title, contenders in {START: {START: {}}, PLAIN: {PLAIN: {}}, **TABLES}.items():
        rows = tables[title] = []
        for name, settings in contenders.items():
            if title != "optimizers":
                if runs := testbed.found(name):
                    rows.append(row_of(name, settings, runs))
                continue
            if runs := tried(testbed, name):
                best = best_rate(testbed, name)
                row = row_of(name, settings | {"optimizer.lr": f"{best:g}"}, runs[best])
                trials = {f"{rate:g}": found[0]["mlm_loss"] for rate, found in runs.items()}
                rows.append(row | {"mlm_loss_of_rates": trials})
    if runs := testbed.found(ADAM):
        tables[ONE_RANK] = [row_of(ONE_RANK, {}, runs)]
    return tables


def draw(path: Path, tables: dict[str, list[dict[str, Any]]]) -> None:
    """A point a row: the mean, and the range of the seeds; the band is the range of `plain`."""
    (plain,) = tables[PLAIN]
    figure = new_figure(9, 8)
    axes = figure.add_subplot(xlabel="held-out masked-token loss (nats), mean and range of seeds")
    axes.axvspan(min(plain["mlm_loss_of_seeds"]), max(plain["mlm_loss_of_seeds"]), alpha=0.15)
    labels = []
    for number, rows in enumerate(tables.values()):
        for row in rows:
            losses = row["mlm_loss_of_seeds"]
            if row["mlm_loss"] is not None:
                place, mean = len(labels), row["mlm_loss"]
                error = [[mean - min(losses)], [max(losses) - mean]]
                axes.errorbar(mean, place, xerr=error, fmt="o", color=f"C{number}", capsize=3)
            labels.append(row["contender"])
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def write(folder: Path) -> None:
    tables = collect(folder)
    payload = {"updates": STEPS, "tables": tables}
    for name, settings in ((START, FIRST), ("continued", CONTINUED)):
        payload[name] = {key: str(value) for key, value in settings.items() if value != "null"}
    path = harness.save("convergence", "cpu", "python -m benchmarks.convergence", payload)
    if tables[PLAIN]:
        draw(path.with_suffix(".png"), tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "convergence")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help="of the tables")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    two, one = Testbed(options.folder, 2), Testbed(options.folder, 1)
    one.run(START, 0, FIRST)
    for seed in range(options.seeds):
        two.continued(PLAIN, seed, {})
    one.continued(ADAM, 0, {"optimizer.lr": CONTINUED["optimizer.lr"]})  # others' baseline
    for seed in range(options.seeds):
        for table in options.tables:
            for name, settings in TABLES[table].items():
                if options.only and name not in options.only:
                    continue
                if table == "optimizers":
                    search(one, name, settings, seed)
                else:
                    (one if table in ONE_RANK_TABLES else two).continued(name, seed, settings)
                write(options.folder)
    write(options.folder)


if __name__ == "__main__":
    serve(work) if sys.argv[1:] == [WORKER] else main()
