"""Does a model train as well in bf16 and in 8 bits? Precisions on one model, in one table.

    python -m benchmarks.precision                        # 1 seed, 300 steps
    python -m benchmarks.precision --seeds 3 --steps 900

Trains a small BERT with each precision and seed, on one process of one thread. A CPU rounds
as a GPU does and multiplies in fp32, so losses can be compared and times cannot. Runs are kept in
--folder and not repeated. Writes benchmarks/results/cpu/precision.json and precision.png.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.lib import harness
from benchmarks.lib.training_runs import ROOT, trained
from bert_unpad._plots import new_figure, save_figure

PRECISIONS = ("fp32", "bf16", "fp8")


def train(precision: str, seed: int, options: argparse.Namespace) -> list[dict]:
    """The evaluations of one run; of what is in the folder if it is complete."""
    run_dir = options.folder / f"{precision}-seed{seed}-steps{options.steps}"
    settings = {
        "seed": seed,
        "precision": precision,
        "evaluation.every": max(options.steps // 6, 1),
        "evaluation.examples": 1000,
    }
    lines = trained(run_dir, options.steps, settings)
    return [
        {name: line[name] for name in ("step", "mlm_loss", "mlm_accuracy")}
        for line in lines
        if line["kind"] == "evaluation"
    ]


def draw(path: Path, runs: list[dict]) -> None:
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot(xlabel="update", ylabel="held-out masked-token loss (nats)")
    for number, precision in enumerate(PRECISIONS):
        for run in (run for run in runs if run["precision"] == precision):
            curve = run["evaluations"]
            axes.plot(
                [point["step"] for point in curve],
                [point["mlm_loss"] for point in curve],
                color=f"C{number}",
                label=precision if run["seed"] == 0 else None,
            )
    axes.legend()
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "compare-precision")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    runs = []
    for seed in range(options.seeds):
        for precision in PRECISIONS:
            evaluations = train(precision, seed, options)
            runs.append({"precision": precision, "seed": seed, "evaluations": evaluations})
            last = evaluations[-1]
            print(f"{precision}, seed {seed}: {last['mlm_loss']:.3f}", flush=True)
    table = []
    for precision in PRECISIONS:
        last = [run["evaluations"][-1] for run in runs if run["precision"] == precision]
        losses = [point["mlm_loss"] for point in last]
        table.append(
            {
                "precision": precision,
                "mlm_loss": statistics.mean(losses),
                "mlm_loss_range": [min(losses), max(losses)],
                "mlm_accuracy": statistics.mean(point["mlm_accuracy"] for point in last),
            }
        )
        print(
            f"{precision:5s} {table[-1]['mlm_loss']:.3f} ({min(losses):.3f} .. {max(losses):.3f})"
        )
    payload = {"steps": options.steps, "seeds": options.seeds, "table": table, "runs": runs}
    path = harness.save("precision", "cpu", harness.command(), payload)
    draw(path.with_suffix(".png"), runs)
    print(f"written to {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
