"""Options of how gradients travel between ranks, in addition to those of `clip`."""

from dataclasses import dataclass
from typing import Literal

from bert_unpad._choices import LOCAL_SGD_PERIOD
from bert_unpad._tiers import advanced

CommHookName = Literal[
    "allreduce", "hierarchical", "power_sgd", "post_local_sgd", "dream_ddp", "gradient_flow", "auto"
]
Guarantee = Literal["exact", "bounded", "any"]
"""`comm.guarantee`, the strictest first."""

MODELS_DIFFER: tuple[CommHookName, ...] = ("post_local_sgd", "dream_ddp")
"""Comm hooks with which ranks update models apart."""


@dataclass
class CommConfig:
    """How gradients travel between ranks."""

    bucket_mb: float | None = advanced(None)
    """Size limit, in MiB, of the buckets in which gradients travel during the backward pass. By
    default DDP's 25. Smaller buckets overlap more and cost more round trips. clip.mode before, and
    power_sgd on CPUs, have one bucket only."""
    hook: CommHookName = advanced("allreduce")
    """What averages gradients. hierarchical: an allreduce in two hops, to the first rank of each
    machine, between these, and back. power_sgd: gradients travel as products of two thin matrices
    (Vogels et al., 2019); the error feedback that it adds is not bounded by clip. post_local_sgd:
    ranks average gradients within groups, and from time to time their models with all ranks (Lin et
    al., 2020). dream_ddp (experimental): ranks average no gradients, but their models layer by
    layer, during the backward pass (Tang et al., 2025). gradient_flow (experimental): the chunks of
    the gradient with the largest norms travel, the others later (Sun et al., 2019); what is kept is
    not bounded by clip. auto measures, predicts and chooses, see comm.guarantee."""
    guarantee: Guarantee = advanced("exact")
    """With comm.hook auto: what it may choose. exact: averages of the gradient, by allreduce or
    hierarchical. bounded: also clip.wire_dtype bf16, which rounds, and power_sgd, which sends later
    what it leaves out. any: also post_local_sgd."""
    start: int = advanced(1000)
    """With comm.hook power_sgd, post_local_sgd, dream_ddp or gradient_flow, or optimizer.name
    mt_dao, onebit_adam or onebit_lamb: updates at the start of the run that use plain allreduces,
    before which auto chooses none of these. dream_ddp then measures times in 5 more; with
    gradient_flow the share of chunks falls to comm.chunk_share during as many more. With
    optimizer.name zero_one_adam: updates in which the variance may change."""
    local_sgd_period: int = advanced(LOCAL_SGD_PERIOD)
    """With comm.hook post_local_sgd: updates between averages of the models; with dream_ddp:
    updates in which each layer is averaged at least once. Evaluations and checkpoints average whole
    models too."""
    local_sgd_group: int | None = advanced(None)
    """With comm.hook post_local_sgd: consecutive ranks that average gradients in every update. By
    default those of one machine."""
    chunk_share: float = advanced(0.1)
    """With comm.hook gradient_flow: share of each bucket's chunks that travel; one at least."""
    chunk_size: int = advanced(32768)
    """With comm.hook gradient_flow: numbers in a chunk of the gradient."""

    @property
    def models_differ(self) -> bool:
        """Whether ranks update models apart, or may come to do so."""
        return self.hook in MODELS_DIFFER or (self.hook == "auto" and self.guarantee == "any")
