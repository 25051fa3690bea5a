"""An optimizer's step on all parameters of a BERT: ours, PyTorch's, and a copy of memory.

All contenders work on the same parameters and gradients, each with moments of its own, and take
turns; the copy is one of them, so that a share of its rate means what the machine gave at the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib import harness, timers
from benchmarks.lib.optim_peers import ForeachLAMB
from bert_unpad.nn import BertConfig, BertForPreTraining
from bert_unpad.optim import FusedAdam, FusedLAMB

SIZES = {
    "bert-base": BertConfig(vocab_size=30528),
    "bert-large": BertConfig(
        vocab_size=30528,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    "tiny": BertConfig(
        vocab_size=64,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=16,
        max_position_embeddings=8,
    ),
}
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-6}
DECAY = 0.01
# No bound on the gradient's norm in any of them: the trainer clips before.
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "bert_unpad, Adam": lambda groups: FusedAdam(groups, **OPTIONS),
    "torch.optim.AdamW, fused": lambda groups: torch.optim.AdamW(groups, **OPTIONS, fused=True),
    "bert_unpad, LAMB": lambda groups: FusedLAMB(groups, **OPTIONS, max_grad_norm=None),
    "LAMB, foreach": lambda groups: ForeachLAMB(groups, **OPTIONS),
}
PEERS = {"torch.optim.AdamW, fused": "bert_unpad, Adam", "LAMB, foreach": "bert_unpad, LAMB"}
COPY = "copy"
# Bytes that a step must read and write per fp32 parameter. LAMB reads weights, gradients and
# moments and writes moments, then, knowing the norms, reads weights and moments and writes weights.
BYTES = {"Adam": 28, "LAMB": 40, COPY: 8}
COPIED = 1 << 26  # elements: 256 MiB, beyond any cache


def parameters_of(name: str, device: str) -> list[Tensor]:
    """Parameters in the shapes of a model, each with a gradient."""
    with torch.device("meta"):
        shapes = [p.shape for p in BertForPreTraining(SIZES[name]).parameters()]
    parameters = [torch.randn(shape, device=device).mul_(0.02) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter).mul_(0.01)
    return parameters


def groups_of(parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """As `bert_unpad.optim.decay_groups` makes them."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def check_peers(device: str, steps: int = 3) -> None:
    """Ends the benchmark if a peer computes something else than ours."""
    found = {}
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        found[name] = parameters_of("tiny", device)
        optimizer = make(groups_of(found[name]))
        for _ in range(steps):
            optimizer.step()
    for peer, ours in PEERS.items():
        for a, b in zip(found[peer], found[ours], strict=True):
            error = float((a - b).abs().max())
            if not error <= 1e-6:
                raise SystemExit(f"{peer} and {ours} differ by {error} after {steps} steps")


def bytes_of(name: str, numel: int) -> int:
    if name == COPY:
        return BYTES[COPY] * min(numel, COPIED)
    return BYTES["LAMB" if "LAMB" in name else "Adam"] * numel


def run(device: str, model: str, rounds: int, warmup: int = 2) -> dict[str, Any]:
    """The report; prints it too.

    Args:
        device: "cpu" or "cuda".
        model: a name in SIZES.
        rounds: that count.
        warmup: rounds before those.
    """
    check_peers(device)
    torch.manual_seed(0)
    parameters = parameters_of(model, device)
    numel = sum(p.numel() for p in parameters)
    source = torch.zeros(min(numel, COPIED), device=device)
    target = torch.zeros_like(source)
    steps: dict[str, Callable[[], Any]] = {COPY: lambda: target.copy_(source)}
    for name, make in OPTIMIZERS.items():
        steps[name] = make(groups_of(parameters)).step
    timer = timers.CudaTimer() if device == "cuda" else timers.HostTimer()
    timings = timers.interleave(timer, steps, rounds, warmup)
    seconds = {name: timing.median for name, timing in timings.items()}
    rate = bytes_of(COPY, numel) / seconds[COPY]
    rows = []
    print(f"{model}: {numel / 1e6:.1f} M parameters in {len(parameters)} tensors, float32")
    print(f"copy: {rate / 1e9:.1f} GB/s read and written")
    print(f"  {'':28s}{'ms':>9s}{'GB/s':>7s}{'of copy':>9s}{'/ Adam':>8s}")
    for name in OPTIMIZERS:
        moved = bytes_of(name, numel)
        row = {
            "contender": name,
            "seconds": seconds[name],
            "bytes": moved,
            "gb_per_s": moved / seconds[name] / 1e9,
            "copy_share": moved / seconds[name] / rate,
            "times_of_our_adam": seconds[name] / seconds["bert_unpad, Adam"],
            "rounds": timings[name].rounds,
        }
        rows.append(row)
        print(
            f"  {name:28s}{row['seconds'] * 1e3:9.2f}{row['gb_per_s']:7.1f}"
            f"{row['copy_share']:9.1%}{row['times_of_our_adam']:8.2f}"
        )
    faster = {peer: seconds[peer] / seconds[ours] for peer, ours in PEERS.items()}
    for peer, ratio in faster.items():
        print(f"  {PEERS[peer]} takes 1/{ratio:.2f} of the time of {peer}")
    return {
        "model": model,
        "parameters": numel,
        "tensors": len(parameters),
        "dtype": "float32",
        "rounds": rounds,
        "time": "median of rounds in which contenders take turns",
        "bytes": "that a step must move at least: Adam 28, LAMB 40 per parameter",
        "copy_bytes_per_second": rate,
        "faster_than": faster,
        "results": rows,
    }


def folder(device: str) -> str:
    """Where the device's results lie."""
    return harness.gpu_folder() if device == "cuda" else "cpu"
