"""Layers of swapped models in 8 bits: choosing them, and measuring what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bert_unpad.hf.inference import INT8, NotPlainError, read
from bert_unpad.hf.layers import PackedLayer
from bert_unpad.hf.stock_modules import FusedLayer

WEIGHTS = ("float32", INT8)
"""What `unpad`'s `weights` may be."""


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, (PackedLayer, FusedLayer)):
            yield name, module


def use_int8(model: nn.Module) -> None:
    """Rounds the weights of all swapped layers to 8 bits, beside those that the modules keep.

    Raises:
        ValueError: a layer cannot be computed in 8 bits; the text says why. None is then.
    """
    found = dict(_layers(model))
    reasons = {name: reason for name, layer in found.items() if (reason := _round(layer))}
    if reasons:
        for layer in found.values():
            layer.__dict__.pop("_bert_unpad_weights", None)
        name, reason = next(iter(reasons.items()))
        raise ValueError(
            f'weights: expected "float32" for this model, because of layer {name}: {reason}'
        )


def _round(layer: Any) -> str | None:
    """Rounds a layer's weights, or returns why that cannot be."""
    weight, adapter = next(layer.parameters()), layer._bert_unpad_layer
    if not weight.is_cpu or weight.dtype != torch.float32:
        return "its parameters are not float32 on a CPU"
    layer._bert_unpad_weights = INT8
    try:
        read(layer, adapter, adapter.parts(layer), weight)
    except NotPlainError as error:
        return str(error)
    return None


def calibrate(
    model: nn.Module, batch: Mapping[str, Any], least_cosine: float = 0.9999
) -> dict[str, float]:
    """Runs a batch through a model in 8 bits, and leaves layers that lose too much in float32.

    Args:
        model: after `unpad(model, weights="int8")`, in evaluation mode.
        batch: the arguments of a call, for example a tokenizer's result.
        least_cosine: of a token's output of a layer in 8 bits with that in float32 from the same
            input. A layer where a token's is lower goes on in float32.

    Returns:
        By the name of each layer that was in 8 bits: the least cosine of its tokens.

    Raises:
        ValueError: no layer of the model is in 8 bits, or the batch does not reach them.
    """
    cosines: dict[str, float] = {}
    handles = []

    def compare(name: str):
        def hook(layer: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
            del layer._bert_unpad_weights
            exact = layer.forward(*args, **kwargs)
            a, b = (x if isinstance(x, Tensor) else x[0] for x in (output, exact))
            cosines[name] = float(functional.cosine_similarity(a, b, dim=-1).min())
            if cosines[name] < least_cosine:
                return exact
            layer._bert_unpad_weights = INT8
            return output

        return hook

    for name, layer in _layers(model):
        if getattr(layer, "_bert_unpad_weights", None) == INT8:
            handles.append(layer.register_forward_hook(compare(name), with_kwargs=True))
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    if not cosines:
        raise ValueError(
            'model: expected one with layers in 8 bits, unpad(model, weights="int8"), that compute '
            "this batch"
        )
    return cosines
