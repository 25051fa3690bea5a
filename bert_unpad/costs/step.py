"""The time of a training step on a cluster, from what each rank computes and what it receives.

All ranks wait for the slowest, then for what the backward pass could not hide of the gradients'
allreduce. An exchange of examples goes on one step ahead in the background, so it costs time only
where it takes longer than a step. Computing and communication are taken not to slow each other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.network import Cluster, Overlap
from bert_unpad.nn.config import PRESETS, BertConfig

__all__ = ["StepModel", "StepTime"]

TYPICAL_FLOPS = 150e12
"""FLOP/s that a rank is taken to sustain where nothing is given: published BERT-large results on
A100 GPUs (305 to 367 sequences/s of about 0.49 TFLOP) come to 150e12 to 180e12."""


def num_parameters(config: BertConfig) -> int:
    """Parameters of `BertForPreTraining`, the tied embedding counted once."""
    hidden, wide = config.hidden_size, config.intermediate_size
    rows = config.max_position_embeddings + config.type_vocab_size + config.padded_vocab_size
    embeddings = rows * hidden + 2 * hidden
    attention = 4 * (hidden**2 + hidden) + 2 * hidden
    feed_forward = 2 * hidden * wide + wide + hidden + 2 * hidden
    heads = 2 * (hidden**2 + hidden) + 2 * hidden  # pooler; transform and its LayerNorm
    heads += config.padded_vocab_size + 2 * hidden + 2  # biases of the logits; next sentence
    return embeddings + config.num_hidden_layers * (attention + feed_forward) + heads


def _bert_large() -> BertConfig:
    return BertConfig(**PRESETS["bert-large"])


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, mean over steps; `total` is the sum of the others."""

    compute: float
    """Of a rank, mean over the ranks."""
    straggler: float
    """By which the slowest rank takes longer than the mean."""
    allreduce: float
    """Of the gradients, as far as the backward pass does not hide it."""
    exchange: float
    """Of examples, as far as the step before does not hide it."""
    total: float
    sequences_per_second: float
    """Of all ranks."""

    @property
    def scaling_efficiency(self) -> float:
        """Throughput over that of as many ranks that never wait for each other."""
        return self.compute / self.total


@dataclass(frozen=True)
class StepModel:
    """What a step costs: computing, gradients, exchanged examples.

    The default is BERT-large, gradients in fp32, at `TYPICAL_FLOPS` on `Cluster()`.
    """

    cost: ComputeCost = field(
        default_factory=lambda: ComputeCost.from_rate(_bert_large(), TYPICAL_FLOPS)
    )
    cluster: Cluster = field(default_factory=Cluster)
    overlap: Overlap = field(
        default_factory=lambda: Overlap(gradient_bytes=4 * num_parameters(_bert_large()))
    )

    def step_time(
        self, busy: NDArray[np.float64], received: NDArray[np.float64], sequences: float
    ) -> StepTime:
        """Mean time of steps.

        Args:
            busy: float64 [steps, ranks], seconds that each rank computes.
            received: float64 [steps, ranks or 1, 2], bytes of examples that a rank receives from
                its node and from other nodes; all ranks alike if there is one.
            sequences: in a step of all ranks, mean.

        Raises:
            ValueError: the ranks do not fill the cluster's nodes.
        """
        ranks = busy.shape[1]
        slowest, compute = busy.max(axis=1), float(busy.mean())
        allreduce = self.overlap.exposed(slowest, self.cluster, ranks)
        near, far = np.moveaxis(received, -1, 0)
        exchange = self.cluster.exchange(near, far, ranks).max(axis=1)
        late = np.maximum(exchange - (slowest + allreduce), 0)
        total = float((slowest + allreduce + late).mean())
        return StepTime(
            compute=compute,
            straggler=float(slowest.mean()) - compute,
            allreduce=float(allreduce.mean()),
            exchange=float(late.mean()),
            total=total,
            sequences_per_second=sequences / total,
        )

    def to_dict(self) -> dict[str, object]:
        """As JSON keeps it."""
        return asdict(self)
