"""Hugging Face BERT, stock and with `bert_unpad.hf.unpad`: a training step and inference.

    python -m benchmarks.hf --device cpu          # both dtypes, three rounds
    python -m benchmarks.hf --device cpu --quick  # about 5 minutes on 2 cores

Workloads: Wikipedia lengths in a batch padded to 512; a GLUE-like mix (mean length about 40) padded
to 128; one sequence with nothing to pad, where only the overhead shows. Contenders: stock sdpa
padded to the full length; stock padded to the longest of each of four length-sorted parts of the
same batch; ours. All take turns, under one allocator setting. Writes
benchmarks/results/<device>/hf.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.lib import harness
from bert_unpad._extras import packages_of
from bert_unpad.data.sampling.histogram import sample_lengths

with packages_of("hf"):
    import transformers

    from bert_unpad import hf

VOCAB = 30522
CONTENDERS = ("stock padded", "stock sorted", "bert_unpad")
# --quick: the dtype and the half batch of the figures that matter, one round of long steps.
QUICK = {"dtype": "bfloat16", "sequences": 4, "rounds": 1, "warmup": 0}
QUICK_MEMORY = ("wikipedia", 0.1)  # the one case whose memory it measures
PARTS = 4  # batches of like length that "stock sorted" cuts the batch into


@dataclasses.dataclass(frozen=True)
class Workload:
    """Lengths of the sequences and the length that they are padded to."""

    lengths: tuple[int, ...]
    max_length: int


def workload(name: str, args: argparse.Namespace) -> Workload:
    if name == "single":
        return Workload((64,), 64)
    if name == "wikipedia":
        lengths = np.minimum(sample_lengths(args.sequences, args.seed), 512)
        return Workload(tuple(int(n) for n in lengths), 512)
    # Sentence pairs as in GLUE: log-normal, mean about 40, cut at 128.
    draws = np.random.default_rng(args.seed).lognormal(3.55, 0.5, 4 * args.sequences)
    return Workload(tuple(int(n) for n in np.clip(draws, 6, 128)), 128)


def batch_of(work: Workload, seed: int) -> dict[str, torch.Tensor]:
    """A padded batch with masked-language labels at 15 % of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(work.lengths)
    mask = (torch.arange(work.max_length) < lengths[:, None]).long()
    ids = torch.randint(1000, VOCAB, mask.shape, generator=generator) * mask
    chosen = (torch.rand(mask.shape, generator=generator) < 0.15) & (mask == 1)
    chosen[:, 1] = True  # at least one a sequence
    return {
        "input_ids": ids.masked_fill(chosen, 103),
        "attention_mask": mask,
        "labels": ids.masked_fill(~chosen, -100),
    }


def sorted_parts(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The batch in up to PARTS batches of like length, each padded to its longest."""
    lengths = batch["attention_mask"].sum(1)
    order = lengths.argsort(descending=True)
    parts = []
    for rows in order.chunk(PARTS):
        longest = int(lengths[rows].max())
        parts.append({key: value[rows, :longest] for key, value in batch.items()})
    return parts


def make_model(args: argparse.Namespace, contender: str, dropout: float) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=args.layers,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="sdpa",
    )
    model = transformers.BertForMaskedLM(config)
    return hf.unpad(model) if contender == "bert_unpad" else model


def training_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: list[dict[str, torch.Tensor]],
    dtype: torch.dtype,
) -> Callable[[], None]:
    """Forward and backward of all parts, then AdamW; the loss is the mean over all labels."""
    counts = [int((part["labels"] != -100).sum()) for part in parts]

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for part, count in zip(parts, counts, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model(**part).loss
            (loss * (count / sum(counts))).backward()
        optimizer.step()

    return step


def inference(
    model: torch.nn.Module, parts: list[dict[str, torch.Tensor]], dtype: torch.dtype
) -> Callable[[], None]:
    """Hidden states of all tokens."""
    inputs = [{k: v for k, v in part.items() if k != "labels"} for part in parts]

    def run() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            for part in inputs:
                model(**part)

    return run


def contender_of(
    args: argparse.Namespace,
    task: str,
    name: str,
    dtype: torch.dtype,
    dropout: float,
    work: Workload,
) -> tuple[Callable[[], None], torch.optim.Optimizer | None]:
    """What is timed."""
    batch = batch_of(work, args.seed)
    parts = sorted_parts(batch) if name == "stock sorted" else [batch]
    model = make_model(args, name, dropout)
    if task == "inference":
        return inference(model.bert.eval(), parts, dtype), None
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5, fused=True)
    return training_step(model, optimizer, parts, dtype), optimizer


def cases(args: argparse.Namespace) -> list[tuple[str, str, torch.dtype, float]]:
    """(workload, task, dtype, dropout) of each comparison."""
    dtypes = [torch.bfloat16, torch.float32]
    if args.dtype != "both":
        dtypes = [getattr(torch, args.dtype)]
    found = []
    for dtype in dtypes:
        for work in args.workloads:
            if "training" in args.tasks:
                rates = (0.1, 0.0) if work == "wikipedia" else (0.1,)
                found += [(work, "training", dtype, rate) for rate in rates]
            if "inference" in args.tasks:
                found.append((work, "inference", dtype, 0.0))
    return found


def measure_memory(args: argparse.Namespace, spec: dict) -> harness.Memory:
    """Of one contender's training step, in this process."""
    dtype = getattr(torch, spec["dtype"])
    work = workload(spec["workload"], args)
    step, optimizer = contender_of(
        args, "training", spec["contender"], dtype, spec["dropout"], work
    )

    def first() -> None:  # makes the optimizer's state, without activations
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    return harness.memory_of(optimizer, first, step)


def memory_in_own_process(spec: dict) -> harness.Memory:
    command = [
        sys.executable,
        "-m",
        "benchmarks.hf",
        *sys.argv[1:],
        "--memory-of",
        json.dumps(spec),
    ]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return harness.Memory(**json.loads(out.splitlines()[-1]))


def run_case(args: argparse.Namespace, case: tuple[str, str, torch.dtype, float]) -> list[dict]:
    name, task, dtype, dropout = case
    work, kind = workload(name, args), str(dtype).removeprefix("torch.")
    print(f"\n{name}, {task}, {kind}, dropout {dropout}: {sum(work.lengths)} tokens of "
          f"{len(work.lengths)} x {work.max_length}", flush=True)  # fmt: skip
    names = [n for n in CONTENDERS if n != "stock sorted" or len(work.lengths) > 1]
    memory = {}
    if task == "training" and args.memory and (not args.quick or (name, dropout) == QUICK_MEMORY):
        for contender in names:
            memory[contender] = memory_in_own_process(
                {"workload": name, "contender": contender, "dtype": kind, "dropout": dropout}
            )
    steps = {n: contender_of(args, task, n, dtype, dropout, work)[0] for n in names}
    rounds, warmup = args.rounds, args.warmup
    if name == "single":  # short steps, and a difference of a few percent
        rounds, warmup = 10 * rounds, max(2, warmup)
    timings = harness.interleave(steps, rounds, warmup)
    ours = timings["bert_unpad"].median
    rows = []
    for contender, timing in timings.items():
        row = {
            "workload": name, "task": task, "dtype": kind, "dropout": dropout,
            "contender": contender, "seconds": timing.median, "rounds": timing.rounds,
            "tokens_per_second": sum(work.lengths) / timing.median,
            "ours_faster_by": timing.median / ours,
        }  # fmt: skip
        if contender in memory:
            row |= {
                "state_bytes": memory[contender].state,
                "step_bytes": memory[contender].step,
                "peak_bytes": memory[contender].peak,
            }
        rows.append(row)
        peak = f"{row['peak_bytes'] / 1e9:7.2f} GB" if "peak_bytes" in row else ""
        ratio = f"ours is {row['ours_faster_by']:.2f}x"
        print(f"  {contender:14s}{timing.median:9.3f} s  {ratio}{peak}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument(
        "--layers", type=int, default=12, help="of BERT-base; fewer for a quick run"
    )
    parser.add_argument("--sequences", type=int, default=8, help="of the Wikipedia mix; GLUE: x 4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--allocator", choices=["heap", "default"], default="heap")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both")
    parser.add_argument("--workloads", nargs="+", default=["wikipedia", "glue", "single"],
                        choices=["wikipedia", "glue", "single"])  # fmt: skip
    parser.add_argument("--tasks", nargs="+", default=["training", "inference"],
                        choices=["training", "inference"])  # fmt: skip
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--memory-of", help="print only the memory of this contender, as JSON")
    harness.add_name(parser, "hf")
    parser.add_argument("--quick", action="store_true",
                        help=f"other defaults: {', '.join(f'{k} {v}' for k, v in QUICK.items())}; "
                        "memory of one case only")  # fmt: skip
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    args = parser.parse_args()
    allocator = harness.fix_allocator(args.allocator)
    if args.memory_of:
        memory = measure_memory(args, json.loads(args.memory_of))
        print(json.dumps(dataclasses.asdict(memory)))
        return
    rows = [row for case in cases(args) for row in run_case(args, case)]
    path = harness.save(
        args.name, args.device, harness.command(),
        {
            "transformers": transformers.__version__, "layers": args.layers,
            "lengths": {name: workload(name, args).lengths for name in args.workloads},
            "allocator": allocator, "results": rows,
        },
    )  # fmt: skip
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
