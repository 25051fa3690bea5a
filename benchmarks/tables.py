"""Writes docs/benchmarks.md, docs/papers.md, and the figures of README and docs/embedding.md, from
the results, so that no figure goes stale.

    python -m benchmarks.tables           # after a benchmark has written its JSON file
    python -m benchmarks.tables --check   # writes nothing; fails where a file is out of date

Every figure comes from a file in benchmarks/results, and so do the command and the machine beside
it. A benchmark without a file is left out. The sections are in benchmarks/lib/*_tables.py.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.lib import (
    convergence_tables,
    data_tables,
    embed_tables,
    gpu_tables,
    papers,
    rank_tables,
    speed_tables,
    training_tables,
)
from benchmarks.lib.report import (
    LINK,
    ROOT,
    Result,
    count,
    gpus,
    precision,
    read,
    table,
    undated_files,
)

PAGE = ROOT / "docs" / "benchmarks.md"
PAPERS = ROOT / "docs" / "papers.md"
README = ROOT / "README.md"
EMBEDDING = ROOT / "docs" / "embedding.md"
BEGIN = "<!-- figures: written by python -m benchmarks.tables -->"
END = "<!-- end of figures -->"

HEAD = """\
# Benchmarks

All figures on this page are from CPUs, but for those [on a GPU](#on-a-gpu). \
`python -m benchmarks.tables` writes this page from the files in \
[benchmarks/results](../benchmarks/results); do not change it by hand. Contenders take turns \
in one run, round by round, under one allocator setting, on machines that others may use at the \
same time: take the ratios, not the seconds.
"""

TAIL = """\
## Without a table here

```bash
python -m benchmarks.ops --device cuda    # single operators on a GPU
python -m benchmarks.model --device cuda  # a step on a GPU: time, MFU, memory, kernels
python -m benchmarks.optim --device cuda  # optimizers on a GPU
python -m benchmarks.one_bit              # compression to one bit a value, against a copy of memory
```

`benchmarks/bucket_size.py` measures which size of DDP's buckets is fastest on a cluster \
([what to set](training/clusters.md#what-to-set)), `benchmarks/clip_bound.py` which bound a run's \
gradients need ([clipping](training/gradients.md#clipping)). sentence-transformers beside its \
other backends: [embedding.md](embedding.md#measured). What still waits for a GPU: \
[development/gpu-queue.md](development/gpu-queue.md).
"""


def page() -> str:
    """The text of docs/benchmarks.md."""
    sections = [
        speed_tables.operators(),
        speed_tables.pretraining_step(),
        speed_tables.packing(),
        speed_tables.long_context(),
        speed_tables.versions(),
        speed_tables.hugging_face(),
        speed_tables.optimizers(),
        speed_tables.memory(),
        speed_tables.host(),
        data_tables.preparing(),
        data_tables.importing(),
        data_tables.feed(),
        rank_tables.balance(),
        rank_tables.clipping_time(),
        rank_tables.cluster(),
        rank_tables.auto_hook(),
        rank_tables.rank_speeds(),
        rank_tables.one_bit(),
        convergence_tables.convergence(),
        training_tables.families(),
        training_tables.growth(),
        training_tables.tuned_optimizers(),
        training_tables.downstream(),
        rank_tables.plans(),
        rank_tables.published_plans(),
        gpu_tables.measured_on_gpus(),
    ]
    return "\n\n".join([HEAD.strip(), *filter(None, sections), TAIL.strip()]) + "\n"


def summary() -> str:
    """README's figures: a run on a GPU, then ratios on CPUs, each with the number of its rounds and
    the CPU's best instruction set."""
    rows, cores = [], set()
    model, hf = read("model"), read("hf_float32")

    def add(result: Result, what: str, dtype: str, peer: str, ratio: float, rounds: int | None):
        machine = result["machine"]
        cores.add(machine["cores"])
        rows.append(
            [what, precision(dtype), peer, f"{ratio:.2f}", str(rounds or ""), machine["isa"]]
        )

    if model is not None:
        step = (
            f"pretraining step of BERT-{model['size']}, {count(len(model['lengths']), 'sequence')}"
        )
        for x in model["results"]:
            if x["contender"] in ("plain unpadded", "hf padded"):
                ratio, rounds = x["ours_faster_by"], len(x["rounds"])
                add(model, step, x["dtype"], x["contender"], ratio, rounds)
    if hf is not None:
        size = count(len(hf["lengths"]["wikipedia"]), "sequence")
        for x in hf["results"]:
            padded = x["contender"] == "stock padded" and x["workload"] == "wikipedia"
            if padded and x["dtype"] == "float32" and (x["task"], x["dropout"]) != ("training", 0):
                what, ratio, rounds = f"{x['task']}, {size}", x["ours_faster_by"], len(x["rounds"])
                add(hf, f"`hf.unpad`: {what}", x["dtype"], "the same model, padded", ratio, rounds)
    header = ["", "precision", "compared with", "times faster", "rounds", "CPU with"]
    on = " or ".join(map(str, sorted(cores)))
    said = (
        f"Sequences of Wikipedia lengths, medians, on {on} cores. "
        "More, with every machine and command: [docs/benchmarks.md](docs/benchmarks.md)."
    )
    return "\n\n".join([*filter(None, [race()]), said, table(header, rows, text_columns=3)])


def race() -> str:
    """The newest run of both trainers on a GPU: its plot, and where both ended."""
    runs = {device: found for device in gpus() if (found := read("trainer", device)) is not None}
    if not runs:
        return ""
    device, found = max(runs.items(), key=lambda item: item[1]["date"])
    (ours, theirs) = (curve[-1] for curve in found["curves"].values())
    return (
        f"![Held-out loss against seconds of training]({LINK.removeprefix('../')}/{device}/trainer"
        f".png)\n\nBERT-{found['size']} on one {found['machine']['gpu']}, for "
        f"{ours['seconds']:.0f} seconds on the same examples, {found['batch']} an update: a "
        f"held-out masked-token loss of {ours['loss']:.2f} after {ours['step']:,} updates, where "
        f"Hugging Face's Trainer is at {theirs['loss']:.2f} after {theirs['step']:,}."
    )


def with_figures(text: str, figures: str) -> str:
    """A page's text with today's figures between its two markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare, and write nothing")
    args = parser.parse_args()
    if undated := undated_files():
        sys.exit("\n".join(["expected a date, a commit and a machine in", *undated]))
    stale = []
    pages = {
        PAGE: page(),
        PAPERS: papers.page(),
        README: with_figures(README.read_text(), summary()),
        EMBEDDING: with_figures(EMBEDDING.read_text(), embed_tables.embedding()),
    }
    for path, text in pages.items():
        if path.exists() and path.read_text() == text:
            continue
        if args.check:
            stale.append(str(path.relative_to(ROOT)))
        else:
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python -m benchmarks.tables")


if __name__ == "__main__":
    main()
