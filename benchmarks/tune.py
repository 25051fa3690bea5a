"""Searches learning rate, betas, weight decay and warm-up of optimizers at a given batch (Optuna).

    python -m benchmarks.tune --batch 256 --steps 40 --trials 12
    python -m benchmarks.tune --batch 1024 --ranks 2 --clips bucket none
    python -m benchmarks.tune --config configs/bert_large_phase1.yaml --batch 16384 --steps 600 \
      --ranks 8 -- --data.source TEXT

Each optimizer gets the same number of trials with each clip.mode over a space of the same size, so
that the best of each may be compared; then the best settings train again with other seeds. A trial
is one run of the trainer, scored by the held-out masked-token loss at its end. Trials are kept in
FOLDER/tune.db (SQLite), their runs beside it: the same command continues where it was stopped.
Options after `--` go to pretrain.py. Writes benchmarks/results/<device>/tune.json and tune.png.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
from pathlib import Path

from benchmarks.lib import harness
from benchmarks.lib.processes import RankPool, serve
from benchmarks.lib.training_runs import ROOT, as_arguments, train_here
from bert_unpad._extras import packages_of
from bert_unpad._plots import new_figure, save_figure
from bert_unpad.pretrain.output.metrics import read_json_lines

with packages_of("tune"):
    import optuna

WORKER = "--worker"
# LAMB's learning rate counts relative to each weight's norm, Adam's is the size of a step: spaces
# of two decades each, around what the literature's large-batch recipes use for BERT.
LEARNING_RATES = {"lamb": (1e-3, 1e-1), "lans": (1e-3, 1e-1)}
DEFAULT_LEARNING_RATES = (1e-4, 1e-2)
RANDOM_TRIALS = 5  # before the sampler (TPE) begins to learn from what it has seen
SMOOTH = 5  # steps whose mean loss counts as reached


def suggest(trial: optuna.Trial, contender: str) -> dict[str, object]:
    """Settings of one trial, as pretrain.py names them.

    Args:
        trial: draws them.
        contender: an optimizer and a clip.mode, with a slash between them.
    """
    optimizer, _, clip = contender.partition("/")
    low, high = LEARNING_RATES.get(optimizer, DEFAULT_LEARNING_RATES)
    beta1 = 1 - trial.suggest_float("one_minus_beta1", 0.05, 0.4, log=True)
    beta2 = 1 - trial.suggest_float("one_minus_beta2", 1e-3, 0.2, log=True)
    return {
        "optimizer.name": optimizer,
        "clip.mode": clip,
        "optimizer.lr": trial.suggest_float("lr", low, high, log=True),
        "optimizer.betas": f"[{beta1}, {beta2}]",
        "optimizer.weight_decay": trial.suggest_float("weight_decay", 1e-4, 1e-1, log=True),
        "schedule.warmup_share": trial.suggest_float("warmup_share", 0.0, 0.4),
    }


class Tuner:
    """The trials of all contenders under one command."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        options.folder.mkdir(parents=True, exist_ok=True)
        self.storage = f"sqlite:///{options.folder / 'tune.db'}"
        self._ranks: RankPool | None = None

    def train(self, run_dir: Path, settings: dict[str, object]) -> list[dict]:
        """The log of one run, which need not have come to its end."""
        options = self.options
        if self._ranks is None:
            self._ranks = RankPool([sys.executable, "-m", "benchmarks.tune", WORKER], options.ranks)
        fixed = {
            "config": str(options.config),
            "run_dir": str(run_dir),
            "resume": "never",
            "batching.global_batch_size": options.batch,
            "schedule.total_steps": options.steps,
            "checkpoint.every": 0,
            "evaluation.every": 0,
            "logging.every": 1,
            "logging.progress": "none",
        }
        if code := self._ranks.run([*as_arguments(fixed | settings), *options.rest]):
            raise SystemExit(f"a run has failed with code {code}; its message is above")
        return read_json_lines(run_dir / "metrics.jsonl")

    def name_of(self, contender: str) -> str:
        """Of a study and its runs: what they train, and with which settings they are compared."""
        options = self.options
        setting = [options.config.name, options.ranks, *options.rest]
        digest = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:8]
        return f"{contender}-batch{options.batch}-steps{options.steps}-{digest}"

    def run_of(self, contender: str, number: int) -> Path:
        return self.options.folder / f"{self.name_of(contender).replace('/', '-')}-{number}"

    def study(self, contender: str) -> optuna.Study:
        """Runs the trials that are missing."""
        options = self.options
        study = optuna.create_study(
            study_name=self.name_of(contender),
            storage=self.storage,
            load_if_exists=True,
        )
        for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)  # it was stopped
            study.enqueue_trial(trial.params)
        counted = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
        done = len(study.get_trials(states=counted))
        # A seed of its own for every start, also after one that was stopped in its first trial: the
        # same one would draw the first trials again.
        study.sampler = optuna.samplers.TPESampler(
            n_startup_trials=RANDOM_TRIALS,
            multivariate=True,
            seed=options.seed + len(study.get_trials()),
        )
        study.optimize(lambda trial: self.score(trial, contender), max(options.trials - done, 0))
        return study

    def score(self, trial: optuna.Trial, contender: str) -> float:
        run_dir = self.run_of(contender, trial.number)
        lines = self.train(run_dir, suggest(trial, contender))
        loss = held_out(lines)
        if loss is None:
            raise optuna.TrialPruned  # diverged: the sampler takes it for worse than all others
        return loss

    def repeat(self, contender: str, best: optuna.trial.FrozenTrial) -> list[list[dict]]:
        """Logs of the best settings: the trial's own, then with other seeds."""
        first = self.run_of(contender, best.number)
        logs = [read_json_lines(first / "metrics.jsonl")]
        settings = suggest(optuna.trial.FixedTrial(best.params), contender)
        for seed in range(1, self.options.seeds):
            run_dir = first.with_name(f"{first.name}-seed{seed}")
            logs.append(self.train(run_dir, settings | {"seed": seed}))
        return logs


def work(arguments: list[str]) -> int:
    """One run on one rank, without its report; its exit code, 0 too where it has diverged."""
    try:
        return train_here(arguments)
    except FloatingPointError:
        return 0


def held_out(lines: list[dict]) -> float | None:
    """The masked-token loss at the end, in nats; None where the run has diverged."""
    found = [line["mlm_loss"] for line in lines if line["kind"] == "evaluation"]
    return found[-1] if found and math.isfinite(found[-1]) else None


def smooth_losses(lines: list[dict]) -> list[float]:
    """Masked-token training loss, the mean of up to SMOOTH steps."""
    losses = [line["mlm_loss"] for line in lines if line["kind"] == "train"]
    return [statistics.mean(losses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(losses))]


def steps_to(curve: list[float], loss: float) -> int | None:
    """Updates until the smoothed loss is at most `loss`."""
    return next((i + 1 for i, value in enumerate(curve) if value <= loss), None)


def report(tuner: Tuner, studies: dict[str, optuna.Study]) -> dict:
    """What came out, per contender, and how soon each reaches the others' final loss."""
    rows, curves = {}, {}
    for name, study in studies.items():
        best = study.best_trial
        logs = tuner.repeat(name, best)
        curves[name] = [smooth_losses(lines) for lines in logs]
        losses = [held_out(lines) for lines in logs]
        rows[name] = {
            "best_settings": suggest(optuna.trial.FixedTrial(best.params), name),
            "best_trial": best.number,
            "held_out_mlm_loss": None if None in losses else statistics.mean(losses),
            "held_out_mlm_loss_of_seeds": losses,
            "trials": [
                {"number": t.number, "state": t.state.name, "loss": t.value, "params": t.params}
                for t in study.trials
            ],
            "training_loss_of_seeds": [[round(x, 4) for x in curve] for curve in curves[name]],
        }
    for name, row in rows.items():
        row["steps_to_final_training_loss_of"] = {
            other: [
                steps_to(curve, statistics.mean(c[-1] for c in curves[other]))
                for curve in curves[name]
            ]
            for other in rows
            if other != name
        }
    return rows


def draw(path: Path, rows: dict) -> None:
    """Trials as they came, and the training loss of the best settings."""
    figure = new_figure(11, 4.5)
    left, right = figure.subplots(1, 2)
    for number, (name, row) in enumerate(rows.items()):
        color = f"C{number}"
        points = [(t["number"], t["loss"]) for t in row["trials"] if t["loss"] is not None]
        best = [min(y for _, y in points[: i + 1]) for i in range(len(points))]
        left.plot(*zip(*points, strict=True), "o", color=color, label=name)
        left.step([x for x, _ in points], best, where="post", color=color, alpha=0.6)
        for seed, curve in enumerate(row["training_loss_of_seeds"]):
            right.plot(
                range(1, len(curve) + 1), curve, color=color, label=None if seed else name, lw=1.2
            )
    left.set(xlabel="trial", ylabel="held-out masked-token loss (nats)", title="search")
    right.set(
        xlabel="step",
        ylabel=f"training masked-token loss (nats, mean of {SMOOTH} steps)",
        title="best settings, all seeds",
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    save_figure(figure, path)


def main() -> None:
    own, rest = sys.argv[1:], []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "bert_small.yaml")
    parser.add_argument("--folder", type=Path, default=Path("runs/tune"))
    parser.add_argument("--optimizers", nargs="+", default=["fused_adam", "lamb"])
    modes = ("bucket", "before", "after", "none")
    parser.add_argument("--clips", nargs="+", default=["after"], choices=modes, help="clip.mode")
    parser.add_argument("--trials", type=int, default=12, help="of each optimizer and clip.mode")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=256, help="sequences, of all ranks")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the search")
    parser.add_argument("--seeds", type=int, default=2, help="runs of the best settings")
    parser.add_argument("--device", default="cpu", help="folder of the results")
    options = parser.parse_args(own)
    options.rest = rest
    optuna.logging.set_verbosity(optuna.logging.INFO)
    tuner = Tuner(options)
    contenders = [f"{name}/{clip}" for clip in options.clips for name in options.optimizers]
    studies = {contender: tuner.study(contender) for contender in contenders}
    rows = report(tuner, studies)
    for name, row in rows.items():
        found = row["held_out_mlm_loss"]
        end = "a seed has diverged" if found is None else f"{found:.4f} held out"
        print(f"{name}: {end}, {row['best_settings']}")
        for other, steps in row["steps_to_final_training_loss_of"].items():
            print(f"  steps to the final training loss of {other}: {steps}")
    settings = {k: v for k, v in vars(options).items() if k not in ("folder", "device", "config")}
    command = harness.command()
    payload = {"config": options.config.name, **settings, "results": rows}
    path = harness.save("tune", options.device, command, payload)
    draw(path.with_suffix(".png"), rows)
    print(f"written: {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    serve(work) if sys.argv[1:] == [WORKER] else main()
