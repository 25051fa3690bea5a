"""Options of how gradients travel between ranks, in addition to those of `clip`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bert_unpad._choices import LOCAL_SGD_PERIOD, POWER_SGD_RANK
from bert_unpad._tiers import advanced


@dataclass
class CommConfig:
    """How gradients travel between ranks."""

    bucket_mb: float | None = advanced(None)
    """Size limit, in MiB, of the buckets in which gradients travel during the backward pass. By
    default DDP's 25. Smaller buckets overlap more and cost more round trips. clip.mode before, and
    power_sgd on CPUs, have one bucket only."""
    hook: Literal["allreduce", "hierarchical", "power_sgd", "post_local_sgd"] = advanced(
        "allreduce"
    )
    """What averages gradients. hierarchical: an allreduce in two hops, to the first rank of each
    machine, between these, and back. power_sgd: gradients travel as products of two thin matrices
    (Vogels et al., 2019); the error feedback that it adds is not bounded by clip. post_local_sgd:
    ranks average gradients within groups, and from time to time their models with all ranks (Lin et
    al., 2020)."""
    start: int = advanced(1000)
    """With comm.hook power_sgd or post_local_sgd: updates at the start of the run that use plain
    allreduces."""
    power_sgd_rank: int = advanced(POWER_SGD_RANK)
    """With comm.hook power_sgd: columns of the thin matrices."""
    local_sgd_period: int = advanced(LOCAL_SGD_PERIOD)
    """With comm.hook post_local_sgd: updates between averages of the models. Evaluations and
    checkpoints average them too."""
    local_sgd_group: int | None = advanced(None)
    """With comm.hook post_local_sgd: consecutive ranks that average gradients in every update. By
    default those of one machine."""
