"""What ranks send to have the same weights: compressed gradients in buckets, and whole weights."""

from collections.abc import Sequence

from bert_unpad._choices import POWER_SGD_RANK
from bert_unpad.costs.gradient_buckets import Bucket, Gradient
from bert_unpad.costs.network import Cluster
from bert_unpad.costs.overlap import SyncBucket

HOOK_COMPRESSIONS = ("none", "bf16", "power_sgd")
"""How gradients travel with the optimizers that do not send anything themselves."""
COMPRESSIONS = (*HOOK_COMPRESSIONS, "one_bit")
"""How gradients travel. none: in fp32; bf16: `clip.wire_dtype: bf16`; power_sgd: `comm.hook`;
one_bit: momenta, by an optimizer of `ONE_BIT`, after its `comm.start` updates."""

# PyTorch's hook compresses a matrix only if that makes it smaller by this factor
# (`min_compression_rate`).
_LEAST_RATE = 2


def power_sgd_bytes(gradients: Sequence[Gradient]) -> tuple[float, float, float]:
    """Bytes of a bucket's three allreduces: what PowerSGD leaves as it is, the Ps and the Qs."""
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


def sync_buckets(buckets: Sequence[Bucket], compression: str) -> list[SyncBucket]:
    """DDP's buckets as they travel with one of `COMPRESSIONS`; `left` is a share."""
    if compression == "one_bit":  # the optimizer's buffer, when the backward pass is over
        return [SyncBucket((sum(bucket.numel for bucket in buckets) / 8,), 0.0)]
    found = []
    for bucket in buckets:
        if compression == "power_sgd":
            sizes = tuple(size for size in power_sgd_bytes(bucket.gradients) if size)
        else:
            sizes = (bucket.numel * (2.0 if compression == "bf16" else 4.0),)
        found.append(SyncBucket(sizes, 1 - bucket.ready))
    return found


def weights_seconds(
    parameters: int, cluster: Cluster, ranks: int, *, sharers: int, local_sgd_period: int
) -> float:
    """Seconds of an update for sending weights (fp32), which nothing hides.

    Args:
        parameters: of the model.
        cluster: what it runs on.
        ranks: of the run.
        sharers: ranks that share the optimizer's state. Each updates its part of the weights, which
            the others then receive: an all-gather, half of a ring allreduce. 1: none.
        local_sgd_period: updates between averages of the weights over all ranks; 1: none.
    """
    size = 4.0 * parameters
    seconds = cluster.allreduce(size, sharers) / 2
    if local_sgd_period > 1:
        seconds += cluster.allreduce(size, ranks) / local_sgd_period
    return seconds
