"""One full BERT pretraining step (forward, backward, AdamW) against its peers, in one run.

    python scripts/benchmark_model.py --device cpu

Sequence lengths are drawn from the Wikipedia histogram; every contender gets the same batch, the
same sizes and the same dropout rate. Writes benchmarks/results/<device>/model.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import harness
from benchmarks.peers import Peers
from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.data.histogram import sample_lengths
from bert_unpad.nn import BertConfig, BertForPreTraining

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


def contenders(args: argparse.Namespace, inputs: PackedInputs) -> dict[str, Callable[[], None]]:
    import transformers

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
    stock = transformers.BertForPreTraining(
        transformers.BertConfig(**fields, attn_implementation="sdpa")
    ).train()
    ours = BertForPreTraining(BertConfig(**fields)).train()
    peers = Peers(stock).train()

    def our_loss(x: PackedInputs) -> torch.Tensor:
        out = ours(x)
        return out.mlm_loss_sum / len(x.masked_labels) + out.nsp_loss_sum / x.batch.batch_size

    stock_adam = torch.optim.AdamW(stock.parameters(), lr=1e-5, fused=True)
    our_adam = torch.optim.AdamW(ours.parameters(), lr=1e-5, fused=True)
    losses = {
        "bert_unpad": (our_loss, our_adam),
        "plain unpadded": (peers.unpadded, stock_adam),
        "hf padded, logits at labels": (peers.labels, stock_adam),
        "hf padded": (peers.padded, stock_adam),
    }
    steps = {}
    for dtype in args.dtypes:
        for name, (loss, adam) in losses.items():
            steps[f"{name}, {str(dtype).removeprefix('torch.')}"] = make_step(
                loss, adam, inputs, dtype
            )
    return steps


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
    parser.add_argument("--name", default="model", help="name of the JSON file")
    args = parser.parse_args()
    both = [torch.float32, torch.bfloat16]
    args.dtypes = both if args.dtype == "both" else [getattr(torch, args.dtype)]

    allocator = harness.fix_allocator(args.allocator)
    inputs = make_inputs(args.sequences, args.max_length, args.seed, 30522)
    tokens = inputs.batch.total
    hidden, layers, heads = SIZES[args.size]
    config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * hidden,
    )  # fmt: skip
    from bert_unpad.nn.flops import training_flops

    flops = training_flops(config, inputs)
    steps = contenders(args, inputs)
    if args.only:
        steps = {name: step for name, step in steps.items() if args.only in name}
    peaks = measure_peaks()
    print(
        f"{tokens} tokens of {args.sequences} x {args.max_length}, {flops / 1e12:.3f} TFLOP a step"
    )
    print("matmul peak: " + ", ".join(f"{k} {v / 1e9:.0f} GFLOP/s" for k, v in peaks.items()))
    print(f"allocator: {allocator}", flush=True)
    timings = harness.interleave(
        steps, args.rounds, args.warmup, memory=True,
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
                "peak_bytes": timing.peak_bytes,
                "ours_faster_by": timing.median / ours.median if ours else None,
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
