"""`freeze`: swapped models that only infer."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import modeling_outputs as outputs

from bert_unpad.hf.frozen_layers import FrozenLayers
from bert_unpad.hf.inference import NotPlainError, forget, plan_layers
from bert_unpad.hf.layer_parts import LayerAdapter
from bert_unpad.hf.layers import PackedLayer
from bert_unpad.hf.models import PackedModel
from bert_unpad.hf.stock_modules import OUTER, FusedLayer, PackedCall
from bert_unpad.hf.whole_model import WholeModel

_LAYERS = (PackedLayer, FusedLayer)


def freeze(model: nn.Module) -> nn.Module:
    """Makes a swapped model one that only infers, in place: its layers become constants.

    All layers are computed by one operator from then on, and have no modules or parameters that
    PyTorch, sentence-transformers or this package would have to look through at each call. Weights
    are kept in 8 bits alone where `unpad` was asked for these. What is read, called and compared
    stays the same. Embeddings, the last norm, the pooler and heads stay modules, whose parameters
    and hooks count at each call; but DeBERTa's embeddings of distances are constants too. The base
    model's parameters no longer ask for gradients, those that a head shares included. What is over:
    training of the base model, other dtypes and devices, hooks on layers, loading, saving, `repad`,
    attentions, hidden states, and all else that the stock modules would have to compute.

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
    found: list[tuple[nn.Module, str, nn.ModuleList]] = []
    for name, base in bases:
        try:
            found += _replaced(base)
        except NotPlainError as error:
            where = name or "the model itself"
            raise ValueError(f"model: cannot freeze {where}, because {error}") from None
    for parent, name, module in found:
        setattr(parent, name, module)
        forget(parent)
    for _, base in bases:
        base.requires_grad_(False)
        base._bert_unpad_whole = _whole(base)
        base._bert_unpad_frozen = True
        base._bert_unpad_padded = PackedModel._bert_unpad_padded
    return model


def _replaced(base: Any) -> Iterator[tuple[nn.Module, str, nn.ModuleList]]:
    """The lists of layers of a base model, by the module that each is in and its name there, and
    what takes their place.

    Raises:
        NotPlainError: they cannot be replaced.
    """
    reason = "it is in training mode" if base.training else base._bert_unpad_reason(False)
    weight = base.get_input_embeddings().weight
    if weight.dtype != torch.float32 or not weight.is_cpu:
        reason = f"its parameters are {weight.dtype} on {weight.device}, not float32 on a CPU"
    if isinstance(base, PackedCall) and not base._bert_unpad_exact_angles:
        reason = "its angles were rounded to 16 bits"
    if "_bert_unpad_verify" in vars(base):
        reason = "its first call is still to be verified: call it with a padded batch before"
    if reason:
        raise NotPlainError(reason)
    layers: set[Any] = {module for module in base.modules() if isinstance(module, _LAYERS)}
    for parent in base.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and layers.issuperset(child) and len(child):
                if isinstance(base, PackedCall) and base.config.num_hidden_layers < len(child):
                    raise NotPlainError("its configuration leaves out some of its layers")
                adapter: LayerAdapter = child[0]._bert_unpad_layer  # type: ignore[assignment]
                frozen = FrozenLayers(parent, child, adapter, plan_layers(child, adapter, weight))
                layers -= set(child)
                yield parent, name, nn.ModuleList([frozen])
    if layers:
        raise NotPlainError("a layer is wrapped")


def _whole(base: Any) -> WholeModel | None:
    """A frozen base model as one operator, if there is one for its family."""
    if isinstance(base, PackedModel):
        adapter = base._bert_unpad_adapter
        return WholeModel(OUTER, adapter.positions == "ids", adapter.output)
    family, pools = base._bert_unpad_family, hasattr(base, "pooler")
    if family.outer is None:
        return None
    output = outputs.BaseModelOutputWithPooling if pools else outputs.BaseModelOutput
    return WholeModel(family.outer, family.counts_ids, output)
