"""Layers of swapped models with rounded weights: choosing them, and measuring what that costs."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bert_unpad.hf.inference import ROUNDED, NotPlainError, forget, infer, plan_layer
from bert_unpad.hf.layers import PackedLayer
from bert_unpad.hf.packing import Packing
from bert_unpad.hf.stock_modules import FusedLayer

WEIGHTS = ("float32", *ROUNDED)
"""What `unpad`'s `weights` may be."""


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, (PackedLayer, FusedLayer)):
            yield name, module


def choose_weights(model: nn.Module, weights: str) -> None:
    """Lets all swapped layers compute with the model's own weights, or with rounded ones.

    Raises:
        ValueError: a layer cannot be computed with them, or there is none; the text says why. All
            compute with the model's own weights then.
    """
    found = dict(_layers(model))
    for layer in found.values():
        _use_own_weights(layer)
    if weights not in ROUNDED:
        return
    reason: str | None = "it has no layers that run on packed tokens"
    for name, layer in found.items():
        if reason := _round(layer, weights):
            reason = f"of layer {name}: {reason}"
            break
    if reason:
        for layer in found.values():
            _use_own_weights(layer)
        raise ValueError(f'weights: expected "float32" for this model, because {reason}')


def _use_own_weights(layer: Any) -> None:
    layer.__dict__.pop("_bert_unpad_weights", None)
    forget(layer)


def _round(layer: Any, weights: str) -> str | None:
    """Rounds a layer's weights, or returns why that cannot be."""
    weight, adapter = next(layer.parameters()), layer._bert_unpad_layer
    if not weight.is_cpu or weight.dtype != torch.float32:
        return "its parameters are not float32 on a CPU"
    layer._bert_unpad_weights = weights
    try:
        plan_layer(layer, adapter, adapter.parts(layer), weight).tensors()
    except NotPlainError as error:
        return str(error)
    return None


def calibrate(
    model: nn.Module, batch: Mapping[str, Any], least_cosine: float = 0.9999
) -> dict[str, float]:
    """Runs a batch through a model with rounded weights, and leaves layers that lose too much in
    float32.

    Args:
        model: after `unpad(model, weights="int8")` or `"bfloat16"`, in evaluation mode.
        batch: the arguments of a call, for example a tokenizer's result.
        least_cosine: of a token's output of a rounded layer with that in float32 from the same
            input. A layer where a token's is lower goes on in float32.

    Returns:
        By the name of each layer that was rounded: the least cosine of its tokens.

    Raises:
        ValueError: no layer of the model computes this batch with rounded weights.
    """
    cosines: dict[str, float] = {}
    layers = {
        name: layer for name, layer in _layers(model) if hasattr(layer, "_bert_unpad_weights")
    }

    def compare(name: str):
        def hook(layer: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            packing, adapter = kwargs.get("packing"), layer._bert_unpad_layer
            if not isinstance(packing, Packing):
                return
            call = (layer, adapter, adapter.parts(layer), x, packing, kwargs.get("shared"))
            if (rounded := infer(*call)) is None:
                return
            weights = layer.__dict__.pop("_bert_unpad_weights")
            exact = infer(*call)
            layer._bert_unpad_weights = weights
            assert exact is not None
            cosine = float(functional.cosine_similarity(rounded, exact, dim=-1).min())
            # A layer may stand in several places; NaN is the least.
            known = cosines.get(name, 1.0)
            cosines[name] = cosine if not cosine >= known else known

        return hook

    handles = [
        layer.register_forward_hook(compare(name), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    if not cosines:
        raise ValueError(
            "model: expected one whose layers compute this batch with rounded weights: "
            'unpad(model, weights="int8"), in evaluation mode, without autocast'
        )
    for name, cosine in cosines.items():
        if not cosine >= least_cosine:
            _use_own_weights(layers[name])
    return cosines
