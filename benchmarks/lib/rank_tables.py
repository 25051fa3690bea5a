"""The sections of docs/benchmarks.md on several ranks: balance, gradients on slow links, plans."""

from __future__ import annotations

import statistics

from benchmarks.lib.report import (
    LINK,
    between,
    commands,
    count,
    figures,
    names,
    read,
    section,
    source,
    table,
)

NOT_CLIPPED = "clip.mode none"
# Contenders of benchmarks.cluster whose names say something else than how they clip.
CLIPPED = {"+ bucket overlap": "clip.mode bucket", "+ bf16": "clip.mode bucket, bf16"}


def balance() -> str:
    """Straggler efficiency: simulated for many ranks, and measured for a few."""
    return "\n\n".join(filter(None, [_simulated_balance(), _measured_balance()]))


def _simulated_balance() -> str:
    found = [(name, read(name)) for name in names("simulate_*")]
    if not found:
        return ""
    found.sort(key=lambda item: -item[1]["setup"]["ranks"])
    strategies = list(dict.fromkeys(x["strategy"] for _, r in found for x in r["results"]))
    lines, rows = [], []
    for name, result in found:
        setup = result["setup"]
        efficiency = {x["strategy"]: x["efficiency"] for x in result["results"]}
        lines.append(
            f"python -m bert_unpad.simulate --ranks {setup['ranks']} --batch {setup['batch']} "
            f"--strategy {','.join(efficiency)} --json"
        )
        row = [f"[{setup['ranks']:,} x {setup['batch']}]({LINK}/cpu/{name}.json)"]
        rows.append(row + [f"{efficiency[s]:.4f}" if s in efficiency else "" for s in strategies])
    setup = found[0][1]["setup"]
    return section(
        "Balance of work, simulated",
        "Straggler efficiency: mean work over greatest work of a rank, per step. **These figures "
        "are simulated**: the plans are those that training follows, but the work of a sequence is "
        f"a model (linear and quadratic in its length, for {setup['model']}), and no such cluster "
        f"was used. Lengths are those of `{setup['histogram']}`; rows are ranks x sequences of a "
        "rank. `stratified` is what the trainer uses by default, and moves no data. `random` is "
        "plain shuffling; names with `/` also exchange examples (among which ranks, by which "
        "rule); `quotas` gives every rank equally many sequences of each length. What these names "
        "mean: [simulating a cluster](capacity/simulation.md).",
        commands(*lines),
        table(["ranks x batch", *(f"`{s}`" for s in strategies)], rows),
    )


def _measured_balance() -> str:
    parts = []
    check = read("simulator_check")
    if check is not None:
        settings = check["settings"]
        rows = [
            [str(x["ranks"]), x["strategy"], f"{x['predicted']:.4f}", f"{x['measured']:.4f}"]
            for x in check["results"]
        ]
        parts += [
            "**A small model on this machine.** The simulator predicts each step from a cost "
            "model that was fitted to other batches on one process. The same steps then run by "
            f"DDP, {settings['batch']} sequences a rank, and the CPU time that each process "
            "computes is measured. In `same batch` all ranks compute the same, so what it misses "
            "of 1 is the error of the measurement.",
            source("simulator_check", check),
            table(["ranks", "batches", "predicted", "measured"], rows, text_columns=2),
        ]
    exchange = read("exchange")
    if exchange is not None:
        parts += _exchange(exchange)
    return section("Balance of work, measured", *parts) if parts else ""


def _exchange(found: dict) -> list[str]:
    runs: dict[str, list[dict]] = {}
    for run in found["results"]:
        runs.setdefault(run["strategy"], []).append(run)
    rows = []
    for strategy, mine in runs.items():
        losses = [run["held_out_mlm_loss"] for run in mine]
        busy = 1 - statistics.fmean(run["idle_share"] for run in mine)
        planned = 1 - statistics.fmean(run["planned_idle_share"] for run in mine)
        row = [strategy, f"{planned:.3f}", f"{busy:.3f}"]
        row += [f"{statistics.fmean(run['wait_share'] for run in mine):.2%}"]
        hidden = [run["hidden"] for run in mine if run["hidden"] is not None]
        row += [f"{statistics.fmean(hidden):.1%}" if hidden else ""]
        row += [f"{statistics.fmean(run['bytes_per_step'] for run in mine):,.0f}"]
        rows.append([*row, f"{statistics.fmean(losses):.3f}", between(losses, 3)])
    seeds = len(next(iter(runs.values())))
    header = ["`batching.strategy`", "efficiency, planned", "efficiency, measured"]
    header += ["of a step waiting for data", "of the exchange hidden", "bytes a step"]
    return [
        f"**Training with an exchange of examples.** {found['ranks']} ranks of "
        f"{found['batch_size_per_rank']} sequences of at most {found['data']['max_seq_length']} "
        f"tokens, {found['steps']} steps, {count(seeds, 'seed')}. A rank's work is the CPU time "
        "of its training thread. The part of the exchange that training does not wait for is "
        "hidden. `exchange` deals examples out with equal numbers per rank; `exchange-greedy` "
        "without.",
        source("exchange", found),
        table([*header, "held-out loss, mean", "range of seeds"], rows),
        figures("exchange"),
    ]


def clipping_time() -> str:
    """Ways of clipping: seconds of an update on slow links."""
    found = read("clipping")
    if found is None:
        return ""
    rows = []
    for link in found["links"]:
        seconds = {x["contender"]: x["step_seconds_of_rounds"] for x in link["results"]}
        for name, mine in seconds.items():
            ratios = [a / b for a, b in zip(mine, seconds[NOT_CLIPPED], strict=True)]
            shown = f"`{CLIPPED.get(name, name)}`"
            row = [link["rate"], shown, f"{statistics.median(mine):.3f}", between(mine, 3)]
            rows.append([*row, f"{statistics.median(ratios):.2f}", between(ratios)])
    return section(
        "Clipping: what it costs on a slow link",
        f"Two hosts, as [below](#hosts-on-slow-links), {found['batch']} sequences of both in an "
        "update, buckets of 2 MiB (`before` has one), seconds of an update, median of "
        f"{count(found['rounds'], 'round')} in turns. `times none` is the median of the rounds' "
        "ratios. Other programs ran beside it (load average "
        f"{found['load_average_before']:.1f} on {found['machine']['cores']} cores before).",
        source("clipping", found),
        table(
            ["link", "", "s", "range of rounds", "times `none`", "least and greatest"],
            rows,
            text_columns=2,
        ),
    )


def cluster() -> str:
    """Ways of sending less: seconds and bytes."""
    found = read("cluster")
    if found is None:
        return ""
    parts = []
    for link in found["links"]:
        rows = []
        for x in link["results"]:
            row = [
                x["contender"],
                f"{x['step_seconds']:.3f}",
                between(x["step_seconds_of_rounds"], 3),
            ]
            row += [f"{x['of_no_exchange']:.2f}", f"{x['bytes_per_step'] / 1e6:.3f}"]
            rows.append(row)
        header = ["", "s of an update", "range of rounds", "of no exchange", "MB"]
        parts += [f"{link['hosts']} hosts, {link['rate']}:", table(header, rows)]
    counted = found["steps"] - found["settle"]
    return section(
        "Hosts on slow links",
        "A small BERT on processes of one thread in network namespaces, joined by links "
        f"of limited rate: {found['batch']} sequences of all hosts in an update. Seconds are means "
        f"of {counted} updates or a whole period of local steps, median of "
        f"{count(found['rounds'], 'round')} in turns; MB are what a host sends in an update. "
        "`no exchange` lets each rank train a model of its own. More "
        "than two hosts share two cores here, so their updates take longer. "
        "[What to set on a cluster](training/clusters.md#what-to-set); [what models learn "
        "with each](#what-models-learn).",
        source("cluster", found),
        *parts,
        figures("cluster"),
    )


_AUTO_METHODS = {
    "+ bucket overlap": "allreduce",
    "+ bf16": "allreduce in bf16",
    "PowerSGD": "power_sgd",
    "local SGD": "post_local_sgd",
}


def auto_hook() -> str:
    """`comm.hook: auto` beside each hook that it chooses from."""
    found = read("comm_auto")
    if found is None:
        return ""
    rows = []
    for link in found["links"]:
        *fixed, auto = link["results"]
        best = min(x["step_seconds"] for x in fixed)
        for x in link["results"]:
            seconds, rounds = x["step_seconds"], between(x["step_seconds_of_rounds"], 3)
            if x is auto:
                name = f"auto: {' or '.join(dict.fromkeys(y['method'] for y in auto['chosen']))}"
                said = ["", ""]
            else:
                name = _AUTO_METHODS[x["contender"]]
                predicted = statistics.median(y["predicted"][name] for y in auto["chosen"])
                said = [f"{predicted:.3f}", f"{predicted / seconds - 1:+.0%}"]
            row = [link["rate"], name, f"{seconds:.3f}", rounds, f"{seconds / best:.2f}"]
            rows.append(row + said)
    return section(
        "A hook chosen by measurement",
        "`comm.hook: auto` with `comm.guarantee: any` beside each hook that it chooses from, as "
        f"above: two hosts, {found['batch']} sequences, median of "
        f"{count(found['rounds'], 'round')} in turns, seconds of an update. Predicted is what auto "
        "has predicted when it chose last, median of the rounds; times of the best is against the "
        "fastest of the fixed hooks. What else the machine did is in these figures (load average "
        f"{found['load_average_before']:.1f} on {found['machine']['cores']} cores before): the "
        "same method takes other times as auto and fixed. [How it chooses](training/clusters.md"
        "#a-hook-chosen-by-measurement).",
        source("comm_auto", found),
        table(
            ["link", "", "s", "range of rounds", "times of the best", "predicted s", "error"],
            rows,
            text_columns=2,
        ),
    )


def rank_speeds() -> str:
    """Ranks of unequal speed."""
    found = read("rank_speeds")
    if found is None:
        return ""
    rows = []
    for x in found["results"]:
        equal, shared = (statistics.median(x["step_seconds"][k]) for k in ("equal", "by speed"))
        row = [x["where"], f"{equal:.3f}", f"{shared:.3f}", f"{x['faster_by']:.2f}"]
        row += [between(x["faster_by_range"]), f"{x['largest_difference_of_losses']:.1e}"]
        rows.append(row)
    return section(
        "Ranks of unequal speed",
        "A small BERT on two ranks, each bound to a core; a program that never rests is "
        "bound to the second core too, so that its rank gets half of the time. Equal shares of "
        "work against `batching.rank_speeds: auto`, seconds of an update, median of "
        f"{count(found['rounds'], 'round')} in turns. Losses are of the same global batches, and "
        "equal to rounding. [How it works](training/batches.md#ranks-of-unequal-speed).",
        source("rank_speeds", found),
        table(
            ["", "equal", "by speed", "times faster", "range", "losses differ by"],
            rows,
        ),
    )


def one_bit() -> str:
    """The operators that compress to one bit a value."""
    found = read("one_bit")
    if found is None:
        return ""
    rows = []
    for x in found["results"]:
        row = [x["operator"], f"{1e3 * x['seconds']:.1f}", f"{x['gb_per_s']:.1f}"]
        row += [f"{x['copy_share']:.0%}", between([1e3 * y for y in x["rounds"]], 1)]
        rows.append(row)
    return section(
        "One bit a value",
        f"The operators that compress {found['numel'] / 1e6:.0f} million values, as they run "
        f"between {found['ranks']} ranks, against a copy of memory of as many: milliseconds, "
        f"median of {count(found['rounds'], 'round')} in turns; bytes that they must read and "
        "write at least, a second. [What uses them](training/gradients.md#one-bit-a-value).",
        source("one_bit", found),
        table(["", "ms", "GB/s", "of the copy's", "range of rounds, ms"], rows),
    )


def plans() -> str:
    found = read("plan_check")
    if found is None:
        return ""
    rows = []
    for link in found["links"]:
        for x in link["results"]:
            row = [link["link"], x["compression"], str(x["accumulation"])]
            row += [f"{x['predicted']:.2f}", f"{x['measured']:.2f}", f"{x['error']:+.1%}"]
            rows.append(row)
    settings = found["settings"]
    return section(
        "Predicted updates",
        "Seconds of an update that `python -m bert_unpad.plan` predicts, beside the median of "
        f"{count(settings['rounds'], 'real update')} between two processes in network namespaces, "
        "joined by a link of that rate. The prediction knows the rate and a calibration in which "
        f"both processes compute at once. The largest error is {found['worst']:.1%}; the check "
        f"fails above {found['tolerance']:.0%}. [How it predicts](capacity/planning.md).",
        source("plan_check", found),
        table(
            ["link", "compression", "passes", "predicted", "measured", "error"],
            rows,
            text_columns=2,
        ),
    )


def published_plans() -> str:
    """What plans predict of published runs, by who published them, and the furthest off."""
    found = read("published", "model")
    if found is None:
        return ""
    halves, aims = found["halves"], found["aims"]
    figures_of = {"half that was fitted": halves["fitted"], "half that was not": halves["shown"]}
    figures_of |= found["sources"]
    rows = [
        [name, str(x["runs"]), *(f"{x[part]:.1%}" for part in ("median", "most", "worst"))]
        for name, x in figures_of.items()
    ]
    off = sorted(found["runs"], key=lambda run: -abs(run["error"]))[:10]
    worst = [
        [
            f"[{run['name']}]({run['source']})",
            run["half"],
            f"{run['published']:,.0f}",
            f"{run['predicted']:,.0f}",
            f"{run['error']:+.1%}",
        ]
        for run in off
    ]
    own = [
        [
            x["name"],
            f"{1e3 * x['measured']:.1f}",
            f"{1e3 * x['predicted']:.1f}",
            f"{x['error']:+.1%}",
        ]
        for x in found["measured_here"]
    ]
    missed = sum(abs(run["error"]) > aims["worst"] for run in found["runs"])
    return section(
        "Published runs, predicted",
        f"**Modelled**: sequences a second that `python -m bert_unpad.plan` predicts for "
        f"{count(len(found['runs']), 'published run')} of BERT-large, ModernBERT and ESM-2 on 1 to "
        f"{max(run['gpus'] for run in found['runs']):,} GPUs. Every second run was used to fit the "
        "constants of the cost models. The aim of a median error of "
        f"{aims['median']:.0%} is met, that of a worst of {aims['worst']:.0%} is not: "
        f"{count(missed, 'run')} of {len(found['runs'])} are further off. Both halves have runs of "
        "the same software, so errors on that of others are greater. [What is modelled, and what "
        "is left out](capacity/planning.md#checking-it).",
        f"{commands(found['command'])}\n\nComputed on {found['date']} "
        f"([published.json]({LINK}/model/published.json) has every run with its source, "
        f"[published.png]({LINK}/model/published.png) draws them).",
        table(["runs of", "runs", "median error", "9 of 10 within", "worst"], rows),
        "The ten furthest off, in sequences a second:",
        table(["run", "half", "published", "predicted", "error"], worst, text_columns=2),
        "This package's own steps on one GPU, in milliseconds; the error is of the throughput:",
        table(["step", "measured", "predicted", "error"], own),
    )
