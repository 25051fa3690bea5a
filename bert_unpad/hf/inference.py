"""Layers of a Hugging Face model as one operator, where nothing is trained.

Without gradients, in float32 on a CPU, layers whose modules are plain are computed by
`encoder_layers`, all of a stack at once where none is wrapped or has a hook; or each by two
operators around attention that counts distances. Weights are taken as they are, or rounded where
`unpad` was asked for that. All other layers and calls are computed module by module.
"""

from collections.abc import Iterable, MutableMapping
from itertools import zip_longest
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from bert_unpad.batch.rows import gather_rows
from bert_unpad.hf import plain_modules
from bert_unpad.hf.layer_parts import LayerAdapter, LayerParts
from bert_unpad.hf.packing import Packing
from bert_unpad.hf.relative import Bias
from bert_unpad.hf.snapshot import Snapshot
from bert_unpad.ops.encoder_layer import (
    FEATURES,
    LINEARS,
    LONGEST,
    LayerShape,
    encoder_finish,
    encoder_layers,
    encoder_project,
    in_order,
    pack_weight,
)

ROUNDED = {"bfloat16": torch.bfloat16, "int8": torch.int8}
"""Values of `unpad`'s `weights` but for the model's own."""

_SAMPLES = 61
"""Numbers of a weight that are compared to notice a write that PyTorch does not count."""


class _Rounded(NamedTuple):
    """A rounded weight, and what is known of the weight that it was made from."""

    packed: Tensor
    address: int
    version: int
    sample: Tensor


# By layer and name of the linear layer.
_rounded: MutableMapping[nn.Module, dict[str, _Rounded]] = WeakKeyDictionary()
_NAMES = ("weight", "bias")
_KINDS = {nn.Parameter, Tensor}


class NotPlainError(Exception):
    """A module has to be called; the text says why."""


class _Source(NamedTuple):
    """The module that weight and bias are of, or which of several parts of them."""

    module: nn.Module
    part: int = 0
    parts: int = 1

    def tensors(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns both as they are now."""
        weight, bias = map(self.module._parameters.get, _NAMES)
        if self.parts == 1:
            return weight, bias
        return self._part_of(weight), self._part_of(bias)

    def features(self) -> int:
        """Returns how many go out of the linear layer."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight.shape[0] // self.parts

    def _part_of(self, t: Tensor | None) -> Tensor | None:
        return None if t is None else t.chunk(self.parts)[self.part]


class LayerPlan(NamedTuple):
    """How operators compute a layer."""

    layer: nn.Module
    sources: tuple[_Source | None, ...]
    """Where the linear layers of `LINEARS` and the norms of `LayerParameters` are, or None."""
    shape: LayerShape

    def tensors(self) -> list[Tensor]:
        """Returns the parameters as they are now, in the order of `LayerParameters.tensors`.

        Raises:
            NotPlainError: one cannot be rounded, which is asked for.
        """
        found = []
        dtype = ROUNDED.get(getattr(self.layer, "_bert_unpad_weights", ""))
        for name, source in zip_longest(LINEARS, self.sources):
            weight, bias = (None, None) if source is None else source.tensors()
            if dtype is not None and name is not None and weight is not None:
                weight = _round(self.layer, name, weight, dtype)
            found.append((weight, bias))
        return in_order(found)


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
    if not _fits(x) or drops(parts):
        return None
    try:
        plan = plan_layer(layer, adapter, parts, x)
        parameters = plan.tensors()
    except NotPlainError:
        return None
    shape, rows_of_x = plan.shape, x[0].contiguous()
    if adapter.distances is not None:
        bias = adapter.distances.bias(parts.attention, shared)
        return compute_around(bias, rows_of_x, parameters, shape, packing)[None]
    return compute_layers(rows_of_x, packing, parameters, (shape,))


def _fits(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def compute_layers(
    x: Tensor, packing: Packing, parameters: list[Tensor], shapes: tuple[LayerShape, ...]
) -> Tensor | None:
    """Computes layers of packed tokens x [T, hidden], the last of them for `packing.last`.

    Returns None where positions are missing: [1, T, hidden] or [1, Q, hidden].
    """
    rotates, last = any(shape.rotary[0] != 0 for shape in shapes), packing.last
    if rotates and packing.positions is None:
        return None
    return encoder_layers(
        *(x, packing.cu_seqlens, packing.max_seqlen, parameters, shapes),
        positions=packing.positions if rotates else None,
        rows=None if last is None else (last.positions, last.cu_seqlens),
    )[None]


class _StackPlan(NamedTuple):
    """How all layers of a stack are computed, as long as its modules stay what they are."""

    snapshot: Snapshot
    layers: tuple[LayerPlan, ...] | None
    """None: layer by layer."""


_stacks: MutableMapping[nn.Module, _StackPlan] = WeakKeyDictionary()


def infer_layers(
    stack: Any, adapter: LayerAdapter, count: int, x: Tensor, packing: Packing
) -> Tensor | None:
    """Computes the first `count` layers of a stack of packed tokens x [1, T, hidden].

    Returns None where they have to be called.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or count == 0:
        return None
    if not _fits(x) or torch_module._has_any_global_hook():
        return None
    if adapter.distances is not None or adapter.rotary is not None:
        return None
    plan = _stacks.get(stack)
    if plan is None or not plan.snapshot.holds((stack.layer,)):
        plan = _stacks[stack] = _plan(stack.layer, adapter, x)
    if plan.layers is None:
        return None
    layers = plan.layers[:count]
    try:
        parameters = [t for layer in layers for t in layer.tensors()]
        if not _KINDS.issuperset(map(type, parameters)):
            return None
        shapes = tuple([layer.shape for layer in layers])
        return compute_layers(x[0].contiguous(), packing, parameters, shapes)
    except (NotPlainError, RuntimeError):
        # A parameter may have another shape or dtype now. What else is wrong, each layer tells.
        _stacks.pop(stack, None)
        return None


def _plan(layers: nn.ModuleList, adapter: LayerAdapter, x: Tensor) -> _StackPlan:
    snapshot = Snapshot((layers,), adapter.attributes)
    try:
        return _StackPlan(snapshot, plan_layers(layers, adapter, x))
    except NotPlainError:
        return _StackPlan(snapshot, None)


def plan_layers(
    layers: Iterable[nn.Module], adapter: LayerAdapter, x: Tensor
) -> tuple[LayerPlan, ...]:
    """Returns how operators compute layers of x without calling them.

    Raises:
        NotPlainError: one has to be called.
    """
    plans = []
    for layer in layers:
        ours = "_bert_unpad_stock" in vars(type(layer)) and plain_modules.untouched(layer)
        if not ours or not adapter.untouched(layer):
            raise NotPlainError("a layer is wrapped, has a hook, or is of another class")
        parts = adapter.parts(layer)
        if parts.attention.training or drops(parts):
            raise NotPlainError("a layer is being trained, or its dropout was replaced")
        plans.append(plan_layer(layer, adapter, parts, x))
    return tuple(plans)


def _rotary(layer: nn.Module, adapter: LayerAdapter) -> tuple[float, float]:
    try:
        return (adapter.rotary and adapter.rotary(layer)) or (0.0, 1.0)
    except ValueError as error:
        raise NotPlainError(str(error)) from None


def compute_around(
    bias: Bias, x: Tensor, parameters: list[Tensor], shape: LayerShape, packing: Packing
) -> Tensor:
    """A layer of x [T, hidden] as two operators around attention that counts distances."""
    heads = shape.heads
    qkv = encoder_project(x, parameters, shape)
    q, kv = qkv[:, :heads], qkv[:, heads:].unflatten(1, (2, -1))
    if packing.last is not None:
        q, x = (gather_rows(t, packing.last.positions) for t in (q, x))
    added = bias.of(q, kv[:, 0])
    if packing.last is None:
        attended = packing.attend(qkv, heads, 0.0, bias.scale, added)
    else:
        attended = packing.attend_last(q, kv, 0.0, bias.scale, added)
    return encoder_finish(x, attended, parameters, shape)


def drops(parts: LayerParts) -> bool:
    """Whether something in the place of dropout has to be called."""
    dropouts = (parts.attention_dropout, parts.ffn_inner_dropout, parts.ffn_dropout)
    return any(plain_modules.rate(dropout) != 0.0 for dropout in dropouts)


def plan_layer(layer: nn.Module, adapter: LayerAdapter, parts: LayerParts, x: Tensor) -> LayerPlan:
    """Returns how operators compute a layer of x.

    Raises:
        NotPlainError: they cannot.
    """
    activation = plain_modules.glu_kind(parts.ffn_activation)
    if activation is None:
        raise NotPlainError("its activation is none of GELU, SiLU and ReLU")
    ffn = _linears([module for module in (parts.ffn_in, parts.ffn_gate) if module is not None], x)
    projections = _linears([parts.query, parts.key, parts.value], x)
    out, last = (_linears([module], x)[0] for module in (parts.attention_out, parts.ffn_out))
    query, key, value, inner = (source.features() for source in (*projections, ffn[0]))
    if key != value:
        raise NotPlainError("its keys and values have different widths")
    places = (parts.first_norm, parts.attention_norm, parts.ffn_norm)
    norms = [_norm(module, x) for module in places]
    kinds = {norm.rms for norm in norms if norm is not None}
    if norms[1] is None or (parts.first_norm is None and norms[2] is None):
        raise NotPlainError("a norm was replaced by nothing")
    if len(kinds) != 1:
        raise NotPlainError("its norms are of several kinds")
    width = adapter.head_dim(layer)
    shape = LayerShape(
        *(query // width, key // width, width, inner, activation, kinds.pop()),
        norms_first=parts.first_norm is not None,
        eps=tuple(0.0 if norm is None else norm.eps for norm in norms),
        window=adapter.window(parts.attention),
        rotary=_rotary(layer, adapter),
    )
    gate = ffn[1] if len(ffn) > 1 else None
    normed = (
        None if norm is None or module is None else _Source(module)
        for module, norm in zip(places, norms, strict=True)
    )
    return LayerPlan(layer, (*projections, out, ffn[0], gate, last, *normed), shape)


def _linears(modules: list[nn.Module], x: Tensor) -> list[_Source]:
    """Where linear layers are; a module in all places holds their features side by side."""
    fused = len(modules) > 1 and all(module is modules[0] for module in modules)
    sources = []
    for index, module in enumerate(modules):
        found = plain_modules.linear_parameters(module, x)
        if found is None or not _are(module, found):
            raise NotPlainError(f"{type(module).__name__} is not a plain linear layer in {x.dtype}")
        source = _Source(module, index, len(modules)) if fused else _Source(module)
        rows, columns = source.features(), found[0].shape[1]
        if (
            not found[0].is_contiguous()
            or rows % FEATURES
            or columns % FEATURES
            or columns > LONGEST
        ):
            raise NotPlainError(
                f"a weight of {rows} and {columns} features is not contiguous with multiples of "
                f"{FEATURES}, at most {LONGEST} going in"
            )
        sources.append(source)
    return sources


def _norm(module: nn.Module | None, x: Tensor) -> plain_modules.NormParameters | None:
    if module is None or (type(module) is nn.Identity and plain_modules.untouched(module)):
        return None
    found = plain_modules.norm_of(module, x)
    if found is None or not _are(module, (found.weight, found.bias)):
        raise NotPlainError(f"{type(module).__name__} is not a plain norm in {x.dtype}")
    return found


def _are(module: nn.Module, tensors: tuple[Tensor, Tensor | None]) -> bool:
    """Whether these are the module's weight and bias themselves."""
    return all(module._parameters.get(n) is t for n, t in zip(_NAMES, tensors, strict=True))


def forget(module: nn.Module) -> None:
    """Drops what is kept of a layer or stack: weights are rounded again when they are needed."""
    _rounded.pop(module, None)
    _stacks.pop(module, None)


def _round(layer: nn.Module, name: str, given: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of a linear layer in `dtype`, rounded again if it was changed since.

    Raises:
        NotPlainError: this CPU does not multiply such numbers, or in 8 bits one is not finite.
    """
    weight = given.detach()
    version = 0 if weight.is_inference() else given._version
    sample = weight.view(-1)[:: max(1, weight.numel() // _SAMPLES)]
    kept = _rounded.setdefault(layer, {})
    found = kept.get(name)
    if (
        found is None
        or (found.address, found.version) != (weight.data_ptr(), version)
        or not torch.equal(found.sample, sample)
    ):
        try:
            packed = pack_weight(weight, dtype)
        except RuntimeError as error:
            raise NotPlainError(f"{name}: {error}") from None
        found = kept[name] = _Rounded(packed, weight.data_ptr(), version, sample.clone())
    return found.packed
