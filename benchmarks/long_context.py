"""One training step of a ModernBERT on long sequences, with and without windows, against its peers.

    python -m benchmarks.long_context                    # 40 minutes on two cores with 24 GB
    python -m benchmarks.long_context --size tiny --rounds 1 --dry      # try it out

Masked tokens alone, 30 % of them, in bf16 by default: forward, backward and update. Two batches:
one sequence of `--longest` tokens, and sequences of mixed lengths with a mean of `--mean`.
Peers are Hugging Face's own model (sdpa, padded) and its modules on packed tokens with one sdpa
call a sequence. Memory is measured first, each contender in a process of its own; then time, all in
turns. Writes benchmarks/results/cpu/long_context.json, or under another `--name`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from benchmarks.lib import harness, model_steps, modernbert_peers
from benchmarks.lib.long_sequences import SIZES, config, hugging_face, masked_batch, our_loss
from benchmarks.lib.peers import PaddedInputs
from bert_unpad._extras import packages_of
from bert_unpad.batch import PackedInputs
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.nn.flops import training_flops

OURS, NO_WINDOWS = "bert_unpad", "bert_unpad, no windows"
PLAIN, STOCK = "plain unpadded", "hf sdpa"
CONTENDERS = (OURS, NO_WINDOWS, PLAIN, STOCK)
LONG, MIXED = "one long sequence", "mixed lengths"


def batch_of(name: str, args: argparse.Namespace) -> PackedInputs:
    """Random tokens; MASKED of each sequence are to be predicted."""
    lengths = [args.longest]
    if name == MIXED:
        # Quantiles of an exponential distribution: a few long documents among many short ones.
        places = (torch.arange(args.sequences, 0, -1) - 0.5) / args.sequences
        draws = -torch.log1p(-places)
        lengths = [round(x) for x in (draws * args.mean / draws.mean()).tolist()]
    return masked_batch(lengths, args.size, args.seed)


def contender(
    name: str, args: argparse.Namespace
) -> tuple[Callable[[PackedInputs], Callable[[], None]], torch.optim.Optimizer]:
    """What makes a contender's training step of a batch, and its optimizer."""
    if name in (OURS, NO_WINDOWS):
        model, optimizer = ours(args.size, name == OURS)
        loss = our_loss(model)
    else:
        model, optimizer = hugging_face(args.size)
        way = modernbert_peers.unpadded if name == PLAIN else modernbert_peers.padded
        loss = partial(way, model)

    def step_of(inputs: PackedInputs) -> Callable[[], None]:
        data = PaddedInputs.build(inputs) if name == STOCK else inputs
        return model_steps.make_step(loss, optimizer, data, getattr(torch, args.dtype))

    return step_of, optimizer


# Those who use a model share it, and the two of ours have the same weights: with four models a step
# of a long sequence would take more than 24 GB.
@cache
def ours(size: str, windows: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Our model and its optimizer."""
    if windows:
        torch.manual_seed(0)
        model = EncoderForPreTraining(config(size)).train()
        return model, model_steps.adamw(model)
    first, optimizer = ours(size, True)
    model = EncoderForPreTraining(config(size, windows=False)).train()
    for name, weight in first.named_parameters():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, weight)
    return model, optimizer


def few_tokens(args: argparse.Namespace) -> PackedInputs:
    """A batch whose step takes no time."""
    return batch_of(LONG, argparse.Namespace(**vars(args) | {"longest": 64}))


def memory(name: str, batch: str, args: argparse.Namespace) -> harness.Memory:
    """Of one contender in this process."""
    step_of, optimizer = contender(name, args)
    first, step = (step_of(x) for x in (few_tokens(args), batch_of(batch, args)))
    return harness.memory_of(optimizer, first, step)


def memory_in_own_process(name: str, batch: str) -> harness.Memory:
    given = ["--memory-of", name, batch]
    command = [sys.executable, "-m", "benchmarks.long_context", *sys.argv[1:], *given]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return harness.Memory(**json.loads(out.splitlines()[-1]))


def measure(batch: str, args: argparse.Namespace) -> dict[str, Any]:
    """All contenders on one batch."""
    inputs = batch_of(batch, args)
    print(f"{batch}: {inputs.batch.batch_size} sequences, {inputs.batch.total} tokens", flush=True)
    taken = {}
    for name in args.only:
        taken[name] = memory_in_own_process(name, batch)
        print(f"  {name:24s} {taken[name].peak / 1e9:8.2f} GB", flush=True)
    contenders = {name: contender(name, args)[0] for name in args.only}
    for step_of in contenders.values():
        # Optimizers get their state now: among a long step's tensors it would leave holes, which
        # the next contender's may not fit into.
        step_of(few_tokens(args))()
    steps = {name: step_of(inputs) for name, step_of in contenders.items()}
    timings = harness.interleave(
        steps, args.rounds, 1, on_time=lambda name, s: print(f"  {name:24s} {s:8.2f} s", flush=True)
    )
    rows = []
    for name, timing in timings.items():
        row = {"contender": name, "seconds": timing.median, "rounds": timing.rounds}
        if OURS in timings:
            row["ours_faster_by"] = timing.median / timings[OURS].median
        rows.append(row | {"peak_bytes": taken[name].peak, "step_bytes": taken[name].step})
        print(f"  {name:24s} {timing.median:8.2f} s  {taken[name].peak / 1e9:6.2f} GB")
    return {
        "batch": batch,
        "lengths": inputs.batch.lengths.tolist(),
        "tflop": training_flops(config(args.size), inputs) / 1e12,
        "results": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--longest", type=int, default=8192, help="tokens")
    parser.add_argument("--mean", type=float, default=1500.0, help="tokens of the mixed lengths")
    parser.add_argument("--sequences", type=int, default=3, help="of the mixed lengths")
    parser.add_argument("--batches", nargs="+", choices=[LONG, MIXED], default=[LONG, MIXED])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    harness.add_name(parser, "long_context")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    parser.add_argument("--memory-of", nargs=2, metavar=("CONTENDER", "BATCH"))
    args = parser.parse_args()
    # A heap that keeps what was freed would grow with each contender's step, beyond 24 GB.
    allocator = harness.fix_allocator("default")
    with packages_of("hf"):
        import transformers
    if args.memory_of:
        print(json.dumps(dataclasses.asdict(memory(*args.memory_of, args))))
        return
    payload = {k: v for k, v in vars(args).items() if k not in ("dry", "memory_of", "name")}
    payload |= {"transformers": transformers.__version__, "allocator": allocator, "batches": []}
    for batch in args.batches:
        payload["batches"].append(measure(batch, args))
        if not args.dry:  # each time: the next batch takes as long again
            print(f"written to {harness.save(args.name, 'cpu', harness.command(), payload)}")


if __name__ == "__main__":
    main()
