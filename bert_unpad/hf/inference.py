"""A layer of a Hugging Face model as one operator, where nothing is trained.

Without gradients, in float32 on a CPU, a layer whose modules are plain is computed by
`encoder_layer`, or by two operators around attention that counts distances: from their parameters
as they are, or rounded to 8 bits where `unpad` was asked for that. All other layers and calls are
computed module by module.
"""

from collections.abc import MutableMapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bert_unpad.batch.rows import gather_rows
from bert_unpad.hf import plain_modules
from bert_unpad.hf.layer_parts import LayerAdapter, LayerParts
from bert_unpad.hf.packing import Packing
from bert_unpad.hf.relative import Distances
from bert_unpad.ops.encoder_layer import (
    FEATURES,
    LONGEST,
    Affine,
    LayerParameters,
    LayerShape,
    encoder_finish,
    encoder_layer,
    encoder_project,
    pack_int8,
)

INT8 = "int8"
"""A value of `unpad`'s `weights`."""

_SAMPLES = 61
"""Numbers of a weight that are compared to notice a write that PyTorch does not count."""


class _Rounded(NamedTuple):
    """A weight in 8 bits, and what is known of the weight that it was made from."""

    packed: Tensor
    address: int
    version: int
    sample: Tensor


# By layer and name of the linear layer.
_rounded: MutableMapping[nn.Module, dict[str, _Rounded]] = WeakKeyDictionary()


class NotPlainError(Exception):
    """A module has to be called; the text says why."""


def infer(
    layer: nn.Module,
    adapter: LayerAdapter,
    parts: LayerParts,
    x: Tensor,
    packing: Packing,
    shared: Any = None,
) -> Tensor | None:
    """Computes a layer of packed tokens x [1, T, hidden], or of the rows of `packing.last`.

    Returns None where that takes the modules. `shared` is what `Distances.shared` gives.
    """
    if torch.compiler.is_compiling():
        return None
    if parts.attention.training or torch.is_grad_enabled():
        forget(layer)  # weights may change, and not all optimizers say so
        return None
    if not x.is_cpu or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return None
    if _drops(parts):
        return None
    try:
        parameters, shape = read(layer, adapter, parts, x)
    except NotPlainError:
        return None
    rows_of_x = x[0].contiguous()
    if adapter.distances is not None:
        tensors = parameters.tensors()
        return _around(adapter.distances, parts, rows_of_x, tensors, shape, packing, shared)[None]
    rotates, last = shape.rotary[0] != 0, packing.last
    if rotates and packing.positions is None:
        return None
    return encoder_layer(
        *(rows_of_x, packing.cu_seqlens, packing.max_seqlen, parameters.tensors(), shape),
        positions=packing.positions if rotates else None,
        rows=None if last is None else (last.positions, last.cu_seqlens),
    )[None]


def _around(
    distances: Distances,
    parts: LayerParts,
    x: Tensor,
    parameters: list[Tensor],
    shape: LayerShape,
    packing: Packing,
    shared: Any,
) -> Tensor:
    """The layer as two operators around attention that counts distances of tokens."""
    heads, attention = shape.heads, parts.attention
    qkv = encoder_project(x, parameters, shape)
    q, kv = qkv[:, :heads], qkv[:, heads:].unflatten(1, (2, -1))
    if packing.last is not None:
        q, x = (gather_rows(t, packing.last.positions) for t in (q, x))
    scale = distances.scale(attention)
    bias = None if shared is None else distances.bias(attention, shared, q, kv[:, 0])
    if packing.last is None:
        attended = packing.attend(qkv, heads, 0.0, scale, bias)
    else:
        attended = packing.attend_last(q, kv, 0.0, scale, bias)
    return encoder_finish(x, attended, parameters, shape)


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
    query, key, value, ffn = (
        linears[name].weight.shape[0] for name in ("query", "key", "value", "ffn_in")
    )
    if key != value:
        raise NotPlainError("its keys and values have different widths")
    if getattr(layer, "_bert_unpad_weights", None) == INT8:
        linears = {name: _to_int8(layer, name, linear) for name, linear in linears.items()}
    places = (parts.first_norm, parts.attention_norm, parts.ffn_norm)
    norms = [_norm(module, x) for module in places]
    kinds = {norm.rms for norm in norms if norm is not None}
    if norms[1] is None or (parts.first_norm is None and norms[2] is None):
        raise NotPlainError("a norm was replaced by nothing")
    if len(kinds) != 1:
        raise NotPlainError("its norms are of several kinds")
    try:
        turn = None if adapter.rotary is None else adapter.rotary(layer)
    except ValueError as error:
        raise NotPlainError(str(error)) from None
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
    fused = len(modules) > 1 and all(module is modules[0] for module in modules)
    parts: list[Affine] = []
    for index, module in enumerate(modules):
        found = plain_modules.linear_parameters(module, x)
        if found is None or found[0] is not module._parameters["weight"]:
            raise NotPlainError(f"{names[index]} is not a plain linear layer in {x.dtype}")
        weight, bias = found
        if fused:
            weight = weight.chunk(len(modules))[index]
            bias = None if bias is None else bias.chunk(len(modules))[index]
        rows, columns = weight.shape
        if not weight.is_contiguous() or rows % FEATURES or columns % FEATURES or columns > LONGEST:
            raise NotPlainError(
                f"the weight of {names[index]} is not contiguous with multiples of {FEATURES} "
                f"features, at most {LONGEST} going in"
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


def forget(layer: nn.Module) -> None:
    """Drops what is kept of a layer: its weights are rounded again when they are needed."""
    _rounded.pop(layer, None)


def _to_int8(layer: nn.Module, name: str, linear: Affine) -> Affine:
    """The linear layer with its weight in 8 bits, rounded again if it was changed since.

    Raises:
        NotPlainError: a number is not finite.
    """
    weight = linear.weight.detach()
    version = 0 if weight.is_inference() else linear.weight._version
    sample = weight.view(-1)[:: max(1, weight.numel() // _SAMPLES)]
    kept = _rounded.setdefault(layer, {})
    found = kept.get(name)
    if (
        found is None
        or (found.address, found.version) != (weight.data_ptr(), version)
        or not torch.equal(found.sample, sample)
    ):
        try:
            packed = pack_int8(weight)
        except RuntimeError as error:
            raise NotPlainError(f"{name}: {error}") from None
        found = kept[name] = _Rounded(packed, weight.data_ptr(), version, sample.clone())
    return Affine(found.packed, linear.bias)
