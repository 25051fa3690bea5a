"""One full BERT pretraining step (forward, backward, AdamW) against its peers, in one run.

    python -m benchmarks.model --device cpu               # BERT-base, 8 sequences
    python -m benchmarks.model --device cuda              # BERT-large, 48 sequences, bf16
    python -m benchmarks.model --device cuda --only "hf padded"
    python -m benchmarks.model --device cuda --size tiny --rehearse   # on a CPU, no figures

Sequence lengths are drawn from the Wikipedia histogram; every contender gets the same batch, the
same sizes and the same dropout rate. Writes benchmarks/results/<device>/model.json.

On a CPU memory is measured first, each contender in a process of its own; then time, all of them in
turns. On a GPU each contender takes turns with ours, and its time is split up by kinds of kernels,
with a plot of that in model.png: see benchmarks/lib/model_gpu.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import harness, model_steps
from benchmarks.lib.model_contenders import CONTENDERS, OURS, Setup
from benchmarks.lib.model_gpu import Run, show_table
from benchmarks.lib.model_plot import draw
from benchmarks.lib.model_steps import VOCAB, make_inputs, make_step
from benchmarks.lib.peers import PaddedInputs, Peers, by_sequence
from benchmarks.lib.step_device import Gpu, Host
from bert_unpad._extras import packages_of
from bert_unpad.batch import PackedInputs
from bert_unpad.nn import BertForPreTraining
from bert_unpad.nn.flops import training_flops

PLAIN_ADAM, FUSED_ADAM = "bert_unpad", "bert_unpad, fused_adam"
PEERS = {
    "plain unpadded": "unpadded",
    "hf padded, logits at labels": "labels",
    "hf padded": "padded",
}


def losses(
    args: argparse.Namespace, kinds: Collection[str], dtype: torch.dtype
) -> dict[str, tuple[Callable[[Any], torch.Tensor], torch.optim.Optimizer]]:
    """Loss and optimizer of the contenders named in `kinds`; the peers share one model."""
    torch.manual_seed(0)
    found = {}
    for kind in (PLAIN_ADAM, FUSED_ADAM):
        if kind in kinds:
            ours = BertForPreTraining(model_steps.config(args.size, args.dropout)).train()
            adam = (
                model_steps.adamw(ours)
                if kind == PLAIN_ADAM
                else model_steps.fused_adam(ours, dtype)
            )
            found[kind] = (model_steps.our_loss(ours), adam)
    if any(kind in PEERS for kind in kinds):
        stock = model_steps.hugging_face(args.size, args.dropout)
        peers, adam = Peers(stock).train(), model_steps.adamw(stock)
        ways = {
            "unpadded": lambda x: peers.unpadded(x, by_sequence),
            "labels": lambda x: peers.labels(PaddedInputs.build(x)),
            "padded": lambda x: peers.padded(PaddedInputs.build(x)),
        }
        found |= {k: (ways[how], adam) for k, how in PEERS.items() if k in kinds}
    return found


def measure_memory(args: argparse.Namespace, inputs: PackedInputs) -> harness.Memory:
    """Of the contender that `--memory-of` names, in this process."""
    kind, dtype = args.memory_of.rsplit(", ", 1)
    dtype = getattr(torch, dtype)
    loss, adam = losses(args, [kind], dtype)[kind]
    few = make_inputs(2, 32, args.seed, VOCAB)
    first, step = (make_step(loss, adam, x, dtype) for x in (few, inputs))
    return harness.memory_of(adam, first, step)


def memory_in_own_process(name: str) -> harness.Memory:
    command = [sys.executable, "-m", "benchmarks.model", *sys.argv[1:], "--memory-of", name]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return harness.Memory(**json.loads(out.splitlines()[-1]))


def replace_memory(
    args: argparse.Namespace, memory: Mapping[str, harness.Memory], inputs: PackedInputs
) -> Path:
    """Puts memory into the JSON file, next to the times of an earlier run of the same setup."""
    report = json.loads((harness.RESULTS / args.device / f"{args.name}.json").read_text())
    setup = {
        "machine": harness.machine(), "size": args.size, "dropout": args.dropout,
        "lengths": inputs.batch.lengths.tolist(), "max_length": args.max_length,
    }  # fmt: skip
    for key, value in setup.items():
        if report[key] != value:
            raise SystemExit(f"--keep-times: {key} was {report[key]!r}, now it is {value!r}")
    for row in report["results"]:
        row |= memory_fields(memory[f"{row['contender']}, {row['dtype']}"])
    command, _ = report.pop("command"), report.pop("machine")
    report["memory_command"] = harness.command()
    return harness.save(args.name, args.device, command, report)


def memory_fields(memory: harness.Memory) -> dict[str, int]:
    return {
        "state_bytes": memory.state,
        "step_bytes": memory.step,
        "peak_bytes": memory.peak,
    }


def run_on_gpu(args: argparse.Namespace) -> None:
    """The whole of `--device cuda`, or a rehearsal of it on the CPU."""
    device = Host() if args.rehearse else Gpu()
    names = [name for name in CONTENDERS if args.only is None or args.only in name]
    if not names:
        raise SystemExit(f"--only {args.only}: no contender has that in its name: "
                         f"{', '.join(CONTENDERS)}")  # fmt: skip
    if not args.rehearse:  # as the trainer does; the first step of a kind waits for it
        harness.time_algorithms()
    torch.manual_seed(args.seed)
    inputs = make_inputs(args.sequences, args.max_length, args.seed, VOCAB, even=True)
    setup = Setup(args.size, args.dropout, args.max_length, inputs, device.device)

    def save(report: dict[str, Any]) -> None:
        if not args.rehearse:
            harness.save(args.name, device.folder, harness.command(), report)

    run = Run(device, setup, args.rounds, save)
    print(f"{inputs.batch.total} tokens of {args.sequences} x {args.max_length}, "
          f"{run.flops / 1e12:.3f} TFLOP a step; matmul peak {run.peak / 1e12:.1f} TFLOP/s",
          flush=True)  # fmt: skip
    report = run.measure(names, args.start_within)
    run.end()
    show_table(report)
    if not args.rehearse:
        folder = harness.RESULTS / device.folder
        print(f"written to {folder / args.name}.json")
        try:
            draw(folder / f"{args.name}.png", report)
        except ImportError:
            print("no plot: matplotlib is not installed")
    failed = [name for name in OURS if name in report["not_run"]]
    if failed and not args.rehearse:
        raise SystemExit(f"of our own, {' and '.join(failed)} did not run")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--size", choices=list(model_steps.SIZES), help="default: base on a CPU, large on a GPU"
    )
    parser.add_argument("--sequences", type=int, help="default: 8 on a CPU, 48 on a GPU")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, help="default: 3 on a CPU, 10 on a GPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="run only the contenders whose name contains this")
    harness.add_name(parser, "model")
    cpu = parser.add_argument_group("on a CPU")
    cpu.add_argument("--warmup", type=int, help="rounds that do not count (default: 1)")
    cpu.add_argument("--allocator", choices=["heap", "default"], help="default: heap")
    cpu.add_argument("--dtype", choices=["float32", "bfloat16", "both"], help="default: both")
    cpu.add_argument("--memory-of", help="print only the memory of this contender, as JSON")
    cpu.add_argument(
        "--keep-times",
        action="store_true",
        default=None,
        help="measure only memory anew; times stay in the JSON",
    )
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument(
        "--start-within",
        type=float,
        metavar="SECONDS",
        help="contenders whose turn comes later are left out",
    )
    gpu.add_argument("--rehearse", action="store_true", default=None, help="try it out on a CPU")
    args = parser.parse_args(given)
    on_gpu = args.device == "cuda"
    for group, fits in ((cpu, not on_gpu), (gpu, on_gpu)):
        for action in group._group_actions:
            if not fits and getattr(args, action.dest) is not None:
                parser.error(f"{action.option_strings[0]} does not go with --device {args.device}")
    defaults = {"size": "base", "sequences": 8, "rounds": 3, "warmup": 1, "allocator": "heap"}
    if on_gpu:
        defaults = {"size": "large", "sequences": 48, "rounds": 10, "start_within": float("inf")}
    for key, value in defaults.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    return args


def main() -> None:
    args = arguments()
    if args.device == "cuda":
        run_on_gpu(args)
        return
    dtypes = {"float32": [torch.float32], "bfloat16": [torch.bfloat16]}
    args.dtypes = dtypes.get(args.dtype, [torch.float32, torch.bfloat16])
    allocator = harness.fix_allocator(args.allocator)
    inputs = make_inputs(args.sequences, args.max_length, args.seed, VOCAB)
    if args.memory_of:
        print(json.dumps(dataclasses.asdict(measure_memory(args, inputs))))
        return
    tokens = inputs.batch.total
    flops = training_flops(model_steps.config(args.size, args.dropout), inputs)
    names = [
        f"{kind}, {str(dtype).removeprefix('torch.')}"
        for dtype in args.dtypes
        for kind in (PLAIN_ADAM, FUSED_ADAM, *PEERS)
    ]
    names = [name for name in names if args.only is None or args.only in name]
    if any(name.rsplit(", ", 1)[0] in PEERS for name in names):
        with packages_of("hf"):
            import transformers  # noqa: F401  before anything is measured
    print(
        f"{tokens} tokens of {args.sequences} x {args.max_length}, {flops / 1e12:.3f} TFLOP a step"
    )
    memory = {}
    for name in names:
        memory[name] = memory_in_own_process(name)
        print(
            f"  {name:40s} {memory[name].state / 1e9:8.2f} GB + {memory[name].step / 1e9:.2f} GB",
            flush=True,
        )
    if args.keep_times:
        print(f"written to {replace_memory(args, memory, inputs)}")
        return
    built = {
        dtype: losses(args, {name.rsplit(", ", 1)[0] for name in names}, dtype)
        for dtype in args.dtypes
    }
    steps = {}
    for name in names:
        kind, dtype = name.rsplit(", ", 1)
        steps[name] = make_step(*built[getattr(torch, dtype)][kind], inputs, getattr(torch, dtype))
    peaks = harness.matmul_peaks()
    print("matmul peak: " + ", ".join(f"{k} {v / 1e9:.0f} GFLOP/s" for k, v in peaks.items()))
    print(f"allocator: {allocator}", flush=True)
    timings = harness.interleave(
        steps, args.rounds, args.warmup,
        on_time=lambda name, s: print(f"  {name:40s} {s:8.2f} s", flush=True),
    )  # fmt: skip
    # Once more, and the better one: other tenants of a machine may have held back the first.
    peaks = {dtype: max(value, peaks[dtype]) for dtype, value in harness.matmul_peaks().items()}
    # A CPU without bf16 instructions multiplies bf16 activations fastest in fp32.
    peak_of = {"float32": peaks["float32"], "bfloat16": max(peaks.values())}
    rows = []
    for name, timing in timings.items():
        kind, dtype = name.rsplit(", ", 1)
        ours = timings.get(f"{PLAIN_ADAM}, {dtype}")
        rows.append(
            {
                "contender": kind,
                "dtype": dtype,
                "seconds": timing.median,
                "rounds": timing.rounds,
                "tokens_per_second": tokens / timing.median,
                "share_of_matmul_peak": flops / timing.median / peak_of[dtype],
                "ours_faster_by": timing.median / ours.median if ours else None,
                **memory_fields(memory[name]),
            }
        )
    print(f"\n{'contender':32s}{'dtype':>10s}{'s/step':>9s}{'tokens/s':>10s}{'of peak':>9s}"
          f"{'peak GB':>9s}{'ours is':>9s}")  # fmt: skip
    for r in rows:
        ratio = f"{r['ours_faster_by']:.2f}x" if r["ours_faster_by"] else ""
        print(
            f"{r['contender']:32s}{r['dtype']:>10s}{r['seconds']:9.2f}"
            f"{r['tokens_per_second']:10.0f}{r['share_of_matmul_peak']:9.1%}"
            f"{r['peak_bytes'] / 1e9:9.2f}{ratio:>9s}"
        )
    path = harness.save(
        args.name, args.device, harness.command(),
        {
            "size": args.size, "dropout": args.dropout, "lengths": inputs.batch.lengths.tolist(),
            "max_length": args.max_length, "tokens": tokens, "flops": flops,
            "matmul_peak": peaks, "allocator": allocator, "results": rows,
        },
    )  # fmt: skip
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
