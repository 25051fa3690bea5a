"""The time of a training step: what each rank computes, waits for and receives, and the update.

A step makes one update. All ranks compute its passes and wait for the slowest once, at the end;
then for what the last backward pass could not hide of the gradients' sync; then each updates. An
exchange of examples goes on one step ahead in the background, so it costs time only where it takes
longer than a step. Computing and communication are taken not to slow each other.
"""

from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.gradient_buckets import num_parameters
from bert_unpad.costs.network import Cluster
from bert_unpad.costs.overlap import BucketOverlap, Overlap
from bert_unpad.nn.config import PRESETS, BertConfig

TYPICAL_FLOPS = 150e12
"""FLOP/s that a rank is taken to sustain where nothing is given: published BERT-large results on
A100 GPUs (305 to 367 sequences/s of about 0.49 TFLOP) come to 150e12 to 180e12."""


def _bert_large() -> BertConfig:
    return BertConfig(**PRESETS["bert-large"])


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, mean over steps; `total` is the sum of the other seconds."""

    compute: float
    """Forward and backward passes, mean over the ranks, without what is computed again."""
    straggler: float
    """Seconds by which the slowest rank takes longer than the mean."""
    allreduce: float
    """Sync of gradients, as far as the backward pass does not hide it."""
    exchange: float
    """Exchange of examples, as far as the step before does not hide it."""
    total: float
    sequences_per_second: float
    """Throughput of all ranks."""
    recompute: float = 0.0
    """What is computed again to save memory."""
    compress: float = 0.0
    """Computing of the sync."""
    weights: float = 0.0
    """Sending weights."""
    update: float = 0.0
    """Clipping and optimizer."""

    @property
    def network(self) -> float:
        """Seconds of communication: gradients and weights."""
        return self.allreduce + self.weights

    @property
    def scaling_efficiency(self) -> float:
        """Throughput over that of as many ranks that never wait for each other."""
        return self.compute / self.total


@dataclass(frozen=True)
class StepModel:
    """What a step costs: passes, sync of gradients, exchanged examples, and the update.

    The default is BERT-large, gradients in fp32, at `TYPICAL_FLOPS` on `Cluster()`; compression,
    weights, clipping and optimizer take no time in it.
    """

    cost: ComputeCost = field(
        default_factory=lambda: ComputeCost.from_rate(_bert_large(), TYPICAL_FLOPS)
    )
    """A rank's computing."""
    cluster: Cluster = field(default_factory=Cluster)
    """The cluster that the step runs on."""
    overlap: Overlap | BucketOverlap = field(
        default_factory=lambda: Overlap(gradient_bytes=4 * num_parameters(_bert_large()))
    )
    """How the last backward pass hides the sync of gradients."""
    passes: int = 1
    """Forward and backward passes of a step; the last one overlaps with the sync."""
    recompute: float = 0.0
    """What passes compute again to save memory, as a share of them."""
    compress: float = 0.0
    """Seconds that the sync computes."""
    weights: float = 0.0
    """Seconds of sending weights."""
    update: float = 0.0
    """Seconds of clipping and optimizer."""
    gather: float = 0.0
    """Seconds of an all-gather of weights that a pass hides, as far as its forward part lasts."""
    gathers: int = 0
    """How many of these a step has."""

    def to_dict(self) -> dict[str, object]:
        """The models of computing and communication, as JSON keeps them."""
        return {name: asdict(getattr(self, name)) for name in ("cost", "cluster", "overlap")}

    def step_time(
        self, busy: NDArray[np.float64], received: NDArray[np.float64], sequences: float
    ) -> StepTime:
        """Mean time of steps as they were dealt to the ranks.

        Args:
            busy: float64 [steps, ranks], seconds that each rank computes.
            received: float64 [steps, ranks or 1, 2], bytes of examples that a rank receives from
                its node and from other nodes; the same for all ranks if there is one.
            sequences: in a step of all ranks, mean.

        Raises:
            ValueError: the ranks do not fill the cluster's nodes.
        """
        ranks = busy.shape[1]
        near, far = np.moveaxis(received, -1, 0)
        exchange = self.cluster.exchange(near, far, ranks).max(axis=1)
        return self.time_of(float(busy.mean()), busy.max(axis=1), ranks, sequences, exchange)

    def time_of(
        self,
        compute: float,
        slowest: NDArray[np.float64],
        ranks: int,
        sequences: float,
        exchange: ArrayLike = 0.0,
    ) -> StepTime:
        """Mean time of steps of which only the mean and the slowest rank are known.

        Args:
            compute: seconds that a rank computes in a step, mean over ranks and steps.
            slowest: float64 [steps], seconds that the slowest rank computes.
            ranks: that average their gradients.
            sequences: in a step of all ranks, mean.
            exchange: float64 [steps] or one number, seconds of the exchange of examples.

        Raises:
            ValueError: the ranks do not fill the cluster's nodes.
        """
        again = self.recompute * compute
        busy = slowest + again
        allreduce = self.overlap.exposed(busy / self.passes, self.cluster, ranks)
        forward = self.cluster.hidden * busy / self.passes * (1 - self.overlap.backward_share)
        weights = self.weights + self.gathers * np.maximum(self.gather - forward, 0)
        alone = busy + allreduce + weights + (self.compress + self.update)
        late = np.maximum(np.asarray(exchange) - alone, 0)
        total = float((alone + late).mean())
        return StepTime(
            compute=compute,
            straggler=float(slowest.mean()) - compute,
            allreduce=float(allreduce.mean()),
            exchange=float(late.mean()),
            total=total,
            sequences_per_second=sequences / total,
            recompute=again,
            compress=self.compress,
            weights=float(weights.mean()),
            update=self.update,
        )
