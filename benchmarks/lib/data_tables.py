"""The section of docs/benchmarks.md on data: how fast batches are made."""

from __future__ import annotations

from benchmarks.lib.report import between, count, read, section, source, table


def feed() -> str:
    found = read("feed")
    if found is None:
        return ""
    rows = []
    for x in found["results"]:
        row = [str(x["length"]), x["source"], x["masks"], f"{x['sequences_per_second']:,.0f}"]
        rows.append([*row, between([rate / 1000 for rate in x["rounds"]], 1)])
    shares = {x["source"]: x["python_left"] for x in reversed(found["results"]) if x["python_left"]}
    left = " and ".join(
        f"{between([100 * share for share in values], 0)}% ({name})"
        for name, values in shares.items()
    )
    rounds = len(found["results"][0]["rounds"])
    return section(
        "Feeding a rank",
        "Sequences of one length that one thread reads, masks and packs, in batches of "
        f"{found['batch_tokens']:,} tokens, from files in the page cache; median and range of "
        f"{count(rounds, 'round')}. Masks of shards are drawn ([`data.mask_unit`]"
        "(training/data.md#masking)); HDF5 and TFRecord files bring theirs. While a thread "
        f"collates, a loop of Python in another one keeps {left} of its speed.",
        source("feed", found),
        table(["length", "format", "masks", "sequences a second", "thousands"], rows, 3),
    )
