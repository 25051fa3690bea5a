"""Texts to vectors, and pairs to scores, on a CPU: `hf.unpad` in sentence-transformers beside its
other backends.

    pip install --target /tmp/peers --no-deps onnxruntime openvino openvino-telemetry flatbuffers \\
        esm-cpp
    PYTHONPATH=/tmp/peers python -m benchmarks.embed   # about 20 minutes on 2 cores
    python -m benchmarks.embed --quick                 # one shape, seconds; writes nothing

Models have the sizes of published ones and random weights, texts are random words with modelled
lengths (benchmarks/lib/embed_texts.py). What is timed is all of `SentenceTransformer.encode` or
`CrossEncoder.predict`, tokenizer included, in batches of 32 sorted by length, for all contenders
with the same number of threads (benchmarks/lib/embed_contenders.py); for ESM-2 it is the logits.
All take turns. The outputs of each are compared with those of stock PyTorch first, which is the
warm-up too: a contender that should be exact and is not is left out. Peers that are not installed
are named and left out.

Results are written after each shape: `--resume` keeps the cells that are in the file, if it was
measured with the same settings on the same CPU. Writes benchmarks/results/cpu/embed.json and .png.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.lib import harness
from bert_unpad._extras import packages_of

with packages_of("hf"):
    import transformers
with packages_of("test"):
    import sentence_transformers  # noqa: F401

from benchmarks.lib import embed_contenders, embed_plot, embed_shapes, embed_texts
from benchmarks.lib.embed_contenders import NOT_EXACT, OURS, TORCH, Encode
from benchmarks.lib.embed_shapes import SHAPES, Shape
from benchmarks.lib.embed_texts import LENGTHS

QUICK = {"shapes": ["all-MiniLM-L6-v2"], "lengths": ["mixed"], "texts": 32, "rounds": 1}
LARGEST_ERROR = 1e-3  # of the largest value, where a contender should be exact
SETTINGS = ("rounds", "threads", "layers", "seed", "allocator", "batch_size", "versions")


def texts_of(shape: Shape, tokens: np.ndarray, seed: int) -> Sequence[Any]:
    """What a call gets."""
    if shape.task == "logits":
        rng, (first, last) = np.random.default_rng(seed), embed_shapes.ENDS
        bodies = (rng.integers(*embed_shapes.AMINO_ACIDS, size=n - 2) for n in tokens)
        return [np.array([first, *body, last]) for body in bodies]
    vocab = shape.config().vocab_size
    if shape.task == "rerank":
        return embed_texts.make_pairs(tokens, vocab, seed)
    return embed_texts.make_texts(tokens, vocab, seed)


def compare(found: Any, stock: Any) -> dict[str, float]:
    """How far outputs are from stock's: the largest difference, in parts of the largest value, and
    the least cosine of a text's outputs (of all scores, where a text has a single one)."""
    rows, others = ([np.ravel(row) for row in outputs] for outputs in (found, stock))
    if len(others[0]) == 1:
        rows, others = [np.concatenate(rows)], [np.concatenate(others)]
    largest = max(np.abs(row).max() for row in others)
    pairs = list(zip(rows, others, strict=True))
    cosines = (a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in pairs)
    error = max(np.abs(a - b).max() for a, b in pairs)
    return {"error": float(error / largest), "cosine": float(min(cosines))}


def check(
    encoders: Mapping[str, Encode], texts: Sequence[Any], missing: dict[str, str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, dict[str, float]]]:
    """The calls of contenders with right outputs, and how near these are to stock's."""
    outputs = {name: encode(texts) for name, encode in encoders.items()}
    calls, nearness = {}, {}
    for name, encode in encoders.items():
        near = compare(outputs[name], outputs[TORCH])
        if name not in NOT_EXACT and near["error"] > LARGEST_ERROR:
            missing[name] = f"wrong result: {near['error']:.1e} of the largest value"
            continue
        calls[name], nearness[name] = partial(encode, texts), near
    return calls, nearness


def one_by_one(encode: Encode, texts: Sequence[Any]) -> None:
    for text in texts:
        encode([text])


def with_cpu_time(call: Callable[[], Any], spent: list[float]) -> Callable[[], None]:
    """The call, which adds its CPU seconds to a list."""

    def timed() -> None:
        begun = time.process_time()
        call()
        spent.append(time.process_time() - begun)

    return timed


def measure(
    shape: Shape, lengths: str, encoders: Mapping[str, Encode], args: argparse.Namespace
) -> dict[str, Any]:
    """All contenders on texts of these lengths."""
    tokens = embed_texts.sample_tokens(lengths, args.texts or shape.texts, shape.longest, args.seed)
    if shape.task == "rerank":
        tokens = np.minimum(tokens + embed_texts.QUESTION, shape.longest)
    missing: dict[str, str] = {}
    texts = texts_of(shape, tokens, args.seed)
    calls, nearness = check(encoders, texts, missing)
    if LENGTHS[lengths].alone:
        calls = {name: partial(one_by_one, encoders[name], texts) for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    steps = {name: with_cpu_time(call, cpu[name]) for name, call in calls.items()}
    timings = harness.interleave(steps, args.rounds, warmup=0)
    rows = []
    for name, timing in timings.items():
        row = {
            "contender": name, "seconds": timing.median, "rounds": timing.rounds,
            "cpu_seconds": statistics.median(cpu[name]), "cpu_rounds": cpu[name],
            "texts_per_second": len(tokens) / timing.median, "exact": name not in NOT_EXACT,
            **nearness[name],
        }  # fmt: skip
        if OURS in timings:
            row["ours_faster_by"] = timing.median / timings[OURS].median
        rows.append(row)
    return {
        "task": shape.task, "lengths": lengths, "texts": len(tokens), "tokens": int(tokens.sum()),
        "quartiles": np.percentile(tokens, [25, 50, 75]).tolist(), "longest": int(tokens.max()),
        "fill": 1.0 if LENGTHS[lengths].alone else embed_texts.fill_of_sorted_batches(tokens),
        "missing": missing, "results": rows,
    }  # fmt: skip


def show(cell: Mapping[str, Any]) -> None:
    print(
        f"\n{cell['shape']}, {cell['lengths']}: {cell['texts']} texts, {cell['tokens']} tokens, "
        f"{cell['fill']:.0%} of the padded ones",
        flush=True,
    )
    for x in cell["results"]:
        ratio = f"ours is {x['ours_faster_by']:.2f}x" if "ours_faster_by" in x else ""
        print(
            f"  {x['contender']:22s}{x['seconds']:8.3f} s {x['cpu_seconds']:8.3f} s of CPU  "
            f"{ratio:14s} error {x['error']:.0e}, cosine {x['cosine']:.6f}",
            flush=True,
        )
    for name, reason in cell["missing"].items():
        print(f"  {name:22s}left out: {reason}", flush=True)


def wanted(args: argparse.Namespace, done: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """For each shape the lengths that are not measured yet."""
    has = {(cell["shape"], cell["lengths"]) for cell in done}
    cells = {
        name: [x for x in args.lengths or SHAPES[name].lengths if (name, x) not in has]
        for name in args.shapes
    }
    return {name: lengths for name, lengths in cells.items() if lengths}


def kept(args: argparse.Namespace, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells of the file that `--resume` continues.

    Raises:
        SystemExit: the file was measured with other settings or on another CPU.
    """
    path = harness.RESULTS / "cpu" / f"{args.name}.json"
    if not args.resume or not path.exists():
        return []
    found = json.loads(path.read_text())
    now = {**settings, "cpu": harness.machine()["cpu"]}
    before = {key: found.get(key) for key in settings} | {"cpu": found["machine"]["cpu"]}
    if other := [key for key in now if now[key] != before[key]]:
        said = ", ".join(f"{key} was {before[key]!r}, is {now[key]!r}" for key in other)
        raise SystemExit(f"--resume: {path.name} is of another run: {said}")
    return found["cells"]


def save(args: argparse.Namespace, settings: Mapping[str, Any], cells: list[dict]) -> None:
    command = harness.command().replace(" --resume", "")
    order = list(SHAPES)
    cells = sorted(cells, key=lambda cell: order.index(cell["shape"]))
    path = harness.save(args.name, "cpu", command, {**settings, "cells": cells})
    embed_plot.draw(path.with_suffix(".png"), cells)
    print(f"written to {path}", flush=True)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, help="default: each shape's own")
    parser.add_argument("--texts", type=int, help="of a call; default: each shape's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--layers", type=int, help="fewer for a trial; default: each shape's own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--allocator", choices=["heap", "default"], default="default")
    parser.add_argument("--resume", action="store_true", help="keep what the file has")
    parser.add_argument("--quick", action="store_true",
                        help=f"writes nothing, and has other defaults: {QUICK}")  # fmt: skip
    harness.add_name(parser, "embed")
    if parser.parse_known_args(given)[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    os.environ["RAYON_NUM_THREADS"] = str(args.threads)  # of tokenizers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    settings = vars(args) | {
        "allocator": harness.fix_allocator(args.allocator),
        "batch_size": embed_texts.BATCH_SIZE,
        "versions": embed_contenders.versions(),
    }
    settings = {key: settings[key] for key in SETTINGS}
    settings["modelled"] = {name: dataclasses.asdict(x) for name, x in LENGTHS.items()}
    cells = kept(args, settings)
    for name, lengths in wanted(args, cells).items():
        shape = SHAPES[name]
        save_model = partial(embed_shapes.save_model, shape, layers=args.layers)
        with embed_contenders.contenders(shape, args.threads, save_model) as (encoders, missing):
            for each in lengths:
                cell = {"shape": name, **measure(shape, each, encoders, args)}
                cell["missing"] |= missing
                cells.append(cell)
                show(cell)
        del encoders
        gc.collect()
        if not args.quick:
            save(args, settings, cells)


if __name__ == "__main__":
    main()
