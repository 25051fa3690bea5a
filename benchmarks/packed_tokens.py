"""Tokens a second of a ModernBERT's training step on packed sequences of one length, on a GPU.

    python -m benchmarks.packed_tokens
    python -m benchmarks.packed_tokens --size tiny --rehearse      # on a CPU, no figures

ModernBERT-base in bf16, 32,768 tokens a step, as sequences of 1,024 and of 8,192 tokens; masked
tokens alone, 30 % of them; forward, backward and update. The peer is Hugging Face's own model with
sdpa, to which these batches have no padding. Published for 8 H100, by the model's authors: 312 and
239 thousand tokens a second and GPU (Warner et al., 2024, arXiv:2412.13663, table 3). Writes
benchmarks/results/<device>/packed_tokens.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.lib import harness, long_sequences, model_steps, modernbert_peers
from benchmarks.lib.peers import PaddedInputs
from benchmarks.lib.step_device import Gpu, Host, StepDevice
from bert_unpad.nn import EncoderForPreTraining

TOKENS = {"base": 32_768, "tiny": 256}
LENGTHS = {"base": (1024, 8192), "tiny": (32, 128)}
TURN = 3  # steps
OURS, STOCK = "bert_unpad", "hf sdpa"


def ours(size: str, device: torch.device) -> Callable[[Any], Callable[[], None]]:
    with device:
        model = EncoderForPreTraining(long_sequences.config(size)).train()
    optimizer = model_steps.fused_adam(model, torch.bfloat16)

    def step_of(inputs: Any) -> Callable[[], None]:
        loss = long_sequences.our_loss(model)
        return model_steps.make_step(loss, optimizer, inputs, torch.bfloat16, device)

    return step_of


def stock(size: str, device: torch.device) -> Callable[[Any], Callable[[], None]]:
    with device:
        model, optimizer = long_sequences.hugging_face(size)
    loss = partial(modernbert_peers.padded, model)

    def step_of(inputs: Any) -> Callable[[], None]:
        padded = PaddedInputs.build(inputs)
        return model_steps.make_step(loss, optimizer, padded, torch.bfloat16, device)

    return step_of


def measure(size: str, rounds: int, seed: int, device: StepDevice) -> list[dict[str, Any]]:
    makers = {OURS: ours(size, device.device), STOCK: stock(size, device.device)}
    rows = []
    for length in LENGTHS[size]:
        lengths = [length] * (TOKENS[size] // length)
        inputs = long_sequences.masked_batch(lengths, size, seed)
        steps = {name: make(inputs) for name, make in makers.items()}
        turns = {name: harness.Timing() for name in steps}
        for number in range(1 + rounds):
            for name, step in steps.items():
                seconds = device.turn(step, TURN)
                if number:
                    turns[name].rounds.append(seconds)
        for name, timing in turns.items():
            rate = inputs.batch.total / timing.median
            ratio = timing.median / turns[OURS].median
            rows.append(
                {
                    "contender": name,
                    "length": length,
                    "tokens": inputs.batch.total,
                    "seconds": timing.median,
                    "rounds": timing.rounds,
                    "tokens_per_second": rate,
                    "ours_faster_by": ratio,
                }
            )
            print(f"{length:6d} {name:12s}{1e3 * timing.median:9.1f} ms{rate:10.0f} tokens/s"
                  f"{ratio:7.2f}x", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=list(TOKENS), default="base")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rehearse", action="store_true", help="try it out on a CPU")
    args = parser.parse_args()
    device: StepDevice = Host() if args.rehearse else Gpu()
    harness.time_algorithms()  # as the trainer does
    payload = {"size": args.size, "results": measure(args.size, args.rounds, args.seed, device)}
    if not args.rehearse:
        path = harness.save("packed_tokens", device.folder, harness.command(), payload)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
