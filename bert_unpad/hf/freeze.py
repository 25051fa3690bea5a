"""`freeze`: swapped models that only infer."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import modeling_outputs as outputs

from bert_unpad.hf.frozen import FrozenLayers, WholeModel, outer_parts
from bert_unpad.hf.inference import NotPlainError, plan_layers
from bert_unpad.hf.layer_parts import LayerAdapter
from bert_unpad.hf.layers import PackedLayer
from bert_unpad.hf.models import PackedModel
from bert_unpad.hf.stock_modules import OUTER, FusedLayer, PackedCall


class _Place(NamedTuple):
    """A module of a model, by the module that it is in and its name there."""

    parent: nn.Module
    name: str


def freeze(model: nn.Module) -> nn.Module:
    """Makes a swapped model one that only infers, in place: its layers' weights become constants.

    All layers are computed by one operator from then on, and have no modules or parameters that
    PyTorch, sentence-transformers or this package would have to look through at each call. Weights
    are kept in 8 bits alone where `unpad` was asked for these. What is read, called and compared
    stays the same. What is over: training, other dtypes and devices, hooks on layers, saving,
    `repad`, attentions, hidden states, and all else that the stock modules would have to compute.

    Args:
        model: in evaluation mode, float32, on a CPU, after `unpad` (and `calibrate`, if at all).

    Returns:
        The same object.

    Raises:
        ValueError: there is no swapped model in it, or it has a layer that has to be called (the
            text says which and why). Nothing is changed then.
    """
    bases: list[tuple[str, Any]] = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (PackedModel, PackedCall)) and not module._bert_unpad_frozen
    ]
    if not bases:
        raise ValueError("model: expected one after unpad, which is not frozen yet")
    found: list[tuple[_Place, nn.Module]] = []
    for name, base in bases:
        try:
            found += _replaced(base)
        except NotPlainError as error:
            where = name or "the model itself"
            raise ValueError(f"model: cannot freeze {where}, because {error}") from None
    for place, module in found:
        setattr(place.parent, place.name, module)
    for _, base in bases:
        base._bert_unpad_whole = _whole(base)
        base.requires_grad_(False)
        base._bert_unpad_frozen = True
        base._bert_unpad_padded = ("output_attentions", "output_hidden_states")
    return model


def _replaced(base: Any) -> Iterator[tuple[_Place, nn.Module]]:
    """What is replaced in a base model, and by what.

    Raises:
        NotPlainError: it cannot be.
    """
    reason = "it is in training mode" if base.training else base._bert_unpad_reason(False)
    weight = base.get_input_embeddings().weight
    if weight.dtype != torch.float32 or not weight.is_cpu:
        reason = f"its parameters are {weight.dtype} on {weight.device}, not float32 on a CPU"
    if isinstance(base, PackedCall) and not base._bert_unpad_exact_angles:
        reason = "its angles were rounded to 16 bits"
    if reason:
        raise NotPlainError(reason)
    layers: set[Any] = {module for module in base.modules() if isinstance(module, _LAYERS)}
    for parent in base.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and layers.issuperset(child) and len(child):
                adapter: LayerAdapter = child[0]._bert_unpad_layer  # type: ignore[assignment]
                frozen = FrozenLayers(child, adapter, plan_layers(child, adapter, weight))
                layers -= set(child)
                yield _Place(parent, name), nn.ModuleList([frozen])
    if layers:
        raise NotPlainError("a layer is wrapped")


def _whole(base: Any) -> WholeModel | None:
    """A frozen base model as one operator, or None where something has to be called."""
    frozen = [module for module in base.modules() if isinstance(module, FrozenLayers)]
    if isinstance(base, PackedModel):
        adapter = base._bert_unpad_adapter
        paths, counts_ids, output = OUTER, adapter.positions == "ids", adapter.output
    else:
        family = base._bert_unpad_family
        pools = hasattr(base, "pooler")
        paths, counts_ids = family.outer, family.counts_ids
        output = outputs.BaseModelOutputWithPooling if pools else outputs.BaseModelOutput
    if paths is None or len(frozen) != 1 or not frozen[0].independent:
        return None
    parts = outer_parts(base, paths, counts_ids)
    return None if parts is None else WholeModel(parts, frozen[0], output)


_LAYERS = (PackedLayer, FusedLayer)
