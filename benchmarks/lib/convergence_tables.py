"""The section of docs/benchmarks.md on benchmarks.convergence, and its comparisons in words."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.lib.report import Result, between, count, figures, read, section, source, table

NO_DIFFERENCE = "no difference seen"
ONE_RANK = "plain, one rank"
# Other tables compare with `plain`.
BASELINES = {
    "optimizers": "AdamW",
    "frozen": ONE_RANK,
    "precision": ONE_RANK,
    "bounds": "after, half clipped",
    "packing": "unpadded",
}
TITLES = {
    "frozen": "A variance that stays as it is after the warm-up, without compression (one rank)",
    "sync": "What travels between the ranks (two of them)",
    "clipping": "How gradients are clipped (two ranks)",
    "bounds": "Bounds by which each mode clips about half of its parts: averages with `after`, a "
    "rank's gradients with `before`, its buckets with `bucket` (two ranks; small buckets are 10 "
    "instead of 3)",
    "poison": "One of two ranks multiplies its gradient by 1,000,000 in every 25th update",
    "optimizers": "Optimizers (one rank), by the best of three or four learning rates",
    "packing": "Sequences in rows of 128 tokens, which do not see each other, beside as many "
    "tokens unpadded (one rank)",
    "precision": "Precision (one rank)",
}


def rows_of(found: Result) -> dict[str, dict[str, Any]]:
    """All rows by name, each with the name of its baseline."""
    rows = {}
    for title, members in found["tables"].items():
        base = BASELINES.get(title, "plain")
        rows |= {row["contender"]: row | {"baseline": base} for row in members}
    return rows


def spread(row: dict[str, Any]) -> float:
    """How far runs that differ in the seed alone are apart."""
    return max(row["mlm_loss_of_seeds"]) - min(row["mlm_loss_of_seeds"])


def compared(found: Result, name: str) -> str:
    """How far a contender ends from its baseline with the same seeds, or that it is no further than
    the baseline's seeds, or those of `plain`, are apart."""
    rows = rows_of(found)
    row, base = rows[name], rows[rows[name]["baseline"]]
    if row["mlm_loss"] is None:
        return "diverged"
    pairs = zip(row["mlm_loss_of_seeds"], base["mlm_loss_of_seeds"], strict=False)
    apart = statistics.fmean(ours - theirs for ours, theirs in pairs)
    inside = abs(apart) <= max(spread(rows["plain"]), spread(base))
    return NO_DIFFERENCE if inside else f"{apart:+.3f}"


def convergence() -> str:
    found = read("convergence")
    if found is None:
        return ""
    rows = rows_of(found)
    plain, start, updates = rows["plain"], rows["start"], found["updates"]
    parts = []
    for title, text in TITLES.items():
        if not found["tables"][title]:
            continue
        base = BASELINES.get(title, "plain")
        members = found["tables"][title]
        if title not in BASELINES or base == ONE_RANK:
            members = [rows[base], *members]
        more = _MORE.get(title, {})
        lines = []
        for row in members:
            name, losses = row["contender"], row["mlm_loss_of_seeds"]
            shown = [name, _settings(row), str(len(losses))]
            shown += [show(row) for show in more.values()]
            if row["mlm_loss"] is None:
                lines.append([*shown, "diverged", "", "", ""])
                continue
            apart = "" if name == base else compared(found, name)
            shown += [f"{row['mlm_loss']:.3f}", between(losses, 3) if len(losses) > 1 else ""]
            lines.append([*shown, f"{row['mlm_accuracy']:.1%}", apart])
        header = ["", "settings", "seeds", *more]
        header += ["held-out loss", "range of seeds", "masked tokens right", "from the first row"]
        parts += [f"{text}:", table(header, lines, text_columns=2)]
    return section(
        "What models learn",
        f"A ModernBERT, 4 layers of 128, that {updates['start']} updates have brought to "
        f"{start['mlm_accuracy']:.1%} of the masked tokens of held-out text (a loss of "
        f"{start['mlm_loss']:.3f}), trains "
        f"{updates['continued']} updates more, with fresh optimizer states: a batch of 16, "
        f"learning rate {found['continued']['optimizer.lr']} and `clip.mode: after` unless a row "
        "sets others; what travels between ranks is clipped by bucket (`clip.mode: bucket`, "
        "`clip.policy: adaptive`) in all rows but `plain`. Methods with a warm-up send whole "
        "gradients in the first "
        f"{found['continued']['comm.start']} updates. `plain` has "
        f"{count(len(plain['mlm_loss_of_seeds']), 'seed')}, which end {spread(plain):.4f} nats "
        "apart. The last column is the mean over the seeds that a row shares with the first of its "
        "table; where it is less than the seeds of that first row, or of `plain`, are apart, it "
        f"says *{NO_DIFFERENCE}*. The range of a row's own seeds may be larger. Rates are searched "
        "for in the table of optimizers alone: "
        f"{_of_the_rate(rows['AdamW'])}"
        "*Cosine*: of the angle between a rank's gradient and what clipping leaves of it, the mean "
        "over ranks and updates. "
        "So short a run, from weights that are already good, says what a "
        "method loses, not what it would gain in a long one.",
        source("convergence", found),
        *parts,
        figures("convergence"),
    )


def _of_the_rate(adam: dict[str, Any]) -> str:
    """How much a learning rate alone changes, which is more than seeds do."""
    best, rates = adam["settings"]["optimizer.lr"], adam["mlm_loss_of_rates"]
    apart = rates["0.0015"] - rates[best]
    return (
        f"with {best} AdamW ends {apart:.3f} lower, so differences of that size may be the rate's. "
    )


def _direction(row: dict[str, Any]) -> str:
    """How much of a rank's direction clipping has left; nothing where averages are clipped."""
    kept = row["direction_kept_of_seeds"]
    return "" if None in kept else f"{statistics.fmean(kept):.4f}"


def _tokens(row: dict[str, Any]) -> str:
    return f"{statistics.fmean(row['tokens_of_seeds']):,.0f}"


# Columns of one table only.
_MORE = {
    "bounds": {"clipped": lambda row: f"{row['clipped_share']:.0%}", "cosine": _direction},
    "packing": {"tokens": _tokens},
}


def _settings(row: dict[str, Any]) -> str:
    """What a row sets, without what all bucket-wise runs set."""
    common = {"clip.mode": "bucket", "clip.policy": "adaptive", "comm.bucket_mb": "2"}
    own = {k: v for k, v in row["settings"].items() if common.get(k) != v}
    if row["contender"].startswith("bucket"):
        own = row["settings"]
    return ", ".join(f"`{key}: {value}`" for key, value in own.items())
