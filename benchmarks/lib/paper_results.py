"""What results say of papers' claims: the columns `here` and `seen?` of docs/papers.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.convergence_tables import compared, rows_of
from benchmarks.lib.report import Result, between, read


@dataclass(frozen=True)
class Claim:
    """A row of the page."""

    paper: str
    says: str
    ours: Callable[[], str | None]
    """What a result says; None where no result has it."""
    scale: str
    command: str
    verdict: Callable[[], str] | str


def result(name: str, device: str = "cpu") -> Result:
    found = read(name, device)
    if found is None:
        raise SystemExit(f"docs/papers.md: expected a result {name}.json of {device}, got none")
    return found


def learned(*names: str) -> Callable[[], str | None]:
    """How far contenders of benchmarks.convergence end from their baseline."""

    def said() -> str | None:
        found = result("convergence")
        rows = rows_of(found)
        parts = []
        for name in names:
            if name in rows:
                distance = compared(found, name)
                nats = " nats" if distance[0] in "+-" else ""
                parts.append(f"{name}: {distance}{nats}" if len(names) > 1 else distance + nats)
        return "; ".join(parts) or None

    return said


def link(contender: str, hosts: int = 2, rate: str = "200mbit") -> dict[str, Any]:
    """A row of benchmarks.cluster."""
    for entry in result("cluster")["links"]:
        if (entry["hosts"], entry["rate"]) == (hosts, rate):
            return next(row for row in entry["results"] if row["contender"] == contender)
    raise KeyError(contender)


def faster(contender: str, than: str = "plain DDP") -> Callable[[], str]:
    """Time and bytes of a way of sending less, beside another's."""

    def said() -> str:
        own, other = link(contender), link(than)
        seconds = other["step_seconds"] / own["step_seconds"]
        sent = other["bytes_per_step"] / own["bytes_per_step"]
        fewer = f"{sent:.{sent < 10:d}f} times fewer" if sent > 1.05 else "as many"
        return f"updates {seconds:.1f} times as fast as {than}, {fewer} bytes"

    return said


def growth_runs(name: str) -> list[dict[str, Any]]:
    """The runs of a schedule of benchmarks.growth."""
    return [run for run in result("growth")["runs"] if run["contender"] == name]


def grown(name: str) -> Callable[[], str | None]:
    """What a schedule of benchmarks.growth saves and loses."""

    def said() -> str | None:
        if not (mine := growth_runs(name)):
            return None
        cheaper = statistics.fmean(run["cheaper"] for run in mine)
        higher = statistics.fmean(run["higher_loss"] for run in mine)
        factors = [run["cheaper_to_target"] for run in mine if run["cheaper_to_target"]]
        ends = [run["cheaper_to_its_end"] for run in mine if run["cheaper_to_its_end"]]
        target = f"{result('growth')['target']:.0%} masked accuracy"
        said = f"{cheaper:.2f} times less compute in as many updates, loss {higher:+.3f}"
        for some, until in ((ends, "its last accuracy"), (factors, target)):
            factor = f"{between(some)} times less" if some else "no run"
            said += f"; until {until} {factor} ({len(some)} of {len(mine)} seeds)"
        return said

    return said


def sooner(name: str) -> Callable[[], str]:
    """Whether a schedule of benchmarks.growth computes less until the target in all seeds."""

    def said() -> str:
        if not (mine := growth_runs(name)):
            return "not run on the testbed yet"
        if all((run["cheaper_to_target"] or 0) > 1 for run in mine):
            return "less compute to the same accuracy seen; not tried at the paper's size"
        return "less compute in as many updates seen; to the same accuracy **not seen**"

    return said


def unpadded() -> str:
    rows = {x["contender"]: x for x in result("model_peers", "nvidia-h100-80gb-hbm3")["results"]}
    ours = rows["bert_unpad, graphs"]["seconds"]
    parts = [
        f"{rows[name]['seconds'] / ours:.2f} times the speed of {said}"
        for name, said in (
            ("hf padded, torch.compile", "the compiled padded model"),
            ("hf unpadded, flash, torch.compile", "the compiled unpadded one by FlashAttention"),
        )
    ]
    return ", ".join(parts)


def exchanged() -> str:
    runs = [run for run in result("exchange")["results"] if run["strategy"] == "exchange"]
    hidden = statistics.fmean(run["hidden"] for run in runs)
    idle = statistics.fmean(run["idle_share"] for run in runs)
    return f"{hidden:.0%} of the exchange is hidden, ranks idle for {idle:.0%} of a step"


def presorted() -> str:
    found = {x["strategy"]: x["efficiency"] for x in result("simulate_4096x4")["results"]}
    return (
        f"straggler efficiency {found['stratified']:.3f} without moving data, "
        f"{found['random']:.3f} by shuffling"
    )


def clipped() -> str:
    """An update by each way of clipping, of one without."""
    (link,) = result("clipping")["links"]
    rows = {x["contender"]: x["step_seconds"] for x in link["results"]}
    none = rows["clip.mode none"]
    return (
        f"an update takes {rows['+ bucket overlap'] / none:.2f} of the time without clipping, "
        f"`before` {rows['clip.mode before'] / none:.2f}"
    )


def packed() -> str:
    """Packed rows beside a padded batch and unpadded sequences, of lengths as Wikipedia's."""
    found = result("packing")["results"]
    seconds = {x["contender"]: x["seconds"] for x in found if x["workload"] == "Wikipedia"}
    rows = seconds["packed rows"]
    return (
        f"{seconds['padded'] / rows:.2f} times the tokens a second of the padded batch; unpadded "
        f"{rows / seconds['plain unpadded']:.2f} times that of packed rows with the same modules, "
        f"{rows / seconds['unpadded']:.2f} with this package's"
    )


def at_large_batch() -> str:
    found = result("tune")
    losses = {
        name: statistics.fmean(row["held_out_mlm_loss_of_seeds"])
        for name, row in found["results"].items()
    }
    parts = [
        f"`clip.mode: {clip}`: Adam {losses[f'fused_adam/{clip}']:.2f}, LAMB "
        f"{losses[f'lamb/{clip}']:.2f}"
        for clip in found["clips"]
    ]
    return f"batch {found['batch']:,}, {found['steps']} updates, {'; '.join(parts)}"


def predicted(*parts: str) -> Callable[[], str]:
    """What plans say of published runs whose names have these parts."""

    def said() -> str:
        runs = [
            r for r in result("published", "model")["runs"] if all(p in r["name"] for p in parts)
        ]
        return "; ".join(
            f"{run['name']}: {run['predicted']:,.0f} sequences/s predicted, "
            f"{run['published']:,.0f} published"
            for run in runs
        )

    return said


def families() -> str:
    rows = {row["contender"]: row for row in result("families")["results"]}
    bert, albert = rows["BERT"], rows["ALBERT"]
    return (
        f"{bert['parameters'] / albert['parameters']:.1f} times fewer parameters; at equal compute "
        f"{albert['mlm_accuracy']:.1%} of masked tokens right, BERT {bert['mlm_accuracy']:.1%}"
    )


def as_good(name: str) -> Callable[[], str]:
    """Whether a contender of benchmarks.convergence ends as well as its baseline."""

    def said() -> str:
        found = result("convergence")
        if name not in rows_of(found):
            return "not run on the testbed yet"
        distance = compared(found, name)
        if distance == "diverged":
            return "**not seen**: it diverges"
        if distance.startswith("+"):
            return f"**not seen**: it ends {distance[1:]} nats higher"
        return "seen" if distance[0] == "n" else f"seen: it ends {distance[1:]} nats lower"

    return said


def one_bit_adam() -> str:
    rows = rows_of(result("convergence"))
    if not {"1-bit Adam", "1-bit Adam, beta2 0.98"} <= rows.keys():
        return "not run on the testbed yet"
    apart = rows["1-bit Adam, beta2 0.98"]["mlm_loss"] - rows["plain"]["mlm_loss"]
    return (
        f"{as_good('1-bit Adam')()} with `optimizer.eps` 1e-4 and `betas` 0.9, 0.999; **not seen** "
        f"with the defaults 1e-6 and 0.98, where it ends {apart:.3f} nats higher: a variance that "
        "stays as it is costs that, not the bits"
    )


def lamb_or_adam() -> str:
    losses = {
        name: statistics.fmean(row["held_out_mlm_loss_of_seeds"])
        for name, row in result("tune")["results"].items()
    }
    return (
        "**not seen** at the largest batch tried: LAMB ends lower with clipping by bucket"
        if losses["lamb/bucket"] < losses["fused_adam/bucket"]
        else "seen"
    )
