"""Single operators, forward plus backward, against the same formula in plain PyTorch, in one run.

    python -m benchmarks.ops --device cpu
    python -m benchmarks.ops --device cuda                             # all, one by one
    python -m benchmarks.ops --device cuda --op attention
    python -m benchmarks.ops --device cuda --op loss --rehearse        # on a CPU, no figures

On a CPU attention runs on one BERT-base layer's heads with lengths drawn from the Wikipedia
histogram; on a GPU on BERT-large's, see benchmarks/lib/attention.py. The other operators on a GPU:
benchmarks/cuda_*.py.
Writes benchmarks/results/<device>/ops.json, or ops_<op>.json; on a GPU a file an operator. With
`--name` these names begin with another word than ops.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.lib import (
    attention,
    cuda_gelu,
    cuda_loss,
    cuda_mlp,
    cuda_norm,
    harness,
    memory_bound,
)
from benchmarks.lib.attention_peers import CONTENDERS, OURS
from bert_unpad import ops
from bert_unpad.batch import VarlenBatch, pad, unpad
from bert_unpad.data.sampling.histogram import sample_lengths

# What is timed on a GPU besides attention.
CUDA_CASES = {
    "gelu": cuda_gelu.cases,
    "loss": cuda_loss.cases,
    "mlp": cuda_mlp.cases,
    "norm": cuda_norm.cases,
}
OPS = ("attention", "rotary", "glu", *CUDA_CASES)
HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 12, 64, 768, 3072
GLU_WIDTH = 1152  # ModernBERT-base's
GATES = {"gelu": functional.gelu, "silu": functional.silu}
Results = Tensor | tuple[Tensor, ...]


@dataclass
class Case:
    """One operator at one setting: how to run it, who else runs it, and its cost."""

    name: str
    contenders: dict[str, Callable[[], Results]]
    inputs: list[Tensor]
    flops: int = 0  # of forward and backward, without recomputation
    bytes: int = 0  # that forward and backward must read and write at least


def attention_case(dtype: torch.dtype, dropout_p: float, sequences: int, seed: int) -> Case:
    lengths = [int(n) for n in sample_lengths(sequences, seed)]
    mask = torch.arange(512) < torch.tensor(lengths)[:, None]
    batch = VarlenBatch.from_mask(mask)
    qkv = torch.randn(batch.total, 3, HEADS, HEAD_DIM).to(dtype).requires_grad_()

    def sdpa(x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = x.unbind(-4)
        q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=dropout_p
        )
        return out.transpose(-3, -2)

    def loop() -> Tensor:
        return torch.cat([sdpa(x.transpose(0, 1)[None])[0] for x in qkv.split(lengths)])

    def padded() -> Tensor:
        x = pad(qkv, batch).transpose(1, 2)
        return unpad(sdpa(x, mask[:, None, None, :]), batch)

    squares = sum(n * n for n in lengths)
    return Case(
        f"varlen_attention, dropout {dropout_p}",
        {
            "bert_unpad": lambda: ops.varlen_attention(qkv, batch, dropout_p=dropout_p),
            "sdpa, one call a sequence": loop,
            "sdpa, padded": padded,
        },
        [qkv],
        flops=(2 + 5) * 2 * squares * HEADS * HEAD_DIM,
    )


def norm_case(dtype: torch.dtype, p: float, rows: int) -> Case:
    x, residual = (torch.randn(rows, HIDDEN).to(dtype).requires_grad_() for _ in range(2))
    weight, bias, x_bias = (torch.randn(HIDDEN).to(dtype).requires_grad_() for _ in range(3))

    def eager() -> Tensor:
        dropped = functional.dropout(x + x_bias, p)
        return functional.layer_norm(residual + dropped, (HIDDEN,), weight, bias, 1e-12)

    # forward: read x, residual; write y and the normalised sum's input; backward: read dy and that
    # input; write dx, dresidual
    return Case(
        f"dropout_add_layer_norm, dropout {p}",
        {
            "bert_unpad": lambda: ops.dropout_add_layer_norm(
                x, residual, weight, bias, dropout_p=p, eps=1e-12, x_bias=x_bias
            ),
            "eager": eager,
        },
        [x, residual, weight, bias, x_bias],
        bytes=8 * x.numel() * x.element_size(),
    )


def gelu_case(dtype: torch.dtype, approximate: str, rows: int) -> Case:
    x = torch.randn(rows, INTERMEDIATE).to(dtype).requires_grad_()
    bias = torch.randn(INTERMEDIATE).to(dtype).requires_grad_()
    # forward: read x, write y; backward: read dy and x, write dx
    return Case(
        f"bias_gelu, {'erf' if approximate == 'none' else approximate}",
        {
            "bert_unpad": lambda: ops.bias_gelu(x, bias, approximate=approximate),
            "eager": lambda: functional.gelu(x + bias, approximate=approximate),
        },
        [x, bias],
        bytes=5 * x.numel() * x.element_size(),
    )


def pre_norm_case(dtype: torch.dtype, kind: str, rows: int) -> Case:
    x, residual = (torch.randn(rows, HIDDEN).to(dtype).requires_grad_() for _ in range(2))
    weight, p = torch.randn(HIDDEN).to(dtype).requires_grad_(), 0.1
    ours = getattr(ops, f"dropout_add_{kind}_norm")
    norm = getattr(functional, f"{kind}_norm")

    def eager() -> tuple[Tensor, Tensor]:
        total = residual + functional.dropout(x, p)
        return total, norm(total, (HIDDEN,), weight, eps=1e-5)

    # forward: read x, residual; write sum and norm; backward: read both gradients and the sum,
    # write dx, dresidual
    return Case(
        f"dropout_add_{kind}_norm and its sum, dropout {p}",
        {
            "bert_unpad": lambda: ours(x, residual, weight, dropout_p=p, eps=1e-5, return_sum=True),
            "eager": eager,
        },
        [x, residual, weight],
        bytes=9 * x.numel() * x.element_size(),
    )


def bare_norm_case(dtype: torch.dtype, kind: str, rows: int) -> Case:
    x = torch.randn(rows, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(HIDDEN).to(dtype).requires_grad_()
    ours, norm = getattr(ops, f"{kind}_norm"), getattr(functional, f"{kind}_norm")
    # forward: read x, write y; backward: read dy and x, write dx
    return Case(
        f"{kind}_norm",
        {
            "bert_unpad": lambda: ours(x, weight, eps=1e-5),
            "eager": lambda: norm(x, (HIDDEN,), weight, eps=1e-5),
        },
        [x, weight],
        bytes=5 * x.numel() * x.element_size(),
    )


def glu_case(dtype: torch.dtype, kind: str, rows: int) -> Case:
    x = torch.randn(rows, 2 * GLU_WIDTH).to(dtype).requires_grad_()

    def eager() -> Tensor:
        a, gate = x.chunk(2, -1)
        return GATES[kind](a) * gate

    # forward: read both halves, write y; backward: read dy and both halves, write both gradients
    return Case(
        f"glu, {kind}",
        {"bert_unpad": lambda: ops.glu(x, kind), "eager": eager},
        [x],
        bytes=4 * x.numel() * x.element_size(),
    )


class _Produced(torch.autograd.Function):
    """Stands for the product that makes qkv: a tensor that may be changed in place, at no cost."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy


def rotary_case(dtype: torch.dtype, rows: int) -> Case:
    x = torch.randn(rows, 3 * HEADS, HEAD_DIM).to(dtype).requires_grad_()
    batch = VarlenBatch.from_lengths([rows])
    angles = batch.position_ids[:, None] * 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.cat([angles, angles], -1)[:, None]
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)

    def eager() -> Tensor:
        turned, v = _Produced.apply(x).split([2 * HEADS, HEADS], 1)
        a, b = turned.chunk(2, -1)
        return torch.cat([turned * cosine + torch.cat([-b, a], -1) * sine, v], 1)

    # forward and backward: read and write queries and keys
    return Case(
        "rotary_",
        {
            "bert_unpad": lambda: ops.rotary_(_Produced.apply(x), batch, heads=2 * HEADS),
            "eager": eager,
        },
        [x],
        bytes=4 * x.numel() * x.element_size() * 2 // 3,
    )


def cpu_cases(op: str, dtype: torch.dtype, rows: int, sequences: int, seed: int) -> list[Case]:
    makers = {
        "attention": lambda: [attention_case(dtype, p, sequences, seed) for p in (0.1, 0.0)],
        "norm": lambda: [
            *(norm_case(dtype, p, rows) for p in (0.1, 0.0)),
            *(pre_norm_case(dtype, kind, rows) for kind in ("layer", "rms")),
            *(bare_norm_case(dtype, kind, rows) for kind in ("layer", "rms")),
        ],
        "gelu": lambda: [gelu_case(dtype, a, rows) for a in ("none", "tanh")],
        "glu": lambda: [glu_case(dtype, kind, rows) for kind in GATES],
        "rotary": lambda: [rotary_case(dtype, rows)],
    }
    return [case for name, make in makers.items() if op in (name, "all") for case in make()]


def run(case: Case, rounds: int) -> dict[str, harness.Timing]:
    with torch.no_grad():
        results = case.contenders["bert_unpad"]()
    results = results if isinstance(results, tuple) else (results,)
    gradients = [torch.randn_like(result) for result in results]

    def step(forward: Callable[[], Results]) -> Callable[[], None]:
        def both() -> None:
            for tensor in case.inputs:
                tensor.grad = None
            torch.autograd.backward(forward(), gradients)

        return both

    return harness.interleave(
        {name: step(forward) for name, forward in case.contenders.items()}, rounds, warmup=2
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--op", choices=[*OPS, "all"], default="all")
    parser.add_argument("--sequences", type=int, help="default: 8 on a CPU, 48 on a GPU")
    parser.add_argument("--rows", type=int, default=2048, help="tokens of the other operators")
    parser.add_argument("--rounds", type=int, help="default: 11 on a CPU, 50 on a GPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--allocator", choices=["heap", "default"], default="heap")
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="PEER",
        choices=[name for name in CONTENDERS if name not in OURS],
        help="leave a contender on the GPU out, should it break the CUDA context",
    )
    harness.add_name(parser, "ops")
    parser.add_argument("--rehearse", action="store_true", help="try --device cuda out on a CPU")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    sequences, rounds = (
        args.sequences or (48 if on_gpu else 8),
        args.rounds or (50 if on_gpu else 11),
    )
    if args.rehearse and not on_gpu:
        parser.error("--rehearse goes with --device cuda")
    if on_gpu:
        device = "cpu" if args.rehearse else "cuda"
        names = ["attention", *CUDA_CASES] if args.op == "all" else [args.op]
        if not {"attention", *CUDA_CASES}.issuperset(names):
            parser.error(f"--op {args.op} is not timed on a GPU yet")
        for name in names:
            if name == "attention":
                payload = attention.run(device, sequences, rounds, args.seed, args.skip)
            else:
                payload = memory_bound.run(CUDA_CASES[name], device, rounds, args.seed)
            if not args.rehearse:
                file, folder = f"{args.name}_{name}", harness.gpu_folder()
                print(f"\nwritten to {harness.save(file, folder, harness.command(), payload)}")
        return
    if args.op in ("loss", "mlp"):
        parser.error(f"--op {args.op} is timed on a GPU only: add --device cuda")

    allocator = harness.fix_allocator(args.allocator)
    torch.manual_seed(args.seed)
    peaks, memory = harness.matmul_peaks(), harness.memory_peak()
    # Products of bf16 may also be computed in fp32.
    peak_of = {"float32": peaks["float32"], "bfloat16": max(peaks.values())}
    named = ", ".join(f"{dtype} {peak / 1e9:.0f}" for dtype, peak in peaks.items())
    print(f"peaks: matmul {named} GFLOP/s, copy {memory / 1e9:.1f} GB/s")
    print(f"allocator: {allocator}\n")
    print(f"{'operator':38s}{'dtype':>10s}{'ms':>9s}{'of peak':>9s}   bert_unpad is faster than")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for case in cpu_cases(args.op, dtype, args.rows, sequences, args.seed):
            timings = run(case, rounds)
            seconds = timings["bert_unpad"].median
            rate, peak = (case.flops, peak_of[name]) if case.flops else (case.bytes, memory)
            share = rate / seconds / peak
            ratios = {
                peer: timing.median / seconds
                for peer, timing in timings.items()
                if peer != "bert_unpad"
            }
            rows.append(
                {
                    "op": case.name,
                    "dtype": name,
                    "seconds": {who: timing.median for who, timing in timings.items()},
                    "faster_than": ratios,
                    "share_of_peak": share,
                    "peak": "matmul" if case.flops else "memory copy",
                }
            )
            against = ", ".join(f"{peer} {ratio:.2f}x" for peer, ratio in ratios.items())
            print(
                f"{case.name:38s}{name:>10s}{seconds * 1e3:9.2f}{share:9.1%}   {against}",
                flush=True,
            )
    path = harness.save(
        args.name if args.op == "all" else f"{args.name}_{args.op}",
        args.device,
        harness.command(),
        {
            "op": args.op, "matmul_peak": peaks, "memory_peak": memory,
            "allocator": allocator, "results": rows,
        },
    )  # fmt: skip
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
