"""What families of encoders learn with equal compute: four small models on one text, in one figure.

    python -m benchmarks.families                         # 3 seeds
    python -m benchmarks.families --seeds 1 --steps 300
    python -m benchmarks.families --times                 # on a machine without other work

Trains a BERT, a ModernBERT, an ALBERT and an ELECTRA of one width and depth on the quickstart's
text, each on two ranks of one thread. BERT makes `--steps` updates; the others make as many as take
the same number of floating-point operations: those of matrix products, as `bert_unpad.nn.flops`
counts them and tests compare with PyTorch's own count. Batches, learning rate and schedule are the
same, and none of them was tuned.

All learn masked tokens alone, from the same examples and masks. ELECTRA's masked tokens are its
generator's, which is a quarter as wide and gets that share of the compute, and sees [MASK] in each
of these places (the others in 80 % of them); its discriminator's loss is another quantity, which
compares with nothing here. Runs are kept in --folder: the same command continues where it was
stopped. Writes benchmarks/results/cpu/families.json and families.png.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib import harness
from benchmarks.lib.training_runs import ROOT, arguments_of, trained
from bert_unpad._plots import new_figure, save_figure
from bert_unpad.data import prepare
from bert_unpad.nn import PRESETS, EncoderConfig
from bert_unpad.pretrain.config import read_config
from bert_unpad.pretrain.model import build_model

RANKS = 2
LENGTH = 128  # tokens of the longest example
# What replaces the preset's: widths in shares of the hidden size, in the ratios of the published
# models, and windows that are narrower than the examples.
CONTENDERS: dict[str, dict[str, Any]] = {
    "BERT": {"preset": "bert-base"},
    "ModernBERT": {
        "preset": "modernbert-base",
        "intermediate_size": 1.5,
        "window_pattern": (-1, 16, 16),
    },
    "ALBERT": {"preset": "albert-base", "embedding_size": 0.5},
    "ELECTRA": {"preset": "electra-small", "embedding_size": 0.5, "objective": "rtd"},
}
# Sizes that configs/bert_small.yaml gives and the file of a contender's configuration has.
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
LOSSES = ("mlm_loss", "mlm_accuracy", "rtd_loss", "rtd_accuracy")


def sizes(name: str, options: argparse.Namespace) -> EncoderConfig:
    """The contender's configuration."""
    own = {"intermediate_size": 4.0} | CONTENDERS[name]
    values = PRESETS[own.pop("preset")] | {
        "vocab_size": options.vocab,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "max_position_embeddings": LENGTH,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.0,
    }
    own.pop("objective", None)
    shares = {key: round(x * options.hidden) for key, x in own.items() if isinstance(x, float)}
    return EncoderConfig(**values | own | shares)


def settings_of(name: str, options: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The run's settings, as the trainer names them."""
    path = options.folder / options.key / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes(name, options).to_json(path)
    return {
        "model.preset": path,
        **{f"model.{size}": "null" for size in SIZES},
        "data.objective": CONTENDERS[name].get("objective", "mlm"),
        "data.vocab_size": options.vocab,
        "data.max_seq_length": LENGTH,
        "batching.global_batch_size": options.batch,
        "optimizer.lr": options.lr,
        "schedule.warmup_share": 0.2,
        "checkpoint.every": options.every,
        "checkpoint.keep_last": 1,
        "evaluation.examples": options.examples,
        **more,
    }


def describe(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The contender's parameters, and the mean operations of an update over all examples."""
    settings = settings_of(name, options)
    config, _ = read_config(arguments_of(options.folder / "x", 1, settings))
    data = prepare(config.data)
    model = build_model(config, data.tokenizer.vocab_size, LENGTH)
    lengths = data.train.lengths.astype(np.int64)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_of_update": options.batch * model.num_flops(lengths) / len(lengths),
    }


def train(name: str, seed: int, updates: int, options: argparse.Namespace) -> dict[str, Any]:
    """The held-out losses of one run, by what it has computed until then."""
    every = max(updates // options.points, 1)
    more = {"seed": seed, "logging.every": every, "evaluation.every": every}
    run_dir = options.folder / options.key / f"{name}-seed{seed}-updates{updates}"
    lines = trained(run_dir, updates, settings_of(name, options, **more), RANKS)
    spent = {x["step"]: x for x in lines if x["kind"] == "train"}
    cost = ("flops", "seconds") if options.times else ("flops",)
    curve = [
        {"step": x["step"]}
        | {key: spent[x["step"]][key] for key in cost}
        | {key: x[key] for key in LOSSES if key in x}
        for x in lines
        if x["kind"] == "evaluation"
    ]
    return {"contender": name, "seed": seed, "curve": curve}


def summarise(runs: list[dict[str, Any]], models: dict[str, dict[str, Any]]) -> list[dict]:
    """The end of each contender's runs: means over the seeds, and the range of the losses."""
    rows = []
    for name, model in models.items():
        ends = [run["curve"][-1] for run in runs if run["contender"] == name]
        losses = [end["mlm_loss"] for end in ends]
        means = {
            key: statistics.fmean(end[key] for end in ends)
            for key in ("flops", *LOSSES)
            if key in ends[0]
        }
        rows.append({"contender": name, **model, **means, "mlm_loss_of_seeds": losses})
    return rows


def draw(path: Path, runs: list[dict[str, Any]]) -> None:
    """Held-out figures against operations and, where they were noted, seconds."""
    costs = [key for key in ("flops", "seconds") if key in runs[0]["curve"][0]]
    figure = new_figure(14, 4.2 * len(costs))
    rows = figure.subplots(len(costs), 3, squeeze=False)
    panels = (
        ("mlm_loss", "held-out masked-token loss (nats)"),
        ("mlm_accuracy", "held-out masked tokens right"),
        ("rtd_accuracy", "held-out tokens told apart (discriminator)"),
    )
    for axes, cost in zip(rows, costs, strict=True):
        for panel, (key, label) in zip(axes, panels, strict=True):
            for number, name in enumerate(CONTENDERS):
                mine = [run for run in runs if run["contender"] == name and key in run["curve"][0]]
                for run in mine:
                    panel.plot(
                        [point[cost] for point in run["curve"]],
                        [point[key] for point in run["curve"]],
                        color=f"C{number}",
                        ls="--" if name == "ELECTRA" and key != "rtd_accuracy" else "-",
                        alpha=0.8,
                        label=_label(name, key) if run is mine[0] else None,
                    )
            said = "model FLOPs of training" if cost == "flops" else "seconds of training"
            panel.set(xlabel=said, ylabel=label)
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
    save_figure(figure, path)


def _label(name: str, key: str) -> str:
    return f"{name}'s generator" if name == "ELECTRA" and key != "rtd_accuracy" else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "compare_families")
    parser.add_argument("--steps", type=int, default=700, help="updates of BERT")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=16, help="sequences, of all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--points", type=int, default=10, help="evaluations of a run, about")
    parser.add_argument("--examples", type=int, default=400, help="of an evaluation")
    parser.add_argument("--every", type=int, default=100, help="updates between checkpoints")
    parser.add_argument("--times", action="store_true", help="note seconds too")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.key = (
        f"hidden{options.hidden}-layers{options.layers}-heads{options.heads}-vocab{options.vocab}"
        f"-batch{options.batch}-lr{options.lr}-of{options.examples}"
    )
    models = {name: describe(name, options) for name in CONTENDERS}
    budget = options.steps * models["BERT"]["flops_of_update"]
    for model in models.values():
        model["updates"] = round(budget / model["flops_of_update"])
    runs = []
    for seed in range(options.seeds):
        for name, model in models.items():
            runs.append(train(name, seed, model["updates"], options))
            end = runs[-1]["curve"][-1]
            print(
                f"{name}, seed {seed}: {end['step']} updates, {end['flops']:.3g} FLOPs, held out "
                f"{end['mlm_loss']:.3f}, {end['mlm_accuracy']:.1%} right",
                flush=True,
            )
    rows = summarise(runs, models)
    settings = {k: v for k, v in vars(options).items() if k not in ("folder", "key")}
    payload = {**settings, "ranks": RANKS, "length": LENGTH, "results": rows, "runs": runs}
    payload["sizes"] = {name: sizes(name, options).to_dict() for name in CONTENDERS}
    path = harness.save("families", "cpu", harness.command(), payload)
    draw(path.with_suffix(".png"), runs)
    print(f"written: {path} and {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
