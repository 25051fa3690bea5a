"""The gradient of one step: forward and backward passes over this rank's part of it.

Losses are divided by the counts of the GLOBAL batch (masked tokens, next-sentence pairs), so the
gradient is that of the global batch however many sequences and tokens each rank has got.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from bert_unpad.pretrain.feed.steps import Step
from bert_unpad.pretrain.gradients.cuda_graphs import GraphRunner
from bert_unpad.pretrain.output.metrics import Window
from bert_unpad.pretrain.ranks import HostSums, Ranks

__all__ = ["accumulate_gradient", "seed_step"]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds PyTorch's generators for one step on one rank.

    A step's random numbers then depend on nothing that came before, and a resumed run needs no
    generator state.
    """
    (state,) = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state >> np.uint64(1)))


def accumulate_gradient(
    model: nn.Module,
    step: Step,
    counts: HostSums,
    ranks: Ranks,
    autocast: AbstractContextManager,
    window: Window,
    in_backward: bool = True,
    graphs: GraphRunner | None = None,
    loss_scale: Tensor | None = None,
) -> None:
    """Adds the gradient of the global batch's loss to the parameters' `.grad`, on every rank.

    The loss is the mean over the global batch's masked tokens plus the mean over its next-sentence
    pairs. DDP averages gradients over ranks, hence the factor of the number of ranks.

    Args:
        model: bare, or in DDP; gradients are exchanged in the last pass only.
        step: this rank's inputs.
        counts: being added up over all ranks; must begin with masked, pairs.
        ranks: the processes of the run.
        autocast: context of the forward pass.
        window: gets this rank's losses and correct predictions.
        in_backward: whether DDP exchanges gradients; else `.grad` is this rank's part, times the
            number of ranks.
        graphs: runs the passes instead, on the bare model; `in_backward` is of no account then.
        loss_scale: float32 [] on the device, what the loss is multiplied by; None: 1.
    """
    scale: Tensor | None = None
    for number, inputs in enumerate(step.passes):
        if graphs is not None:
            scale = _loss_factors(counts, ranks, loss_scale) if scale is None else scale
            window.add_outputs(graphs(inputs, scale))
            continue
        last = number == len(step.passes) - 1
        whole = last and in_backward
        exchange = nullcontext() if whole or ranks.world_size == 1 else model.no_sync()
        with exchange:
            with autocast:
                outputs = model(inputs.to(ranks.device, non_blocking=True))
            scale = _loss_factors(counts, ranks, loss_scale) if scale is None else scale
            loss = outputs.mlm_loss_sum * scale[0] + outputs.nsp_loss_sum * scale[1]
            loss.backward()
        window.add_outputs(outputs)


def _loss_factors(counts: HostSums, ranks: Ranks, loss_scale: Tensor | None) -> Tensor:
    """What the sums of the two losses are multiplied by, float32 [2]."""
    # Clamped: a global batch without a label of one kind has a loss of 0 for it.
    factors = (ranks.world_size / counts.on_device()[:2].clamp(min=1)).float()
    return factors if loss_scale is None else factors * loss_scale
