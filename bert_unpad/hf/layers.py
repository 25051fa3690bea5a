"""One transformer layer on packed tokens, built from the modules of Hugging Face's layer.

The class of a stock layer is swapped for a subclass that inherits from `PackedLayer` first. Called
with a packing, it computes [1, T, hidden] with our operators; without one it is the stock layer. It
is called through `__call__`, so gradient checkpointing, FSDP and users' hooks on the layer work.
With a packing whose `last` names rows, a layer computes queries, and everything after attention,
for these rows only. `PackedStack` passes such a packing to the last layer and to no other: what a
layer computes follows from its arguments, so layers may be wrapped, compiled, or shared.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from bert_unpad import ops
from bert_unpad.batch.rows import gather_rows
from bert_unpad.hf import inference, plain_modules
from bert_unpad.hf.frozen_layers import FrozenLayers
from bert_unpad.hf.layer_parts import LayerAdapter, LayerParts
from bert_unpad.hf.packing import Packing


def compute(
    layer: nn.Module, adapter: LayerAdapter, x: Tensor, packing: Packing, shared: Any = None
) -> Tensor:
    """Computes a layer of packed tokens x [1, T, hidden], or of the rows of `packing.last`.

    Under autocast what the halves add has its dtype; so has their sum, unless norms come before the
    halves, where the sum keeps that of x. `shared` is what `Distances.shared` gives.
    """
    parts, device = adapter.parts(layer), x.device.type
    if (inferred := inference.infer(layer, adapter, parts, x, packing, shared)) is not None:
        return inferred
    narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if parts.first_norm is None:
        y = x = x.to(narrow)
    else:
        y = plain_modules.normalise(parts.first_norm, x).to(narrow)
    rows = None
    if packing.last is not None:
        rows = gather_rows(y[0], packing.last.positions)
        x = rows[None] if y is x else gather_rows(x[0], packing.last.positions)[None]
    attended = _attend(layer, adapter, parts, y[0], rows, packing, shared)
    y, bias = plain_modules.project(parts.attention_out, attended.flatten(1)[None])
    closing = parts.attention_norm, parts.attention_dropout
    if parts.first_norm is None:
        y = x = plain_modules.close_block(y, bias, x, *closing)
    else:
        y, x = plain_modules.add_and_normalise(y, bias, x, *closing)
    y = plain_modules.activated((parts.ffn_in, parts.ffn_gate), parts.ffn_activation, y)
    if parts.ffn_inner_dropout is not None:
        y = parts.ffn_inner_dropout(y)
    y, bias = plain_modules.project(parts.ffn_out, y)
    if parts.ffn_norm is None:
        return plain_modules.add(y, bias, x, parts.ffn_dropout)
    return plain_modules.close_block(y, bias, x, parts.ffn_norm, parts.ffn_dropout)


def _attend(
    layer: nn.Module,
    adapter: LayerAdapter,
    parts: LayerParts,
    x: Tensor,
    rows: Tensor | None,
    packing: Packing,
    shared: Any,
) -> Tensor:
    """Attention of all tokens x [T, hidden], or of `rows` [Q, hidden] over them: its heads."""
    attention, width = parts.attention, adapter.head_dim(layer)
    rate = parts.rate.p if isinstance(parts.rate, nn.Module) else parts.rate
    p = rate if attention.training else 0.0
    bias = None if adapter.distances is None else adapter.distances.bias(attention, shared)
    scale = None if bias is None else bias.scale
    if rows is not None:
        q = plain_modules.dense(parts.query, rows).unflatten(1, (-1, width))
        kv = plain_modules.project_side_by_side((parts.key, parts.value), x)
        kv = kv.unflatten(1, (2, -1, width))
        added = None if bias is None else bias.of(q, kv[:, 0])
        return packing.attend_last(q, kv, p, scale, added)
    qkv = plain_modules.project_side_by_side((parts.query, parts.key, parts.value), x)
    qkv = qkv.unflatten(1, (-1, width))
    groups = getattr(attention, "num_key_value_groups", 1)
    heads = qkv.shape[1] * groups // (groups + 2)
    rotated = heads + heads // groups
    if adapter.rotary is not None and (turn := adapter.rotary(layer)) is not None:
        qkv = ops.rotary_(
            qkv,
            packing.positions,  # type: ignore[arg-type]  # given, see `LayerAdapter.fits`
            heads=rotated,
            theta=turn.theta,
            position_scale=turn.scale,
        )
    added = None if bias is None else bias.of(qkv[:, :heads], qkv[:, heads:rotated])
    return packing.attend(qkv, heads, p, scale, added, adapter.window(attention))


if TYPE_CHECKING:

    class StockModule(nn.Module):
        """The class of transformers that comes after a mixin in the bases."""

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

        def forward(self, *args: Any, **kwargs: Any) -> Any: ...

else:
    StockModule = object


class PackedLayer(StockModule):
    """Mixin for the class of a stock layer; it comes first in the bases."""

    _bert_unpad_layer: LayerAdapter

    def forward(
        self,
        hidden_states: Tensor,
        *args,
        packing: Packing | None = None,
        shared: Any = None,
        **kwargs,
    ):
        """The stock forward; or with `packing`, and what `Distances.shared` gives, ours."""
        if not isinstance(packing, Packing):
            return super().forward(hidden_states, *args, **kwargs)
        return compute(self, self._bert_unpad_layer, hidden_states, packing, shared)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "bert_unpad")))


class PackedStack(StockModule):
    """Mixin for the class of the module that holds the layers; it comes first in the bases."""

    _bert_unpad_layer: LayerAdapter

    def forward(self, hidden_states: Tensor, *args, packing: Packing | None = None, **kwargs):
        if not isinstance(packing, Packing):
            return super().forward(hidden_states, *args, **kwargs)
        x, layers = hidden_states, list(self.layer)
        shared = self._bert_unpad_shared(x)
        last, whole = None, packing
        if packing.last is not None:
            last, whole = layers.pop(), dataclasses.replace(packing, last=None)
        inferred = inference.infer_layers(self, self._bert_unpad_layer, len(layers), x, whole)
        if inferred is not None:
            x = inferred
        else:
            for layer in layers:
                x = layer(x, packing=whole, shared=shared)
        if last is None:
            return BaseModelOutput(x, None)
        # The last layer's input serves to compute its other rows later.
        return BaseModelOutput(last(x, packing=packing, shared=shared), (x,))

    def _bert_unpad_complete(self, packing: Packing, before: Tensor, x: Tensor) -> Tensor:
        """Computes the last layer's output for all tokens, [1, T, hidden].

        Args:
            packing: whose `last` names rows.
            before: the last layer's input, [1, T, hidden].
            x: its output for these rows, [1, Q, hidden], which are kept. With dropout, the other
                rows have other masks.
        """
        assert packing.last is not None
        whole = dataclasses.replace(packing, last=None)
        rest = self.layer[-1](before, packing=whole, shared=self._bert_unpad_shared(before))
        return rest.index_copy(1, packing.last.positions, x)

    def _bert_unpad_shared(self, x: Tensor) -> Any:
        """What `Distances.shared` gives for hidden states x, or None. Frozen layers have it."""
        distances = self._bert_unpad_layer.distances
        if distances is None or isinstance(self.layer[0], FrozenLayers):
            return None
        return distances.shared(self, x)


# What torch.compile, checkpoint_wrapper and FSDP1 put around a module; its arguments pass through.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the module within wrappers of PyTorch, which pass all arguments on."""
    for name in _WRAPPERS:
        if (inner := module._modules.get(name)) is not None:
            return unwrap(inner)
    return module
