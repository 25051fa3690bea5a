"""The sections of docs/benchmarks.md on what models learn: families, growth, tuned optimizers."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.lib.report import (
    Result,
    between,
    count,
    figures,
    read,
    section,
    source,
    table,
)


def growth() -> str:
    found = read("growth")
    if found is None:
        return ""
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in found["runs"]:
        runs.setdefault(run["contender"], []).append(run)
    rows = []
    for name, mine in runs.items():
        losses = [run["curve"][-1]["loss"] for run in mine]
        accuracy = statistics.fmean(run["curve"][-1]["accuracy"] for run in mine)
        factors = [run["cheaper_to_target"] for run in mine if run["cheaper_to_target"]]
        row = [name, str(len(mine)), f"{statistics.fmean(run['cheaper'] for run in mine):.2f}"]
        row += [f"{statistics.fmean(losses):.3f}", between(losses, 3), f"{accuracy:.1%}"]
        ends = [run["cheaper_to_its_end"] for run in mine if run["cheaper_to_its_end"]]
        for some in (ends, factors):
            said = f"{between(some)} ({len(some)} of {len(mine)})" if some else "not reached"
            row.append(said)
        rows.append(row)
    target = f"{found['target']:.0%}"
    grown = [run for run in found["runs"] if run["contender"] != "full"]
    met = "met" if any((run["cheaper_to_target"] or 0) >= 1.8 for run in grown) else "not met"
    header = ["", "seeds", "times less compute", "final loss, mean", "range of seeds"]
    header += ["masked tokens right", "times less than `full` as good"]
    header += [f"times less compute to {target} (seeds that reach it)"]
    return section(
        "Training in stages",
        "The ModernBERT of [What models learn](#what-models-learn), 4 layers of 128, from fresh "
        f"weights: {found['updates']} updates by each schedule, with the same seeds. Compute is "
        "the operations of matrix products, forward and backward, beside those of `full` with the "
        "same seed: of the whole run, of `full` until it is as good as the run's end, and of both "
        f"until {target} of the masked tokens of held-out text are right, by interpolation between "
        f"evaluations. The aim of 1.8 times less is {met}. In "
        "*preserving* new layers begin with outputs of zero; it is not an option of the trainer. "
        "[What the schedules do](training/growth.md).",
        source("growth", found),
        table(header, rows),
        figures("growth"),
    )


def families() -> str:
    found = read("families")
    if found is None:
        return ""
    rows = []
    for x in found["results"]:
        detector = x["contender"] == "ELECTRA"
        row = [f"{x['contender']}'s generator" if detector else x["contender"]]
        row += [f"{x['parameters'] / 1e6:.2f}", f"{x['updates']:,}", f"{x['flops'] / 1e12:.2f}"]
        row += [f"{x['mlm_loss']:.3f}", between(x["mlm_loss_of_seeds"], 3)]
        row += [f"{x['mlm_accuracy']:.1%}", f"{x['rtd_accuracy']:.1%}" if detector else ""]
        rows.append(row)
    header = ["", "million parameters", "updates", "TFLOPs", "held-out loss, mean"]
    header += ["range of seeds", "masked tokens right", "tokens told apart"]
    return section(
        "Families at equal compute",
        f"Small models of one width ({found['hidden']}) and depth ({found['layers']} layers) on "
        f"the quickstart's text, {found['ranks']} ranks, batches of {found['batch']} examples of "
        f"up to {found['length']} tokens, {count(found['seeds'], 'seed')}. BERT makes "
        f"{found['steps']:,} updates, the others as many as take the same operations in matrix "
        "products, forward and backward. All learn masked tokens alone, with the same examples, "
        "learning rate and schedule. None was tuned, and runs as short as these do not show which "
        "family is best at the sizes it is made for. ELECTRA's masked tokens are those of its "
        "generator, which is a quarter as wide and sees `[MASK]` in all of their places, the "
        "others in 80% of them: its loss says how the generator learns, not how good the "
        "discriminator is. One that calls every token original tells at least 85% of them apart. "
        "Parameters and operations are those of both. "
        "What a discriminator is worth beside the others shows only after fine-tuning, which is "
        "not part of this.",
        source("families", found),
        table(header, rows),
        figures("families"),
    )


def downstream() -> str:
    found = read("downstream")
    if found is None:
        return ""
    best: dict[tuple[str, str], Result] = {}
    for row in found["results"]:
        key = (row["task"], row["contender"])
        if key not in best or statistics.fmean(row["seeds"]) > statistics.fmean(best[key]["seeds"]):
            best[key] = row
    rows = [
        [*key, f"{row['lr']:g}", f"{statistics.fmean(row['seeds']):.3f}", between(row["seeds"], 3)]
        for key, row in sorted(best.items())
    ]
    sizes = "; ".join(
        f"`{task}`: {of['train']:,} to learn from, {of['validation']:,} to measure"
        for task, of in found["rows"].items()
    )
    return section(
        "Fine-tuning, with and without pretraining",
        "The quickstart's model, and one of its configuration with random weights, fine-tuned for "
        f"{count(found['epochs'], 'epoch')} by `python -m bert_unpad.evaluate` on tasks in GLUE's "
        "format, which are made of PyTorch's docstrings; the quickstart has seen those of Python's "
        "standard library alone. `cola` is the Matthews correlation with whether two words beside "
        "each other have been exchanged in a sentence, `rte` the accuracy of telling whether a "
        f"sentence follows another (half do). Rows: {sizes}. The better of "
        f"{count(len({row['lr'] for row in found['results']}), 'learning rate')} for each.",
        source("downstream", found),
        table(["task", "weights", "lr", "mean", "range of seeds"], rows, text_columns=2),
    )


def tuned_optimizers() -> str:
    found = read("tune")
    if found is None:
        return ""
    rows = []
    for name, best in found["results"].items():
        losses = best["held_out_mlm_loss_of_seeds"]
        settings = best["best_settings"]
        said = ", ".join(
            f"`{key.split('.')[-1]}` {_short(v)}"
            for key, v in settings.items()
            if key not in ("optimizer.name", "clip.mode")
        )
        rows.append([name, said, f"{statistics.fmean(losses):.3f}", between(losses, 3)])
    return section(
        "Tuned optimizers",
        f"The best settings of {count(found['trials'], 'trial')} of each optimizer and `clip.mode` "
        f"at a batch of {found['batch']}, {found['steps']} updates, on a small model "
        f"({' '.join(found['rest'])}), trained again with {count(found['seeds'], 'seed')}. They "
        "hold for this model, batch and number of updates only: of BERT-large at batches of 32,768 "
        "and 65,536, Nado et al. (2021, arXiv:2102.06356) report that Adam does as well as LAMB "
        "once both are tuned.",
        source("tune", found),
        table(["", "best settings", "held-out loss, mean", "range of seeds"], rows, text_columns=2),
        " ".join(_compared(found["results"], clip) for clip in found["clips"]),
        f"The figure shows the way there; {found['steps']} updates are a small part of a "
        "pretraining run.",
        figures("tune"),
    )


def _compared(results: dict[str, Any], clip: str) -> str:
    """How far the best two optimizers with the same clipping are apart, and how far seeds are."""
    losses = {
        name.partition("/")[0]: row["held_out_mlm_loss_of_seeds"]
        for name, row in results.items()
        if name.endswith(f"/{clip}")
    }
    if len(losses) < 2:
        return ""
    better, worse, *_ = sorted(losses, key=lambda name: statistics.fmean(losses[name]))
    apart = statistics.fmean(losses[worse]) - statistics.fmean(losses[better])
    seeds = max(max(x) - min(x) for x in losses.values())
    said = f"With `clip.mode` {clip}, {better} ends {apart:.3f} below {worse}, and seeds of one"
    verdict = "so that is better here" if apart > seeds else "so neither is better here"
    return f"{said} differ by up to {seeds:.3f}, {verdict}."


def _short(value: Any) -> str:
    if isinstance(value, str):  # a list of numbers as text, e.g. betas
        numbers = [float(x) for x in value.strip("[]").split(",")]
        return " and ".join(f"{x:.3g}" for x in numbers)
    return f"{value:.3g}"
