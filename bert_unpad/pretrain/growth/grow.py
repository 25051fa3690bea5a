"""What happens to the model at the border of a stage."""

import copy
import dataclasses
from collections.abc import Sequence

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
    top, first, final = len(layers) - 1, *_norms(model, sources)
    for source in sources:
        layers.append(_copied(layers[source], copies))
    if final is not None:
        for slot, norm in enumerate(first, top):
            layers[slot].output.LayerNorm = _copied(norm, copies)
        layers[-1].output.LayerNorm = final
    encoder.fp8 = fp8  # of each layer
    _note_layers(model)
    return copies


def _copied(module: nn.Module, copies: Copies) -> nn.Module:
    """A copy, whose parameters are noted."""
    new = copy.deepcopy(module)
    copies |= zip(new.parameters(), module.parameters(), strict=True)
    return new


def _norms(
    model: EncoderForPreTraining, sources: tuple[int, ...]
) -> tuple[Sequence[nn.Module], nn.Module | None]:
    """The norms before the attention of the sources, and the last of all norms.

    With norms before the halves, a layer ends with the norm of the attention above it: it goes with
    the layer above, and the last of all stays on top. With norms after the halves none goes
    anywhere: an empty list and None.
    """
    config, bert = model.config, model.bert
    if config.norm_place == "post" or not sources:
        return [], None
    last = [layer.output.LayerNorm for layer in bert.encoder.layer]
    bottom = bert.encoder.LayerNorm if config.first_norm else bert.embeddings.LayerNorm
    first = [last[source - 1] if source else bottom or last[-1] for source in sources]
    return first, last[-1]


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
        if model.config.first_norm:
            bert.encoder.LayerNorm.requires_grad_(False)
        # They are the decoder's weight too.
        bert.embeddings.word_embeddings.requires_grad_(model.config.tie_word_embeddings)
