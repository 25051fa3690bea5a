"""A BERT's training step on the same sequences: unpadded, packed into whole rows, and padded.

    python -m benchmarks.packing

Rows of packed sequences are computed whole, with a mask by which no sequence sees another (Krell et
al., 2021, arXiv:2107.02027), by Hugging Face's model with sdpa; so is the batch padded to its
longest sequence. Plain unpadded is that model's modules on packed tokens with one sdpa call a
sequence. All compute logits at masked tokens only, and the same loss from the same weights.
Forward, backward and AdamW in fp32, without dropout, on sequences as long as those of MLPerf's
Wikipedia (512 tokens at most) and of the quickstart's text (128). Seconds are CPU time of one
thread, so that the benchmark may run beside other work. What models learn from packed rows is a
table of benchmarks.convergence. Writes benchmarks/results/cpu/packing.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.lib import harness, model_steps
from benchmarks.lib.peers import PaddedInputs, Peers, by_sequence
from benchmarks.lib.training_runs import ROOT
from bert_unpad._balancer import pack
from bert_unpad.batch import PackedInputs
from bert_unpad.batch.tensor_fields import map_tensors, tensor_fields
from bert_unpad.costs.timing import random_inputs
from bert_unpad.data import prepare
from bert_unpad.data.sampling.histogram import sample_lengths
from bert_unpad.nn import BertForPreTraining, weights
from bert_unpad.pretrain.config import read_config

UNPADDED, PLAIN, ROWS, PADDED = "unpadded", "plain unpadded", "packed rows", "padded"
WIKIPEDIA, QUICKSTART = "Wikipedia", "quickstart"


@dataclass(frozen=True, eq=False)
class RowInputs:
    """Sequences in rows of one length, as a user of packing has them; int64 but for the mask."""

    input_ids: Tensor
    """[rows, S], 0 where there is none."""
    token_type_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    """bool [rows, 1, S, S]: tokens of one sequence; empty places see each other."""
    first: Tensor
    """[B]: where sequences begin, in the flattened rows."""
    next_sentence_labels: Tensor
    """[B]"""
    masked_positions: Tensor
    """[M]: places in the flattened rows."""
    masked_labels: Tensor

    @classmethod
    def build(cls, inputs: PackedInputs, row_tokens: int) -> RowInputs:
        """By best fit, as `batching.strategy: packed` does it."""
        batch = inputs.batch
        lengths = batch.lengths.numpy()
        order, ends = pack(lengths.astype(np.uint16), row_tokens)
        starts = np.empty(len(lengths), np.int64)  # of sequences in the flattened rows
        begin = 0
        for row, end in enumerate(ends):
            sizes = lengths[order[begin:end]]
            starts[order[begin:end]] = row * row_tokens + np.cumsum(sizes) - sizes
            begin = end
        first = torch.from_numpy(starts)
        places = first.repeat_interleave(batch.lengths.long()) + batch.position_ids

        def spread(values: Tensor) -> Tensor:
            whole = torch.zeros(len(ends) * row_tokens, dtype=torch.int64)
            return whole.index_put((places,), values.long()).view(-1, row_tokens)

        numbers = torch.arange(1, len(lengths) + 1).repeat_interleave(batch.lengths.long())
        owner = spread(numbers)
        return cls(
            spread(inputs.input_ids),
            spread(inputs.token_type_ids),
            spread(batch.position_ids),
            (owner[:, None, :, None] == owner[:, None, None, :]),
            first,
            inputs.next_sentence_labels,
            places[inputs.masked_positions.long()],
            inputs.masked_labels,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RowInputs:
        return map_tensors(
            self, tensor_fields(self), lambda part: part.to(device, non_blocking=non_blocking)
        )


def row_loss(peers: Peers, inputs: RowInputs) -> Tensor:
    hidden = peers.model.bert(
        input_ids=inputs.input_ids,
        token_type_ids=inputs.token_type_ids,
        position_ids=inputs.position_ids,
        attention_mask=inputs.mask,
    ).last_hidden_state.flatten(0, 1)
    masked = hidden.index_select(0, inputs.masked_positions)
    return peers.loss(masked, hidden.index_select(0, inputs.first), inputs)


def lengths_of(workload: str, sequences: int, seed: int) -> tuple[list[int], int]:
    """Lengths of a batch, the longest first, and the greatest that there may be."""
    if workload == WIKIPEDIA:
        longest, lengths = 512, sample_lengths(sequences, seed)
    else:
        config, _ = read_config(["--config", str(ROOT / "configs" / "quickstart.yaml")])
        longest, known = config.data.max_seq_length, prepare(config.data).train.lengths
        lengths = np.random.default_rng(seed).choice(known, sequences, replace=False)
    return sorted((int(n) for n in lengths), reverse=True), longest


def contenders(
    size: str, lengths: list[int], row_tokens: int, seed: int
) -> dict[str, tuple[Callable[[Any], Tensor], torch.nn.Module, Any]]:
    """Loss, model and batch of each; those of Hugging Face share a model."""
    torch.manual_seed(seed)
    stock = model_steps.hugging_face(size, 0.0)
    ours = BertForPreTraining(model_steps.config(size, 0.0)).train()
    weights.load_state_dict(ours, stock.state_dict())
    inputs, peers = random_inputs(ours.config, lengths, seed), Peers(stock)
    return {
        UNPADDED: (model_steps.our_loss(ours), ours, inputs),
        PLAIN: (lambda x: peers.unpadded(x, by_sequence), stock, inputs),
        ROWS: (lambda x: row_loss(peers, x), stock, RowInputs.build(inputs, row_tokens)),
        PADDED: (peers.labels, stock, PaddedInputs.build(inputs)),
    }


def measure(
    workload: str, size: str, sequences: int, rounds: int, seed: int
) -> list[dict[str, Any]]:
    """The contenders' rows of one workload."""
    lengths, row_tokens = lengths_of(workload, sequences, seed)
    tokens, steps, computed = sum(lengths), {}, {}
    for name, (loss, model, batch) in contenders(size, lengths, row_tokens, seed).items():
        steps[name] = model_steps.make_step(loss, model_steps.adamw(model), batch, torch.float32)
        computed[name] = batch.input_ids.numel()
    timings = {name: harness.Timing() for name in steps}
    for number in range(1 + rounds):
        for name, step in steps.items():
            started = time.process_time()
            step()
            if number:
                timings[name].rounds.append(time.process_time() - started)
    found = []
    for name, timing in timings.items():
        found.append(
            {
                "contender": name,
                "workload": workload,
                "row_tokens": row_tokens,
                "sequences": sequences,
                "tokens": tokens,
                "computed": computed[name],
                "seconds": timing.median,
                "rounds": timing.rounds,
                "tokens_per_second": tokens / timing.median,
                "ours_faster_by": timing.median / timings[UNPADDED].median,
            }
        )
        print(f"{workload:12s}{name:16s}{timing.median:8.3f} s{tokens / timing.median:8.0f} "
              f"tokens/s{found[-1]['ours_faster_by']:6.2f}x", flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=list(model_steps.SIZES), default="small")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    harness.fix_allocator("heap")
    results = []
    for workload in (WIKIPEDIA, QUICKSTART):
        results += measure(workload, args.size, args.sequences, args.rounds, args.seed)
    path = harness.save(
        "packing", "cpu", harness.command(), {"size": args.size, "results": results}
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
