"""The sections of docs/benchmarks.md on the speed and memory of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.lib.report import (
    Result,
    between,
    count,
    precision,
    read,
    runs,
    section,
    source,
    table,
)

WORKLOADS = {
    "wikipedia": "Wikipedia lengths",
    "glue": "GLUE lengths",
    "single": "one sequence, nothing to unpad",
}


def tables(
    found: dict[str, Result],
    table_of: Callable[[Result], str],
    setup: Callable[[Result], str] = lambda result: "",
) -> list[str]:
    """For each result of a benchmark where it is from, and its table; before them its setup, if
    that is not the first one's, which the section's text has."""
    parts, (first, *_) = [], map(setup, found.values())
    for name, result in found.items():
        said = setup(result)
        parts.append("" if said == first else said)
        parts.append(source(name, result, *filter(None, [result.get("memory_command")])))
        parts.append(table_of(result))
    return parts


def operators() -> str:
    # A run of a single operator has a file of its own.
    found = {name: x for name, x in runs("ops").items() if x.get("op", "all") == "all"}
    if not found:
        return ""
    return section(
        "Operators",
        "Forward and backward pass of one operator. Each entry says how many times faster "
        "`bert_unpad` is, by medians of rounds in which both take turns.",
        *tables(found, _operators_table),
    )


def _operators_table(found: Result) -> str:
    rows = {}
    for entry in found["results"]:
        for peer, ratio in entry["faster_than"].items():
            rows.setdefault((entry["op"], peer), {})[entry["dtype"]] = ratio
    dtypes = list(dict.fromkeys(entry["dtype"] for entry in found["results"]))
    return table(
        ["operator", "compared with", *map(precision, dtypes)],
        (
            [f"`{op.split(',')[0]}`{op[len(op.split(',')[0]) :]}", peer]
            + [f"{ratios[d]:.2f}" if d in ratios else "" for d in dtypes]
            for (op, peer), ratios in rows.items()
        ),
        text_columns=2,
    )


def peak_is_sound(found: Result) -> bool:
    """Whether the peak of a step's run is at least 0.95 of that of the operators' on the same CPU.

    Both measure the same matrix product, and scatter a little. A much lower one was measured while
    something else used the cores, and shares of it would flatter.
    """
    cpu = found["machine"]["cpu"]
    ops = [x["matmul_peak"] for x in runs("ops").values() if x["machine"]["cpu"] == cpu]
    if not ops:
        return False
    return found["matmul_peak"]["float32"] >= 0.95 * max(peak["float32"] for peak in ops)


def pretraining_step() -> str:
    found = runs("model")
    if not found:
        return ""
    peak = (
        "The peak is the rate of a matrix product on all cores, PyTorch's or that of our linear "
        "layers: of fp32, or for bf16 the "
        "faster of both types. "
        if any(map(peak_is_sound, found.values()))
        else ""
    )
    return section(
        "One pretraining step",
        f"{_step_setup(next(iter(found.values())))} "
        '"Plain unpadded" is plain PyTorch on packed tokens with one SDPA '
        'call a sequence and logits at masked positions only; "hf" is Hugging Face. All update '
        "with PyTorch's fused AdamW but `fused_adam`, which is ours and in bf16 keeps the weights "
        "of products rounded. "
        f'{peak}"GB of a step" is what '
        'the step adds at its peak (gradients, activations, temporaries), "GB in all" adds weights '
        "and Adam's state. Memory is measured in a process per contender.",
        *tables(found, _step_table, _step_setup),
    )


def _step_setup(found: Result) -> str:
    rounds = len(found["results"][0]["rounds"])
    return (
        f"Forward, backward and AdamW of BERT-{found['size']} on {len(found['lengths'])} sequences "
        f"of Wikipedia lengths, at most {found['max_length']} tokens, {found['tokens']:,} real "
        f"ones; dropout {found['dropout']}. **{count(rounds, 'timed round')}**, in which the "
        "contenders take turns."
    )


def _step_table(found: Result) -> str:
    with_peak = peak_is_sound(found)
    header = ["", "", "tokens/s", "seconds, median", "least and greatest round"]
    header += ["`bert_unpad` is faster by"] + ["of matmul peak"] * with_peak
    rows = []
    for entry in found["results"]:
        row = [entry["contender"], precision(entry["dtype"]), f"{entry['tokens_per_second']:.0f}"]
        row += [f"{entry['seconds']:.2f}", between(entry["rounds"])]
        row += [f"{entry['ours_faster_by']:.2f}"]
        row += [f"{entry['share_of_matmul_peak']:.0%}"] * with_peak
        gigabytes = (entry.get("step_bytes"), entry.get("peak_bytes"))
        row += ["" if value is None else f"{value / 1e9:.1f}" for value in gigabytes]
        rows.append(row)
    return table([*header, "GB of a step", "GB in all"], rows, text_columns=2)


def long_context() -> str:
    """A ModernBERT's step on long sequences."""
    found = runs("long_context")
    if not found:
        return ""
    rows, first = [], next(iter(found.values()))
    for result, batch in ((each, batch) for each in found.values() for batch in each["batches"]):
        lengths = batch["lengths"]
        what = f"{batch['batch']}: {count(len(lengths), 'sequence')}, {sum(lengths):,} tokens"
        if result["size"] == "tiny":
            what += ", 4 layers of 128"
        for x in batch["results"]:
            row = [what, x["contender"], f"{x['seconds']:.2f}", between(x["rounds"])]
            row.append(f"{x['ours_faster_by']:.2f}")
            rows.append([*row, *(f"{x[key] / 1e9:.1f}" for key in ("step_bytes", "peak_bytes"))])
    rounds = count(first["rounds"], "round")
    header = ["", "", "seconds, median", "least and greatest round", "`bert_unpad` is faster by"]
    return section(
        "Long sequences",
        f"Forward, backward and AdamW of ModernBERT-{first['size']} in {precision(first['dtype'])}"
        f", masked tokens alone; {rounds} in which the contenders take turns. Its layers look at "
        'windows of 128 tokens, every third at all; "no windows" is the same model whose layers '
        'all look at all. "Plain unpadded" is Hugging Face\'s modules on packed tokens with one '
        'SDPA call a sequence, "hf sdpa" its model, padded. Memory as above.',
        *(source(name, result) for name, result in found.items()),
        table([*header, "GB of a step", "GB in all"], rows, text_columns=2),
    )


def versions() -> str:
    found = runs("versions")
    if not found:
        return ""
    return section(
        "This version and an earlier one",
        "Training: the pretraining step above. Inference: hidden states of 64 texts of 10 to 300 "
        "tokens by a model of MiniLM-L6's shape, after `hf.unpad` in one batch; by stock Hugging "
        "Face, sorted by length, in batches of 16. "
        f"{_versions_setup(next(iter(found.values())))}",
        *tables(found, _versions_table, _versions_setup),
    )


def _versions_setup(found: Result) -> str:
    rounds = count(len(found["results"][0]["rounds"]["this"]), "round")
    return (
        "Each entry of the two columns of ratios says "
        f"how many times faster this version is than commit {found['earlier']} and than stock; "
        f"{rounds} in turns, each contender in a process of its own."
    )


def _versions_table(found: Result) -> str:
    rows = []
    for x in found["results"]:
        ratios = [x["faster_than"].get(name) for name in ("earlier", "stock")]
        row = [x["workload"], precision(x["dtype"]), f"{x['seconds']['this']:.3f}"]
        row += ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        rows.append([*row, between(x["rounds"]["this"], 3)])
    header = ["", "", "seconds, median", "than earlier", "than stock", "least and greatest round"]
    return table(header, rows, text_columns=2)


def hugging_face() -> str:
    found = runs("hf")
    if not found:
        return ""
    return section(
        "Hugging Face models",
        "BERT-base of transformers after `hf.unpad`, compared with the same model as it is: padded "
        'in the order in which the sequences come ("padded"), or sorted by length into smaller '
        'batches ("sorted"). Each entry of these two columns says how many times faster the '
        "unpadded model is, by medians over the rounds; with one round there is no spread to "
        "judge it by. Compare rows of one dtype, batch and number of rounds only. A CPU without "
        "bf16 instructions emulates the stock model's bf16 products, so ratios in bf16 are lower "
        "on a CPU that has them.",
        *tables(found, _hugging_face_table),
    )


def _hugging_face_table(found: Result) -> str:
    cases = {}
    for entry in found["results"]:
        key = tuple(entry[k] for k in ("workload", "task", "dropout", "dtype"))
        cases.setdefault(key, {})[entry["contender"]] = entry
    rows = []
    for (workload, task, dropout, dtype), entries in cases.items():
        row = [f"{task}, {WORKLOADS[workload]}", f"{dropout:g}", precision(dtype)]
        row += [str(len(found["lengths"][workload]))]
        row += [str(len(entries["bert_unpad"]["rounds"]))]
        for peer in ("stock padded", "stock sorted"):
            row.append(f"{entries[peer]['ours_faster_by']:.2f}" if peer in entries else "")
        for who in ("stock padded", "bert_unpad"):
            size = entries.get(who, {}).get("peak_bytes")
            row.append("" if size is None else f"{size / 1e9:.1f}")
        rows.append(row)
    header = ["", "dropout", "dtype", "sequences", "rounds", "than padded", "than sorted"]
    return table([*header, "GB, stock padded", "GB, unpadded"], rows)


def optimizers() -> str:
    found = read("optim")
    if found is None:
        return ""
    rows = [
        [
            x["contender"],
            f"{1e3 * x['seconds']:.0f}",
            between([1e3 * seconds for seconds in x["rounds"]], 0),
            f"{x['times_of_our_adam']:.2f}",
        ]
        for x in found["results"]
    ]
    return section(
        "Optimizers",
        f"One update of all {found['parameters'] / 1e6:.0f} million parameters of "
        f"{found['model']}, {precision(found['dtype'])}, {found['rounds']} rounds in turns.",
        source("optim", found),
        table(["", "ms, median", "least and greatest", "times `FusedAdam`"], rows),
    )


def packing() -> str:
    found = read("packing")
    if found is None:
        return ""
    rows = []
    for x in found["results"]:
        row = [x["contender"], f"{x['workload']}, at most {x['row_tokens']}"]
        row += [f"{x['tokens']:,}", f"{x['computed']:,}", f"{x['tokens_per_second']:,.0f}"]
        rows.append([*row, f"{x['ours_faster_by']:.2f}x"])
    header = ["", "lengths", "tokens", "places computed", "tokens/s of a core", "ours is faster by"]
    return section(
        "Packing beside unpadding",
        f"A training step of BERT-{found['size']} in fp32 on the same "
        f"{found['results'][0]['sequences']} sequences: forward, backward and AdamW. Packed rows "
        "hold several sequences, by best fit, and are computed whole with a mask by which none "
        "sees another (Krell et al., 2021); they and the padded batch are Hugging Face's model "
        "with sdpa, logits at masked tokens only; *plain unpadded* is its modules on packed tokens "
        "with one sdpa call a sequence. Seconds are CPU time of one thread, medians of "
        f"{len(found['results'][0]['rounds'])} rounds in turns. `batching.strategy: packed` fills "
        "rows the same way, but computes them as unpadded sequences. [What models learn "
        "from them](#what-models-learn).",
        source("packing", found),
        table(header, rows, text_columns=2),
    )


def memory() -> str:
    found = read("memory")
    if found is None:
        return ""
    sizes = list(dict.fromkeys((x["size"], x["dtype"]) for x in found["results"]))
    rows = {}
    for entry in found["results"]:
        kept = rows.setdefault(entry["contender"], {})
        kept[entry["size"], entry["dtype"]] = entry["bytes_per_token"]
    return section(
        "What a layer keeps",
        "Kilobytes that one encoder layer keeps for its backward pass, per real token; dropout "
        f"{found['dropout']}, {len(found['lengths'])} sequences of Wikipedia lengths, which fill "
        f'{found["fill"]:.0%} of the padded batch. "Fused attention" keeps what FlashAttention '
        "keeps on a GPU; without it, PyTorch's attention on a CPU keeps its probabilities where it "
        "has dropout. These are counted sizes of tensors, so they do not depend on the machine. "
        "[What each number is](architecture.md#what-a-layer-keeps).",
        source("memory", found),
        table(
            ["", *(f"{size}, {precision(dtype)}" for size, dtype in sizes)],
            (
                [contender, *(f"{kept[size] / 1e3:.1f}" for size in sizes)]
                for contender, kept in rows.items()
            ),
        ),
        *_ragged(found.get("ragged", ())),
    )


def host() -> str:
    found = runs("host")
    if not found:
        return ""
    return section(
        "What the host needs for a layer",
        "Microseconds of CPU time for the forward and backward pass of one encoder layer on one "
        "token, 64 features wide: next to nothing but Python, autograd and the dispatcher, which a "
        "GPU waits for in short batches without CUDA graphs. Medians of rounds in turns, of the "
        "ratio too. Operators are all that a pass dispatches.",
        *tables(found, _host_table),
    )


def _host_table(found: Result) -> str:
    rows = []
    for x in found["results"]:
        both = sum(x["microseconds"].values())
        times = [f"{value:.0f}" for value in (*x["microseconds"].values(), both)]
        counts = [str(value) for value in x["operators"].values()]
        rows.append([x["contender"], *times, f"{x['ours_takes']:.2f}", *counts])
    header = ["", "forward", "backward", "both", "`bert_unpad` takes of it", "operators forward"]
    return table([*header, "operators backward"], rows)


def _ragged(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not found:
        return
    yield (
        f"Resident memory of a process, measured, in MB: {found[0]['batches']:,} batches of 8 "
        "texts with 5 to 60 tokens, one thread, fp32, MiniLM's shape. Nearly every batch has "
        "another number of tokens:"
    )
    yield table(
        ["", "", "after a tenth", "after all"],
        (
            [x["use"], {"stock": "transformers", "swapped": "`hf.unpad`"}[x["contender"]]]
            + [f"{x['resident_bytes'][i] / 1e6:.0f}" for i in (0, -1)]
            for x in found
        ),
        text_columns=2,
    )
