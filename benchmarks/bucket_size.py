r"""Which size of buckets is fastest on this cluster: times a configuration's own passes with each.

    # as training is launched, with the same file
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        benchmarks/bucket_size.py --config my.yaml --sizes 1 2 5 10 25 100

Makes the configuration's model and exchanges its gradients as `clip` and `comm` say, with buckets
of each size in turn: the last forward and backward pass of an update, on sequences of half the
greatest length (text fills about half). Prints the median seconds of the slowest rank, and the
`comm.bucket_mb` to set; nothing is trained or written.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from bert_unpad.batch import PackedInputs
from bert_unpad.costs.timing import random_inputs
from bert_unpad.nn import BertForPreTraining
from bert_unpad.pretrain.config import ConfigError, PretrainConfig, read_config
from bert_unpad.pretrain.feed.steps import Step, count_labels
from bert_unpad.pretrain.model import build_model
from bert_unpad.pretrain.parallel import make_way
from bert_unpad.pretrain.ranks import HostSums, Ranks, join_ranks
from bert_unpad.pretrain.run import Run


def make_inputs(model: BertForPreTraining, config: PretrainConfig, ranks: Ranks) -> PackedInputs:
    """One pass's sequences on this rank."""
    count = max(1, config.batching.per_rank(ranks.world_size) // config.batching.accumulation)
    # At least 4 tokens, of which one is masked.
    lengths = [max(4, config.data.max_seq_length // 2)] * count
    return random_inputs(model.config, lengths, seed=ranks.rank).to(ranks.device)


def seconds_of(
    size: float, model: BertForPreTraining, config: PretrainConfig, ranks: Ranks, rounds: int
) -> float:
    """Median of the slowest rank's seconds, over the rounds."""
    config = dataclasses.replace(config, comm=dataclasses.replace(config.comm, bucket_mb=size))
    way = make_way(Run(config, ranks, model))
    way.make_optimizer()
    way.begin()
    inputs = make_inputs(model, config, ranks)
    masked, pairs = count_labels(inputs)
    step = Step(
        (inputs,), 0, np.arange(inputs.batch.batch_size), {"masked": masked, "pairs": pairs}
    )
    found = []
    for number in range(rounds + 1):  # the first does not count
        ranks.barrier()
        started = time.perf_counter()
        way.accumulate(step, HostSums(ranks, step.counts))
        way.finish()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        taken = max(ranks.gather(time.perf_counter() - started))
        if number:
            found.append(taken)
        model.zero_grad()
    way.end()
    return statistics.median(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 2, 5, 10, 25, 100])
    parser.add_argument("--rounds", type=int, default=10)
    options, rest = parser.parse_known_args(arguments)
    if not all(size > 0 for size in options.sizes):
        parser.error(f"--sizes must be numbers > 0, got {options.sizes}")
    try:
        config, _ = read_config(rest)
        config.comm = dataclasses.replace(config.comm, bucket_mb=options.sizes[0])
        config.validate()  # that there are buckets to size
        with join_ranks(config) as ranks:
            if ranks.world_size == 1:
                parser.error("one rank exchanges nothing: start it with torchrun")
            data = config.data
            model = build_model(config, data.vocab_size, data.max_seq_length).to(ranks.device)
            times = {
                size: seconds_of(size, model, config, ranks, options.rounds)
                for size in options.sizes
            }
            if ranks.is_first:
                for size, seconds in times.items():
                    print(f"comm.bucket_mb {size:g}: {seconds:.4f} s")
                print(f"fastest: --comm.bucket_mb {min(times, key=times.get):g}")
    except ConfigError as error:
        print(f"tune_buckets: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
