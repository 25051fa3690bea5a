"""One full BERT pretraining step (forward, backward, AdamW) against its peers, in one run.

    python scripts/benchmark_model.py --device cpu

Sequence lengths are drawn from the Wikipedia histogram; every contender gets the same batch, the
same sizes and the same dropout rate. Memory is measured first, each contender in a process of its
own; then time, all of them in turns. Writes benchmarks/results/<device>/model.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from benchmarks.peers import Peers
from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.data.histogram import sample_lengths
from bert_unpad.nn import BertConfig, BertForPreTraining

PEERS = {
    "plain unpadded": "unpadded",
    "hf padded, logits at labels": "labels",
    "hf padded": "padded",
}
VOCAB = 30522
SIZES = {"base": (768, 12, 12), "small": (256, 4, 4)}


def make_inputs(sequences: int, max_length: int, seed: int, vocab: int) -> PackedInputs:
    """A packed batch of random tokens, 15 % of them masked, longest sequence first."""
    generator = torch.Generator().manual_seed(seed)
    lengths = sorted(
        (min(int(n), max_length) for n in sample_lengths(sequences, seed)), reverse=True
    )
    # The padded peers get max_length columns, as fixed-length pretraining data does.
    mask = torch.arange(max_length) < torch.tensor(lengths)[:, None]
    batch = VarlenBatch.from_mask(mask)
    ids = torch.randint(1000, vocab, (batch.total,), generator=generator)
    masked = torch.rand(batch.total, generator=generator) < 0.15
    masked[batch.cu_seqlens[:-1].long()] = False
    positions = masked.nonzero().flatten()
    return PackedInputs.build(
        batch=batch,
        input_ids=ids.index_fill(0, positions, 103),
        masked_positions=positions,
        masked_labels=ids[positions],
        next_sentence_labels=torch.randint(0, 2, (sequences,), generator=generator),
    )


def make_step(
    loss: Callable[[PackedInputs], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    inputs: PackedInputs,
    dtype: torch.dtype,
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            value = loss(inputs)
        value.backward()
        optimizer.step()

    return step


def losses(
    args: argparse.Namespace, kinds: Collection[str]
) -> dict[str, tuple[Callable[[PackedInputs], torch.Tensor], torch.optim.Optimizer]]:
    """Loss and optimizer of the contenders named in `kinds`; the peers share one model."""
    hidden, layers, heads = SIZES[args.size]
    fields = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "hidden_dropout_prob": args.dropout,
        "attention_probs_dropout_prob": args.dropout,
    }
    torch.manual_seed(0)
    found = {}
    if "bert_unpad" in kinds:
        ours = BertForPreTraining(BertConfig(**fields)).train()

        def our_loss(x: PackedInputs) -> torch.Tensor:
            out = ours(x)
            return out.mlm_loss_sum / len(x.masked_labels) + out.nsp_loss_sum / x.batch.batch_size

        found["bert_unpad"] = (our_loss, adamw(ours))
    if any(kind in PEERS for kind in kinds):
        stock = transformers.BertForPreTraining(
            transformers.BertConfig(**fields, attn_implementation="sdpa")
        ).train()
        peers, adam = Peers(stock).train(), adamw(stock)
        found |= {k: (getattr(peers, how), adam) for k, how in PEERS.items() if k in kinds}
    return found


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def measure_memory(args: argparse.Namespace, inputs: PackedInputs) -> harness.Memory:
    """Of the contender that `--memory-of` names, in this process."""
    kind, dtype = args.memory_of.rsplit(", ", 1)
    loss, adam = losses(args, [kind])[kind]
    few = make_inputs(2, 32, args.seed, VOCAB)
    first, step = (make_step(loss, adam, x, getattr(torch, dtype)) for x in (few, inputs))
    return harness.memory_of(adam, first, step)


def memory_in_own_process(name: str) -> harness.Memory:
    command = [sys.executable, *sys.argv, "--memory-of", name]
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
    report["memory_command"] = "python " + " ".join(sys.argv)
    return harness.save(args.name, args.device, command, report)


def memory_fields(memory: harness.Memory) -> dict[str, int]:
    return {
        "state_bytes": memory.state,
        "step_bytes": memory.step,
        "peak_bytes": memory.peak,
    }


def measure_peaks() -> dict[str, float]:
    """Matmul FLOP/s by dtype."""
    return {
        str(dtype).removeprefix("torch."): harness.matmul_peak(dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--allocator", choices=["heap", "default"], default="heap")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], default="both")
    parser.add_argument("--only", help="run only the contenders whose name contains this")
    parser.add_argument("--memory-of", help="print only the memory of this contender, as JSON")
    parser.add_argument(
        "--keep-times", action="store_true", help="measure only memory anew; times stay in the JSON"
    )
    parser.add_argument("--name", default="model", help="name of the JSON file")
    args = parser.parse_args()
    both = [torch.float32, torch.bfloat16]
    args.dtypes = both if args.dtype == "both" else [getattr(torch, args.dtype)]

    allocator = harness.fix_allocator(args.allocator)
    inputs = make_inputs(args.sequences, args.max_length, args.seed, VOCAB)
    if args.memory_of:
        print(json.dumps(dataclasses.asdict(measure_memory(args, inputs))))
        return
    tokens = inputs.batch.total
    hidden, layers, heads = SIZES[args.size]
    config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * hidden,
    )  # fmt: skip
    from bert_unpad.nn.flops import training_flops

    flops = training_flops(config, inputs)
    names = [
        f"{kind}, {str(dtype).removeprefix('torch.')}"
        for dtype in args.dtypes
        for kind in ("bert_unpad", *PEERS)
    ]
    names = [name for name in names if args.only is None or args.only in name]
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
    built = losses(args, {name.rsplit(", ", 1)[0] for name in names})
    steps = {}
    for name in names:
        kind, dtype = name.rsplit(", ", 1)
        steps[name] = make_step(*built[kind], inputs, getattr(torch, dtype))
    peaks = measure_peaks()
    print("matmul peak: " + ", ".join(f"{k} {v / 1e9:.0f} GFLOP/s" for k, v in peaks.items()))
    print(f"allocator: {allocator}", flush=True)
    timings = harness.interleave(
        steps, args.rounds, args.warmup,
        on_time=lambda name, s: print(f"  {name:40s} {s:8.2f} s", flush=True),
    )  # fmt: skip
    # Once more, and the better one: other tenants of a machine may have held back the first.
    peaks = {dtype: max(value, peaks[dtype]) for dtype, value in measure_peaks().items()}
    peak = max(peaks.values())
    rows = []
    for name, timing in timings.items():
        kind, dtype = name.rsplit(", ", 1)
        ours = timings.get(f"bert_unpad, {dtype}")
        rows.append(
            {
                "contender": kind,
                "dtype": dtype,
                "seconds": timing.median,
                "rounds": timing.rounds,
                "tokens_per_second": tokens / timing.median,
                "share_of_matmul_peak": flops / timing.median / peak,
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
        args.name, args.device, "python " + " ".join(sys.argv),
        {
            "size": args.size, "dropout": args.dropout, "lengths": inputs.batch.lengths.tolist(),
            "max_length": args.max_length, "tokens": tokens, "flops": flops,
            "matmul_peak": peaks, "allocator": allocator, "results": rows,
        },
    )  # fmt: skip
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
