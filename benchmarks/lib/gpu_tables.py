"""The section of docs/benchmarks.md on GPUs: one part for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.lib.report import LINK, RESULTS, Result, gpus, read, section, source, table

GRAPHS = "bert_unpad, graphs"


def measured_on_gpus() -> str:
    """Steps of models, then operators."""
    parts = [part for device in gpus() for part in _parts(device)]
    if not parts:
        return ""
    return section(
        "On a GPU",
        "16-bit activations. A step is forward and backward pass and the update; each contender "
        "takes turns with ours, and operators begin with an empty L2. Under the load of a whole "
        "step these cards lower their clock, so compare within a run only. `torch.compile` "
        "compiles the second width that it meets for any width.",
        *parts,
    )


def _parts(device: str) -> Iterator[str]:
    for name, part in (
        ("model", _steps),
        ("model_peers", _steps),
        ("packed_tokens", _packed_tokens),
        ("ops_attention", _operators),
        ("ops_norm", _operators),
    ):
        found = read(name, device)
        if found is not None:
            yield source(name, found, device=device)
            yield part(found)
            if (RESULTS.parent / device / f"{name}.png").exists():
                yield f"Where the time goes: [{name}.png]({LINK}/{device}/{name}.png)."


def _steps(found: Result) -> str:
    rows = []
    ours = next(x["seconds"] for x in found["results"] if x["contender"] == GRAPHS)
    for x in found["results"]:
        share = x["share_of_data_sheet_peak"]
        rows.append(
            [
                x["contender"],
                f"{1e3 * x['seconds']:.1f}",
                f"{x['sequences_per_second']:.0f}",
                "" if share is None else f"{share:.0%}",
                f"{x['kernels']['idle_share']:.0%}" if "idle_share" in x["kernels"] else "",
                f"{x['peak_bytes'] / 1e9:.1f}",
                f"{x['seconds'] / ours:.2f}",
            ]
        )
    header = ["BERT-" + found["size"], "ms a step", "sequences/s", "of the data sheet's FLOP/s"]
    setup = (
        f"{found['sequences']} sequences of Wikipedia lengths, at most {found['max_length']} "
        f"tokens, {found['tokens']:,} in all, dropout {found['dropout']}, {found['rounds']} rounds."
    )
    more = ["idle", "GB", "times the step with CUDA graphs"]
    return f"{setup}\n\n{table([*header, *more], rows)}"


def _packed_tokens(found: Result) -> str:
    rows = [
        [
            f"{x['length']:,} tokens a sequence",
            x["contender"],
            f"{x['tokens_per_second'] / 1e3:.0f}",
            f"{x['ours_faster_by']:.2f}",
        ]
        for x in found["results"]
    ]
    header = [f"ModernBERT-{found['size']}", "", "thousand tokens/s", "times ours"]
    return table(header, rows, text_columns=2)


def _operators(found: Result) -> str:
    """How many times as long as ours each contender takes for both passes."""
    cases: list[tuple[str, float, dict[str, Any]]] = []
    for x in found["results"]:
        both = x["passes"]["both"]["contenders"]
        name = f"{x['case']}, dropout {x['dropout_p']}" if "dropout_p" in x else x["case"]
        ours = next(iter(both))
        cases.append(
            (name, both[ours]["ms"], {n: y["ms"] / both[ours]["ms"] for n, y in both.items()})
        )
    peers = list(dict.fromkeys(name for *_, ratios in cases for name in list(ratios)[1:]))
    rows = [
        [name, f"{1e3 * ms:.0f}", *(f"{ratios[p]:.2f}" if p in ratios else "" for p in peers)]
        for name, ms, ratios in cases
    ]
    return table(["forward and backward pass", "ours, us", *(f"{p}, times" for p in peers)], rows)
