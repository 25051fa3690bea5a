"""Settings of how ranks exchange gradients, besides what `clip` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bert_unpad._choices import LOCAL_SGD_PERIOD, POWER_SGD_RANK
from bert_unpad.pretrain.config.errors import ConfigError
from bert_unpad.pretrain.config.update import ClipConfig


@dataclass
class CommConfig:
    """How gradients travel: in which pieces, and by which communication hook."""

    bucket_mb: float | None = None
    """Greatest size of the pieces in which gradients are exchanged while the backward pass goes on,
    in MiB; by default DDP's 25. Smaller ones overlap more, and cost more round trips.
    Neither clip.mode before nor power_sgd on CPUs has pieces."""
    hook: Literal["allreduce", "hierarchical", "power_sgd", "post_local_sgd"] = "allreduce"
    """hierarchical: an allreduce in two hops, to the first rank of each machine, between these, and
    back. power_sgd: gradients travel as products of two thin matrices (Vogels et al., 2019). What
    its error feedback adds is not bounded by clip. post_local_sgd: ranks average their gradients
    with those of their group only, and their models with all ranks now and then (Lin et al.,
    2020)."""
    start: int = 1000
    """Updates that begin the run with plain allreduces."""
    power_sgd_rank: int = POWER_SGD_RANK
    """Columns of the thin matrices."""
    power_sgd_error_feedback: bool = True
    """Add what the compression loses to the next step's gradient (takes memory for two more
    gradients)."""
    local_sgd_period: int = LOCAL_SGD_PERIOD
    """Updates between averages of the models; evaluations and checkpoints average them too."""
    local_sgd_group: int | None = None
    """Consecutive ranks that go on averaging gradients; by default those of one machine."""


def check_comm(comm: CommConfig, clip: ClipConfig) -> None:
    """Checks which settings of the exchange go together.

    Raises:
        ConfigError: see its message.
    """
    if comm.bucket_mb is not None:
        if not comm.bucket_mb > 0:
            raise ConfigError("comm.bucket_mb", f"expected a number > 0, got {comm.bucket_mb!r}")
        if clip.mode == "before":
            raise ConfigError("comm.bucket_mb", "clip.mode before exchanges all gradients at once")
    if comm.hook in ("allreduce", "hierarchical"):
        return
    if clip.mode == "before":
        raise ConfigError(
            "comm.hook", f"{comm.hook} needs another clip.mode than before, which exchanges alone"
        )
    if comm.hook == "power_sgd" and clip.wire_dtype != "fp32":
        raise ConfigError(
            "clip.wire_dtype", f"comm.hook {comm.hook} exchanges gradients as they are: needs fp32"
        )
