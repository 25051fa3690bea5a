"""Microseconds of the host for one encoder layer, forward and backward: Python and dispatch.

    python -m benchmarks.host
    python -m benchmarks.host --meta

One token and narrow matrices, so that next to no arithmetic is in it: what remains is what a GPU
waits for where the host is slower. CPU time of the calling thread, which other processes disturb
little; contenders take turns, the median over rounds of the mean over calls is printed. Ours,
Hugging Face's layer (sdpa), and a packed layer of plain PyTorch with one attention call. Not all of
it: on a GPU launching costs as well. `--meta` takes tensors without numbers and BERT-base's sizes;
there PyTorch's own operators work out shapes in Python, which makes its layers look slow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.lib import harness
from benchmarks.lib.peers import by_sequence, unpadded_layer
from bert_unpad._extras import packages_of
from bert_unpad.batch import VarlenBatch
from bert_unpad.nn import BertConfig, BertEncoder
from bert_unpad.nn.rng import draw_rng_keys

with packages_of("hf"):
    import transformers
    from transformers.models.bert.modeling_bert import BertLayer as StockLayer

SIZES = {"cpu": (1, 64, 2), "meta": (512, 768, 12)}  # tokens, hidden size, heads


def contenders(device: str) -> dict[str, tuple[torch.nn.Module, Callable[[], Tensor]]]:
    """Module and forward pass of each, on one sequence."""
    tokens, hidden, heads = SIZES[device]
    fields = {
        "hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }  # fmt: skip
    batch = VarlenBatch.from_lengths([tokens]).to(device)
    x = torch.zeros(tokens, hidden, device=device, requires_grad=True)
    padded = x.detach()[None].requires_grad_()
    rng = draw_rng_keys(3, batch.device).unbind()
    found = {}
    for recompute in ("none", "gelu", "layer"):
        encoder = BertEncoder(BertConfig(**fields)).to(device).train()
        encoder.recompute = recompute
        found[f"bert_unpad, recompute {recompute}"] = (
            encoder,
            lambda encoder=encoder: encoder(x, batch, rng=rng),
        )
    config = transformers.BertConfig(**fields, attn_implementation="sdpa")
    stock = StockLayer(config).to(device).train()

    def hugging_face() -> Tensor:
        out = stock(padded)
        return out[0] if isinstance(out, tuple) else out

    found["hf"] = (stock, hugging_face)
    found["plain unpadded"] = (stock, lambda: unpadded_layer(stock, x, batch, by_sequence))
    return found


def measure(module: torch.nn.Module, forward: Callable[[], Tensor], calls: int) -> list[float]:
    """Seconds of one forward and of one backward pass, means over `calls`."""
    totals = [0.0, 0.0]
    for _ in range(calls):
        module.zero_grad()
        start = time.thread_time()
        out = forward()
        middle = time.thread_time()
        out.backward(torch.empty_like(out))
        totals[0] += middle - start
        totals[1] += time.thread_time() - middle
    return [total / calls for total in totals]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--meta", action="store_true", help="tensors without numbers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=20, help="calls a round")
    args = parser.parse_args()
    device = "meta" if args.meta else "cpu"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = contenders(device)
    timings: dict[str, list[harness.Timing]] = {
        name: [harness.Timing(), harness.Timing()] for name in found
    }
    for number in range(args.rounds + 1):
        for name, (module, forward) in found.items():
            seconds = measure(module, forward, args.calls)
            if number:  # the first round loads what is loaded lazily
                for timing, value in zip(timings[name], seconds, strict=True):
                    timing.rounds.append(value)
    print(f"one layer, {SIZES[device][0]} tokens, {device}: microseconds of the host")
    print(f"{'':32s}{'forward':>10s}{'backward':>10s}{'both':>10s}")
    for name, pair in timings.items():
        forward_us, backward_us = (1e6 * timing.median for timing in pair)
        print(f"{name:32s}{forward_us:10.0f}{backward_us:10.0f}{forward_us + backward_us:10.0f}")


if __name__ == "__main__":
    main()
