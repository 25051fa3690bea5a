"""Seconds by which the exchange of gradients and weights outlasts computing, bucket by bucket.

The collectives are those of `bert_unpad.costs.network`. Buckets are exchanged one after another,
each when it is full on the slowest rank; as `simulate.network.Overlap`, but with DDP's real
buckets, of which the last, with the word embedding, can be a third of all bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from bert_unpad.costs.gradient_buckets import Bucket, Gradient
from bert_unpad.costs.network import Cluster

__all__ = ["POWER_SGD_RANK", "exposed_seconds", "power_sgd_bytes", "weights_seconds", "wire_bytes"]

POWER_SGD_RANK = 2
"""Columns of the thin matrices: the trainer's default."""

# PyTorch's hook compresses a matrix only if that makes it smaller by this factor
# (`min_compression_rate`).
_LEAST_RATE = 2


def power_sgd_bytes(gradients: Sequence[Gradient]) -> tuple[float, float, float]:
    """Bytes of the three allreduces of a bucket: what stays as it is, the Ps and the Qs."""
    whole, ps, qs = 0, 0, 0
    for gradient in gradients:
        if len(gradient.shape) < 2:
            whole += gradient.numel
            continue
        rows, columns = gradient.shape
        rank = min(rows, columns, POWER_SGD_RANK)
        if (rows + columns) * rank * _LEAST_RATE < gradient.numel:
            ps += rows * rank
            qs += columns * rank
        else:
            whole += gradient.numel
    return 4.0 * whole, 4.0 * ps, 4.0 * qs


def wire_bytes(buckets: Sequence[Bucket], compression: str) -> float:
    """Bytes of a whole gradient as it travels, before the allreduce's own factor."""
    return sum(sum(_sent_bytes(bucket, compression)) for bucket in buckets)


def exposed_seconds(
    buckets: Sequence[Bucket], backward: float, cluster: Cluster, ranks: int, compression: str
) -> float:
    """Seconds from the end of the backward pass to that of the exchange.

    Args:
        buckets: in the order in which they are exchanged.
        backward: seconds of the slowest rank's last backward pass.
        cluster: what it runs on.
        ranks: that average their gradients.
        compression: none, bf16 or power_sgd.
    """
    if ranks == 1:
        return 0.0
    time = 0.0
    for bucket in buckets:
        parts = _sent_bytes(bucket, compression)
        seconds = sum(cluster.allreduce(size, ranks) for size in parts if size)
        time = max(time, bucket.ready * backward) + seconds
    return max(time - backward, 0.0)


def weights_seconds(
    parameters: int, cluster: Cluster, ranks: int, *, sharers: int, local_sgd_period: int
) -> float:
    """Seconds of an update for exchanging weights (fp32), which nothing hides.

    Args:
        parameters: of the model.
        cluster: what it runs on.
        ranks: of the run.
        sharers: ranks each of which updates a part, which all others of them then receive (an
            all-gather: half of a ring allreduce); 1: none.
        local_sgd_period: updates between averages of the weights; 1: none.
    """
    size = 4.0 * parameters
    seconds = cluster.allreduce(size, sharers) / 2
    if local_sgd_period > 1:
        seconds += cluster.allreduce(size, ranks) / local_sgd_period
    return seconds


def _sent_bytes(bucket: Bucket, compression: str) -> tuple[float, ...]:
    """Of each allreduce of a bucket."""
    if compression == "power_sgd":
        return power_sgd_bytes(bucket.gradients)
    return (bucket.numel * (2.0 if compression == "bf16" else 4.0),)
