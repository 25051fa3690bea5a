"""The figures of docs/embedding.md, from the results of `python -m benchmarks.embed`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.lib.report import Result, between, commands, count, figures, runs, source, table

TORCH, OURS, GRAPHS = "torch", "hf.unpad", ("ONNX Runtime", "OpenVINO")
FROZEN = "hf.freeze"
EIGHT_BITS = ", 8 bits"
MIXED = ("mixed", "bulk")
# What we want on mixed texts in fp32.
FASTER_THAN_TORCH, FASTER_THAN_GRAPHS = 2.0, 1.8

Cell = dict[str, Any]


def embedding() -> str:
    """What stands between the page's markers."""
    found = runs("embed")
    if not found:
        return "Not measured yet:\n\n" + commands("python -m benchmarks.embed")
    parts = [part for name, result in found.items() for part in _figures(name, result)]
    return "\n\n".join(part for part in [*parts, figures("embed*"), *_serving()] if part)


def _serving() -> Iterator[str]:
    """The load test of the server of examples/embedding_server.py."""
    for name, found in runs("serve").items():
        yield f"### A server ({found['machine']['cpu']})"
        yield (
            f"`examples/embedding_server.py` with {found['shape']}, texts of the lengths "
            f"`{found['lengths']}`, one a request; a client sends the next one when it has the "
            "answer. Servers compute with one thread. The peer is sentence-transformers on PyTorch "
            "behind the same server, in batches of 32 sorted by length. "
            f"{count(found['rounds'], 'round')} in turns, medians; "
            "in brackets the slowest and the fastest round."
        )
        yield source(name, found)
        rows = []
        for cell in found["cells"]:
            for x in cell["results"]:
                rates = [run["texts_per_second"] for run in x["rounds"]]
                rate = f"{x['texts_per_second']:.0f} ({min(rates):.0f} to {max(rates):.0f})"
                rows.append([str(cell["clients"]), x["contender"], rate])
                rows[-1] += [f"{1e3 * x[key]:.0f}" for key in ("p50", "p99")]
        header = ["clients", "behind the server", "texts a second", "p50, ms", "p99, ms"]
        yield table(header, rows, text_columns=2)


def _figures(name: str, found: Result) -> Iterator[str]:
    cells = found["cells"]
    yield source(name, found)
    libraries = ", ".join(f"{key} {version}" for key, version in found["versions"].items())
    yield (
        f"{count(found['rounds'], 'round')} in which the contenders take turns, each with "
        f"{count(found['threads'], 'thread')}; medians. {libraries}."
    )
    yield (
        "How many times faster `hf.unpad` is than each contender; below 1 it is slower. "
        '"Filled" is the share of real tokens in batches sorted by length.'
    )
    yield _ratios(cells, OURS)
    for ours, what in (
        (FROZEN, "`hf.freeze(hf.unpad(model))`"),
        (OURS + EIGHT_BITS, '`hf.unpad(model, weights="int8")`'),
        (FROZEN + EIGHT_BITS, "that model, frozen"),
    ):
        if not any(ours in _rows(cell) for cell in cells):
            continue
        beside = (
            ", beside what else rounds, and the least cosine of a text's vector to stock PyTorch's "
            "(of random weights)"
        )
        yield f"The same of {what}{beside if ours.endswith(EIGHT_BITS) else ''}."
        yield _ratios(cells, ours)
    yield from _goals(cells)
    yield "\n".join(f"- {line}" for line in _fastest(cells))
    yield (
        "All contenders. The error is the largest difference to stock PyTorch, in parts of the "
        "largest value; the cosine is the least of a text, or that of all scores."
    )
    yield _all(cells)
    yield "What the lengths are modelled on:"
    yield _lengths(cells, found["modelled"])


def _rows(cell: Cell) -> dict[str, dict[str, Any]]:
    return {x["contender"]: x for x in cell["results"]}


def _ratios(cells: list[Cell], ours: str) -> str:
    """How many times faster one of ours is than what computes as exactly, or than stock PyTorch."""
    rounded = ours.endswith(EIGHT_BITS)
    found = [_rows(cell) for cell in cells]
    names = [name for rows in found for name, x in rows.items() if x["exact"] != rounded]
    names = [name for name in dict.fromkeys([TORCH, *names]) if name != ours]
    lines = []
    for cell, rows in zip(cells, found, strict=True):
        if ours not in rows:
            continue
        line = [cell["shape"], cell["lengths"], str(cell["texts"]), f"{cell['fill']:.0%}"]
        for name in names:
            ratio = rows[name]["seconds"] / rows[ours]["seconds"] if name in rows else None
            line.append("" if ratio is None else f"{ratio:.2f}")
        if rounded:
            shown = [name for name in (*names[1:], ours) if name in rows]
            line.append(", ".join(f"{rows[name]['cosine']:.5f}" for name in shown))
        lines.append(line)
    titles = [*names, *([f"cosines: {', '.join([*names[1:], 'ours'])}"] if rounded else [])]
    return table(["", "lengths", "texts", "filled", *titles], lines, text_columns=2)


def _goals(cells: list[Cell]) -> Iterator[str]:
    rows = []
    for cell in cells:
        found = _rows(cell)
        if cell["lengths"] not in MIXED or OURS not in found:
            continue
        goals = [(TORCH, found[TORCH]["ours_faster_by"], FASTER_THAN_TORCH)]
        graphs = {name: found[name]["ours_faster_by"] for name in GRAPHS if name in found}
        if graphs and cell["task"] != "rerank":
            peer = min(graphs, key=graphs.get)
            goals.append((peer, graphs[peer], FASTER_THAN_GRAPHS))
        for peer, ratio, goal in goals:
            reached = "reached" if ratio >= goal else "missed"
            row = [cell["shape"], cell["lengths"], peer, f"{goal:.1f}", f"{ratio:.2f}", reached]
            rows.append(row)
    if rows:
        yield (
            f"The goals in fp32 on mixed texts are {FASTER_THAN_TORCH:.0f} times the torch "
            f"backend, and for embeddings {FASTER_THAN_GRAPHS} times the faster one of "
            f"{' and '.join(GRAPHS)}."
        )
        yield table(["", "lengths", "compared with", "goal", "times faster", ""], rows, 3)


def _fastest(cells: list[Cell]) -> Iterator[str]:
    """A sentence for each cell: which exact contender is the fastest, and what 8 bits give."""
    for cell in cells:
        found = _rows(cell)
        exact = sorted((x for x in found.values() if x["exact"]), key=lambda x: x["seconds"])
        said = f"{cell['shape']}, {cell['lengths']}: {exact[0]['contender']} is the fastest"
        if len(exact) > 1:
            ratio = exact[1]["seconds"] / exact[0]["seconds"]
            said += f", {ratio:.2f} times as fast as {exact[1]['contender']}"
        for x in found.values():
            if not x["exact"]:
                ratio = exact[0]["seconds"] / x["seconds"]
                said += f"; {x['contender']}, not exact, has {ratio:.2f} times its speed"
        yield f"{said}."


def _all(cells: list[Cell]) -> str:
    rows = []
    for cell in cells:
        for x in cell["results"]:
            row = [f"{cell['shape']}, {cell['lengths']}", x["contender"]]
            row += [f"{x['texts_per_second']:.1f}", f"{x['seconds']:.3f}", between(x["rounds"], 3)]
            row += [f"{x['cpu_seconds']:.3f}", f"{x['error']:.0e}", f"{x['cosine']:.5f}"]
            rows.append(row)
        for name, reason in cell["missing"].items():
            rows.append([f"{cell['shape']}, {cell['lengths']}", f"{name}: {reason}", *[""] * 6])
    header = ["", "", "texts/s", "seconds, median", "least and greatest round", "CPU seconds"]
    return table([*header, "error", "cosine"], rows, text_columns=2)


def _lengths(cells: list[Cell], modelled: dict[str, Any]) -> str:
    rows = []
    for cell in cells:
        of, quartiles = modelled[cell["lengths"]], "/".join(f"{x:.0f}" for x in cell["quartiles"])
        call = f", in batches of a sorted call of {of['sorted_call']}" if of["sorted_call"] else ""
        row = [f"{cell['shape']}, {cell['lengths']}", f"{of['like']}{call}", of["source"]]
        row += [str(cell["texts"]), f"{cell['tokens'] / cell['texts']:.0f}", quartiles]
        rows.append([*row, str(cell["longest"])])
    header = ["", "like", "published", "texts", "mean tokens", "quartiles", "longest"]
    return table(header, rows, text_columns=3)
