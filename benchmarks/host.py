"""Microseconds of the host for one encoder layer, forward and backward: Python and dispatch.

    python -m benchmarks.host

One token and narrow matrices, so that next to no arithmetic is in it: what remains is what a GPU
waits for where the host is slower. CPU time of the calling thread, which other processes disturb
little; contenders take turns, the median over rounds of the mean over calls is taken. Ours, Hugging
Face's layer (sdpa), and a packed layer of plain PyTorch with one attention call. Not all of it: on
a GPU launching costs as well. Operators are counted in a pass of their own: all that the dispatcher
is asked for, those that operators ask for too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from benchmarks.lib import harness
from benchmarks.lib.peers import by_sequence, unpadded_layer
from bert_unpad._extras import packages_of
from bert_unpad.batch import VarlenBatch
from bert_unpad.nn import BertConfig, BertEncoder
from bert_unpad.nn.rng import draw_rng_keys

with packages_of("hf"):
    import transformers
    from transformers.models.bert.modeling_bert import BertLayer as StockLayer

HIDDEN, HEADS = 64, 2
Layer = tuple[torch.nn.Module, Callable[[], Tensor]]


def contenders() -> dict[str, Layer]:
    """Module and forward pass of each, on one sequence of one token."""
    fields = {
        "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "intermediate_size": 4 * HIDDEN,
    }  # fmt: skip
    batch = VarlenBatch.from_lengths([1])
    x = torch.zeros(1, HIDDEN, requires_grad=True)
    padded = x.detach()[None].requires_grad_()
    rng = draw_rng_keys(3, batch.device).unbind()
    found: dict[str, Layer] = {}
    for recompute in ("none", "gelu", "layer"):
        encoder = BertEncoder(BertConfig(**fields)).train()
        encoder.recompute = recompute
        name = "bert_unpad" if recompute == "none" else f"bert_unpad, recompute {recompute}"
        found[name] = encoder, lambda encoder=encoder: encoder(x, batch, rng=rng)
    config = transformers.BertConfig(**fields, attn_implementation="sdpa")
    stock = StockLayer(config).train()

    def hugging_face() -> Tensor:
        out = stock(padded)
        return out[0] if isinstance(out, tuple) else out

    found["hf"] = stock, hugging_face
    found["plain unpadded"] = stock, lambda: unpadded_layer(stock, x, batch, by_sequence)
    return found


def measure(layer: Layer, calls: int) -> tuple[float, float]:
    """Seconds of one forward and of one backward pass, means over `calls`."""
    module, forward = layer
    totals = [0.0, 0.0]
    for number in range(calls + 1):
        module.zero_grad()
        start = time.thread_time()
        out = forward()
        middle = time.thread_time()
        out.backward(torch.empty_like(out))
        if number:  # the first one finds the caches full of another contender
            totals[0] += middle - start
            totals[1] += time.thread_time() - middle
    return totals[0] / calls, totals[1] / calls


def operators(layer: Layer) -> tuple[int, int]:
    """How many operators a forward and a backward pass dispatch."""
    module, forward = layer
    module.zero_grad()
    with profile(use_kineto=False) as first:
        out = forward()
    gradient = torch.empty_like(out)
    with profile(use_kineto=False) as second:
        out.backward(gradient)

    def count(events: Any) -> int:
        return sum("::" in e.name and not e.name.startswith("autograd::") for e in events)

    return count(first.function_events), count(second.function_events)


def _sums(timings: Mapping[str, harness.Timing]) -> list[float]:
    """The passes together, in each round."""
    return [sum(each) for each in zip(*(x.rounds for x in timings.values()), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=40, help="calls a round")
    harness.add_name(parser, "host")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = contenders()
    passes = ("forward", "backward")
    timings = {name: {each: harness.Timing() for each in passes} for name in found}
    for number in range(args.rounds + 1):
        for name, layer in found.items():
            seconds = measure(layer, args.calls)
            if number:  # the first round loads what is loaded lazily
                for each, value in zip(passes, seconds, strict=True):
                    timings[name][each].rounds.append(value)
    results = []
    ours, *_ = both = [_sums(timings[name]) for name in found]
    for (name, layer), sums in zip(found.items(), both, strict=True):
        microseconds = {each: 1e6 * timings[name][each].median for each in passes}
        counts = dict(zip(passes, operators(layer), strict=True))
        ratio = statistics.median(a / b for a, b in zip(ours, sums, strict=True))
        results.append(
            {
                "contender": name,
                "microseconds": microseconds,
                "ours_takes": ratio,  # median over rounds
                "operators": counts,
            }
        )
        text = "".join(f"{microseconds[each]:8.0f} ({counts[each]:3d})" for each in passes)
        print(f"{name:32s}{text}{sum(microseconds.values()):8.0f}{ratio:8.2f}")
    payload = {"rounds": args.rounds, "calls": args.calls, "results": results}
    print(harness.save(args.name, "cpu", harness.command(), payload))


if __name__ == "__main__":
    main()
