"""What happens to the model at the border of a stage."""

from __future__ import annotations

import copy
import dataclasses

from torch import nn

from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.growth.stage import Stage

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
