"""The section of docs/benchmarks.md on GPUs: one part for each of them."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.lib.report import LINK, Result, folder, gpus, read, section, source, table


def measured_on_gpus() -> str:
    """Steps of models, then operators."""
    parts = [part for device in gpus() for part in _parts(device)]
    if not parts:
        return ""
    return section(
        "On a GPU",
        "16-bit activations. A step is forward and backward pass and the update; each contender "
        "takes turns with ours, and operators begin with an empty L2. Under the load of a whole "
        "step these cards lower their clock, so compare within a run only. Where a process "
        "measures two widths, `torch.compile` compiles the second one for any width. The H100's "
        "attention, packed tokens and table of all peers were measured before norms copied rows "
        "ahead and attention's backward pass read its rows in whole sectors, its step in 8 bits "
        "before matrices were rounded by the GPU's own instruction; the H200's optimizers, and "
        "steps without graphs, before an operator's checks stopped writing messages that nobody "
        "sees. An optimizer's step begins when the GPU has nothing else to do, so that the host's "
        "time counts where it is longer than the kernels.",
        *parts,
    )


def _parts(device: str) -> Iterator[str]:
    for name, part in (
        ("model", _steps),
        ("model_peers", _steps),
        ("model_ours", _steps),
        ("packed_tokens", _packed_tokens),
        ("ops_attention", _operators),
        ("ops_norm", _operators),
        ("ops_gelu", _operators),
        ("ops_loss", _operators),
        ("ops_mlp", _operators),
        ("optim", _optimizers),
        ("one_bit", _signs),
        ("trainer", _trainers),
    ):
        found = read(name, device)
        if found is not None:
            yield source(name, found, device=device)
            yield part(found)
            if (folder(device) / f"{name}.png").exists():
                yield f"As a plot: [{name}.png]({LINK}/{device}/{name}.png)."


def _steps(found: Result) -> str:
    rows = []
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
                f"{x['seconds'] / x['reference_seconds']:.2f}",
            ]
        )
    header = ["BERT-" + found["size"], "ms a step", "sequences/s", "of the data sheet's FLOP/s"]
    setup = (
        f"{found['sequences']} sequences of Wikipedia lengths, at most {found['max_length']} "
        f"tokens, {found['tokens']:,} in all, dropout {found['dropout']}, {found['rounds']} rounds."
    )
    more = ["idle", "GB", "times the step with CUDA graphs beside it"]
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
    """How many times as long as ours, the first, each contender takes for both passes."""
    cases = {}
    for x in found["results"]:
        name = f"{x['case']}, dropout {x['dropout_p']}" if "dropout_p" in x else x["case"]
        both = x["passes"]["both"]["contenders"]
        cases[name] = {contender: y["ms"] for contender, y in both.items()}
    ours, *peers = dict.fromkeys(contender for ms in cases.values() for contender in ms)
    rows = [
        [name, f"{1e3 * ms[ours]:.0f}"]
        + [f"{ms[peer] / ms[ours]:.2f}" if peer in ms else "" for peer in peers]
        for name, ms in cases.items()
    ]
    return table(["forward and backward pass", "ours, us", *(f"{p}, times" for p in peers)], rows)


def _optimizers(found: Result) -> str:
    setup = f"{found['model']}: {found['parameters'] / 1e6:.0f} M parameters, {found['dtype']}"
    return _beside_a_copy(setup, "contender", found)


def _signs(found: Result) -> str:
    setup = f"{found['numel'] / 1e6:.0f} M values to signs, {found['ranks']} ranks"
    return _beside_a_copy(setup, "operator", found)


def _beside_a_copy(setup: str, name: str, found: Result) -> str:
    rows = [
        [x[name], f"{1e3 * x['seconds']:.2f}", f"{x['copy_share']:.0%}"] for x in found["results"]
    ]
    return table([setup, "ms", "of a copy's rate"], rows)


def _trainers(found: Result) -> str:
    rows = [
        [name, f"{curve[-1]['seconds']:.0f}", f"{curve[-1]['step']:,}", f"{curve[-1]['loss']:.2f}"]
        for name, curve in found["curves"].items()
    ]
    tokens, examples = (found["data"][f"train_{what}"] for what in ("tokens", "examples"))
    setup = (
        f"BERT-{found['size']} on {examples:,} examples of {tokens / examples:.0f} tokens on "
        f"average, {found['batch']} an update; examples, masks and held-out texts are the same."
    )
    header = ["trainer", "seconds", "updates", "held-out masked-token loss"]
    return f"{setup}\n\n{table(header, rows)}"
