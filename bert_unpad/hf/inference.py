"""A layer of a Hugging Face model as one operator, where nothing is trained.

Without gradients, in float32 on a CPU, a layer whose modules are plain is computed by
`ops.encoder_layer`: from their parameters as they are, or rounded to 8 bits where `unpad` was asked
for that. All other layers and calls are computed module by module.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bert_unpad.hf import plain_modules
from bert_unpad.hf.layer_parts import LayerAdapter, LayerParts
from bert_unpad.hf.packing import Packing
from bert_unpad.ops.encoder_layer import (
    FEATURES,
    Affine,
    LayerParameters,
    LayerShape,
    encoder_layer,
    pack_int8,
)

INT8 = "int8"
"""A value of `unpad`'s `weights`."""

_State = tuple[int, int]

# By layer: of each weight what it was when it was rounded, and the result.
_rounded: MutableMapping[nn.Module, dict[str, tuple[_State, Tensor]]] = WeakKeyDictionary()


class NotPlainError(Exception):
    """A module has to be called; the text says why."""


def infer(
    layer: nn.Module, adapter: LayerAdapter, parts: LayerParts, x: Tensor, packing: Packing
) -> Tensor | None:
    """Computes a layer of packed tokens x [1, T, hidden], or of the rows of `packing.last`.

    Returns None where that takes the modules.
    """
    if parts.attention.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not x.is_cpu or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return None
    if _drops(parts):
        return None
    try:
        parameters, shape = read(layer, adapter, parts, x)
    except NotPlainError:
        return None
    rotates, last = shape.rotary[0] != 0, packing.last
    if rotates and packing.positions is None:
        return None
    return encoder_layer(
        *(x[0], packing.cu_seqlens, packing.max_seqlen, parameters.tensors(), shape),
        positions=packing.positions if rotates else None,
        rows=None if last is None else (last.positions, last.cu_seqlens),
    )[None]


def _drops(parts: LayerParts) -> bool:
    """Whether something in the place of dropout has to be called."""
    dropouts = (parts.attention_dropout, parts.ffn_inner_dropout, parts.ffn_dropout)
    return any(plain_modules.rate(dropout) != 0.0 for dropout in dropouts)


def read(
    layer: nn.Module, adapter: LayerAdapter, parts: LayerParts, x: Tensor
) -> tuple[LayerParameters, LayerShape]:
    """Returns what the operator needs.

    Raises:
        NotPlainError: it cannot compute this layer.
    """
    activation = plain_modules.glu_kind(parts.ffn_activation)
    if adapter.distances is not None:
        raise NotPlainError("its attention counts distances of tokens")
    if activation is None:
        raise NotPlainError("its activation is none of GELU, SiLU and ReLU")
    inner = [module for module in (parts.ffn_in, parts.ffn_gate) if module is not None]
    linears = {
        **_linears(("query", "key", "value"), [parts.query, parts.key, parts.value], x),
        **_linears(("attention_out",), [parts.attention_out], x),
        **_linears(("ffn_in", "ffn_gate"), inner, x),
        **_linears(("ffn_out",), [parts.ffn_out], x),
    }
    width = adapter.head_dim(layer)
    query, key, ffn = (linears[name].weight.shape[0] for name in ("query", "key", "ffn_in"))
    if getattr(layer, "_bert_unpad_weights", None) == INT8:
        linears = {name: _to_int8(layer, name, linear) for name, linear in linears.items()}
    places = (parts.first_norm, parts.attention_norm, parts.ffn_norm)
    norms = [_norm(module, x) for module in places]
    kinds = {norm.rms for norm in norms if norm is not None}
    if norms[1] is None or len(kinds) != 1:
        raise NotPlainError("its norms are of several kinds")
    turn = None if adapter.rotary is None else adapter.rotary(layer)
    shape = LayerShape(
        *(query // width, key // width, width, ffn, activation, kinds.pop()),
        norms_first=parts.first_norm is not None,
        eps=tuple(0.0 if norm is None else norm.eps for norm in norms),
        window=adapter.window(parts.attention),
        rotary=(0.0, 1.0) if turn is None else turn,
    )
    affine = [None if norm is None else Affine(norm.weight, norm.bias) for norm in norms]
    gate = linears.pop("ffn_gate", None)
    return LayerParameters(**linears, ffn_gate=gate, norms=tuple(affine)), shape


def _linears(names: tuple[str, ...], modules: list[nn.Module], x: Tensor) -> dict[str, Affine]:
    """The linear layers by name; a module in all places holds their features side by side."""
    found = [plain_modules.linear_parameters(module, x) for module in modules]
    parts: list[Affine] = []
    for index, pair in enumerate(found):
        if pair is None:
            raise NotPlainError(f"{names[index]} is not a plain linear layer")
        weight, bias = pair
        if len(modules) > 1 and modules[0] is modules[1]:
            weight = weight.chunk(len(modules))[index]
            bias = None if bias is None else bias.chunk(len(modules))[index]
        fits = weight.dtype == torch.float32 and weight.is_contiguous()
        if not fits or weight.shape[0] % FEATURES or weight.shape[1] % FEATURES:
            raise NotPlainError(
                f"the weight of {names[index]} is not float32 with multiples of {FEATURES} features"
            )
        parts.append(Affine(weight, bias))
    return dict(zip(names, parts, strict=False))


def _norm(module: nn.Module | None, x: Tensor) -> plain_modules.NormParameters | None:
    if module is None or (type(module) is nn.Identity and plain_modules.untouched(module)):
        return None
    found = plain_modules.norm_of(module, x)
    if found is None:
        raise NotPlainError(f"{type(module).__name__} is not a plain norm")
    return found


def _to_int8(layer: nn.Module, name: str, linear: Affine) -> Affine:
    """The linear layer with its weight in 8 bits, rounded again if it was changed since."""
    weight = linear.weight
    state = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    kept = _rounded.setdefault(layer, {})
    if name not in kept or kept[name][0] != state:
        kept[name] = state, pack_int8(weight)
    return Affine(kept[name][1], linear.bias)
