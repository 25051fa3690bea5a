"""What every way of sharing an update has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.config import ClipConfig
from bert_unpad.pretrain.gradients.clipping import Clipping
from bert_unpad.pretrain.gradients.comm_hook import CommHook
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.run import Run

Groups = list[dict[str, Any]]
Kind = type[torch.optim.Optimizer]


class Way:
    """How ranks share the work and the memory of an update; this base is a rank alone.

    Args:
        ranks: the processes of the run.
    """

    waits_in_passes = False
    """Whether ranks wait for each other within passes."""
    shares_state = False
    """Whether ranks keep the optimizer's state of some parameters each."""
    cuts_parameters = False
    """Whether a rank updates parts of parameters."""
    clipping: type[Clipping] = Clipping
    """What bounds gradients."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def shard(self, model: EncoderForPreTraining, clip: ClipConfig) -> None:
        """Shards a model, in place, before its optimizer is made."""

    def make_optimizer(
        self, kind: Kind, model: nn.Module, groups: Groups, bucket_mb: float | None, **options: Any
    ) -> torch.optim.Optimizer:
        """The optimizer of this rank.

        Args:
            kind: its class.
            model: whose parameters are in the groups.
            groups: of parameters.
            bucket_mb: greatest size of a bucket in MiB; None leaves that open.
            **options: of the class.
        """
        return kind(groups, **options)

    def wrap(self, run: Run, clipping: Clipping, hook: CommHook, leaves_out: bool) -> nn.Module:
        """The model as passes call it, with clipping attached.

        Args:
            run: its model, on its device.
            clipping: of the class `clipping`.
            hook: how gradients travel.
            leaves_out: whether updates may leave layers out.

        Raises:
            ConfigError: a bound on buckets where all gradients must be in one.
        """
        return run.model

    def no_sync(self, replica: nn.Module) -> AbstractContextManager[None]:
        """A context in which backward passes add up gradients on this rank.

        Args:
            replica: what `wrap` has returned.
        """
        return nullcontext()

    def whole(self, model: EncoderForPreTraining) -> EncoderForPreTraining:
        """The model with whole parameters, on rank 0; all ranks must call it."""
        return model
