"""What happens to model and optimizer at the border of a stage."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import nn

from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.config import OptimizerConfig
from bert_unpad.pretrain.growth.stage import Stage
from bert_unpad.pretrain.parallel import Way
from bert_unpad.pretrain.update.optimizer import build_optimizer
from bert_unpad.pretrain.update.state import take_over

__all__ = ["add_layers", "cut_layers", "freeze", "next_optimizer"]

Copies = dict[nn.Parameter, nn.Parameter]


def cut_layers(model: EncoderForPreTraining, layers: int) -> None:
    """Takes the topmost layers away, so that `layers` are left."""
    if layers < model.config.num_hidden_layers:
        del model.bert.encoder.layer[layers:]
        _note_layers(model)


def add_layers(model: EncoderForPreTraining, sources: tuple[int, ...]) -> Copies:
    """Puts layers on top.

    Args:
        model: grows in place.
        sources: for each new layer, the one that it is a copy of.

    Returns:
        Each new parameter, with what it is a copy of.
    """
    encoder = model.bert.encoder
    layers, fp8 = encoder.layer, encoder.fp8
    copies: Copies = {}
    for source in sources:
        layer = copy.deepcopy(layers[source])
        for ours, theirs in zip(layer.parameters(), layers[source].parameters(), strict=True):
            copies[ours] = theirs
        layers.append(layer)
    encoder.fp8 = fp8  # of each layer
    _note_layers(model)
    return copies


def _note_layers(model: EncoderForPreTraining) -> None:
    count = len(model.bert.encoder.layer)
    model.config = dataclasses.replace(model.config, num_hidden_layers=count)
    model.bert.config = model.config


def freeze(model: EncoderForPreTraining, stage: Stage) -> None:
    """Makes exactly the stage's parameters require gradients; drops the gradients of all."""
    model.zero_grad()
    bert = model.bert
    bert.encoder.frozen_layers = stage.frozen
    model.requires_grad_(True)
    if stage.frozen:
        bert.encoder.layer[: stage.frozen].requires_grad_(False)
        bert.embeddings.requires_grad_(False)
        # They are the decoder's weight too.
        bert.embeddings.word_embeddings.requires_grad_(model.config.tie_word_embeddings)


def next_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    old: torch.optim.Optimizer | None = None,
    copies: Copies | None = None,
    way: Way | None = None,
    bucket_mb: float | None = None,
) -> torch.optim.Optimizer:
    """An optimizer of the parameters that train now, and of no others.

    Parameters that have trained before keep their states, copies get those of their originals, and
    others begin without.

    Args:
        model: after `add_layers` and `freeze`.
        config: of the optimizer.
        old: of the stage before, if there was one.
        copies: what `add_layers` has returned.
        way: how the ranks share an update; if that is the state, the parameters must be those of
            `old`.
        bucket_mb: see `build_optimizer`.
    """
    new = build_optimizer(model, config, way, bucket_mb)
    if old is not None:
        take_over(new, old, copies or {})
    return new
