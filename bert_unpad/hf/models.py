"""The base model (BertModel and similar models) on packed tokens.

The class of a stock model is swapped for a subclass that inherits from `PackedModel` first. Its
forward packs the tokens before the embeddings, runs the stock embeddings and the stock stack (whose
layers are `PackedLayer`s) on [1, T, ...], and pads once at the end. Calls that cannot be packed run
the stock forward with stock layers, and warn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bert_unpad import ops as _registers_operators  # noqa: F401
from bert_unpad.batch import VarlenBatch
from bert_unpad.batch.rows import gather_rows
from bert_unpad.hf.fallback import recording_reason, stock_is_asked, warn_stock
from bert_unpad.hf.layer_parts import LayerAdapter
from bert_unpad.hf.layers import PackedLayer, PackedStack, StockModule, unwrap
from bert_unpad.hf.packing import Packing, refuse_restarts
from bert_unpad.hf.verify import verify_once
from bert_unpad.ops.attention import HEAD_DIMS

STOCK = "stock"
"""A value of `packing` that runs the stock forward; the caller has warned already."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OPERATORS = ("varlen_attention", "dropout_add_layer_norm", "bias_gelu")
# Only the stock modules support these arguments, unless they are None or False.
_STOCK_ARGUMENTS = (
    "encoder_hidden_states",
    "encoder_attention_mask",
    "past_key_values",
    "use_cache",
    "head_mask",
    "cache",
)


@dataclass(frozen=True)
class ModelAdapter:
    """The differences between the base models of the families."""

    stack: str
    """The attribute that holds the layers' container."""
    output: type
    """The class of the output."""
    positions: str = "column"
    """How missing position ids are computed: from the "column", or from "ids" as in RoBERTa."""
    token_types: bool = True
    """Whether the embeddings take token_type_ids."""


def bind(names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a call by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _missing(key: str) -> str | None:
    for name in _OPERATORS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"bert_unpad::{name}", key):
            return f"bert_unpad.{name} has no {key} kernel in this installation"
    return None


# Computed once, at import, because torch.compile cannot trace it.
_MISSING = {"cpu": _missing("CPU"), "cuda": _missing("CUDA")}


def wants_dict(model: Any, call: dict[str, Any]) -> bool:
    """Takes `return_dict` out of a call, and returns whether the result is to be a dictionary."""
    given = call.pop("return_dict", None)
    return getattr(model.config, "return_dict", True) if given is None else given


def kind_reason(model: Any) -> str | None:
    """Returns why no model of this kind, dtype and device can be packed, or None."""
    config, weight = model.config, model.get_input_embeddings().weight
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return "it is a decoder"
    if weight.dtype not in _DTYPES:
        return f"its parameters are {weight.dtype}"
    device = weight.device.type
    if device == "meta":
        return None
    return _MISSING.get(device, f"there are no kernels for device {device}")


def width_reason(head_dim: int, device: str) -> str | None:
    """Returns why attention heads of this dimension cannot be packed on a type of device."""
    if head_dim in HEAD_DIMS.get(device, HEAD_DIMS["cpu"]):
        return None
    return f"attention heads of dimension {head_dim} are not supported on {device}"


def token_positions(
    embeddings: Any, counts_ids: bool, call: dict[str, Any], packing: Packing
) -> Tensor:
    """Returns the position ids [1, T] of packed tokens.

    Args:
        embeddings: of the model; with `counts_ids` like RoBERTa's.
        counts_ids: whether positions that are not given are counted from the ids that are not
            padding, instead of being the columns.
        call: the call, with position ids or without.
        packing: of the call.

    Raises:
        ValueError: the input is packed, and its positions are not counted like RoBERTa's. On a GPU
            and in a compiled model a RuntimeError.
    """
    ids, positions = call.get("input_ids"), call.get("position_ids")
    first = embeddings.padding_idx + 1 if counts_ids else 0
    if positions is None and counts_ids and ids is not None and not packing.given:
        real = (ids != embeddings.padding_idx).long()
        positions = real.cumsum(1) * real + embeddings.padding_idx
    if positions is None:
        return (packing.token_columns() + first)[None]
    if packing.given and counts_ids:
        message = (
            f"position_ids: expected positions from {first} on, as this model counts them, got "
            "lower ones; leave them out, or set the collator's position_ids_start"
        )
        fit = (positions >= first).all()
        if positions.is_cuda or torch.compiler.is_compiling():
            torch._assert_async(fit, message)
        elif not fit:
            raise ValueError(message)
    return positions if packing.given else packing.pack(positions.expand(packing.shape))


def static_reason(model: Any, adapter: ModelAdapter, layers: LayerAdapter) -> str | None:
    """Returns why no call of this model can be packed, or None.

    Its layers are those of the stock model, before or after the swap, maybe wrapped.
    """
    config = model.config
    if reason := kind_reason(model):
        return reason
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        return f"its position embeddings are {config.position_embedding_type}"
    if getattr(config, "pruned_heads", None):
        return "attention heads are pruned"
    device = model.get_input_embeddings().weight.device.type
    stack: Any = unwrap(getattr(model, adapter.stack))
    if len(stack.layer) == 0:
        return "it has no layers"
    if layers.distances is not None and (reason := layers.distances.reason(stack)):
        return reason
    for layer in map(unwrap, stack.layer):
        if reason := width_reason(layers.head_dim(layer), device):
            return reason
        if not layers.untouched(layer):
            return "a module inside its layers has a hook, or was replaced"
    return None


def _strange_part(model: PackedModel) -> str | None:
    """Returns why a call of this swapped model does not reach packed layers, or None."""
    stack = unwrap(getattr(model, model._bert_unpad_adapter.stack))
    if not isinstance(stack, PackedStack) or _has_own_forward(stack) or _has_own_forward(model):
        return "its stack of layers, or its forward function, was replaced after `unpad`"
    for index, layer in enumerate(stack.layer):
        inner = unwrap(layer)
        if not isinstance(inner, PackedLayer) or _has_own_forward(inner):
            return f"layer {index} was replaced by a {type(layer).__name__} of unknown effect"
    return None


def _has_own_forward(module: nn.Module) -> bool:
    """Whether the instance has a `forward` that does not lead to that of its class."""
    forward = module.__dict__.get("forward")
    while forward is not None:
        if getattr(forward, "__func__", None) is type(module).forward:
            return False
        forward = getattr(forward, "__wrapped__", None)
    return "forward" in module.__dict__


def first_is_read(model: Any) -> bool:
    """Whether something reads the first column of this base model's output."""
    return getattr(model, "pooler", None) is not None or getattr(
        model, "_bert_unpad_first_is_read", False
    )


class Packable(Protocol):
    """What `packing_or_reason` asks a swapped base model."""

    config: Any
    _bert_unpad_frozen: bool
    _bert_unpad_padded: tuple[str, ...]
    """Outputs that only the stock modules can give."""

    def _bert_unpad_reason(self, packed: bool) -> str | None:
        """Why this model cannot compute a call on packed tokens; packed: the caller's."""

    def _bert_unpad_layout(self) -> tuple[bool, bool]:
        """Whether its first column is read, and whether distances of its tokens count."""


def packing_or_reason(model: Packable, call: dict[str, Any]) -> Packing | str:
    """Returns the packing of a call, or why the stock modules have to run it.

    Raises:
        ValueError: the stock modules would have to run it, but the input is packed, of which they
            know nothing, or the model is frozen.
    """
    found = _packing_or_reason(model, call)
    if model._bert_unpad_frozen and isinstance(found, str):
        raise ValueError(f"{type(model).__name__}: frozen, and cannot compute a call where {found}")
    return found


def _packing_or_reason(model: Packable, call: dict[str, Any]) -> Packing | str:
    reason, packed = _stock_reason(model, call), call.get("cu_seq_lens_q") is not None
    if reason and packed:
        raise ValueError(
            f"{type(model).__name__}: packed input (cu_seq_lens_q) cannot be computed, because "
            f"{reason}; pass a padded batch"
        )
    if reason:
        return reason
    source = call.get("input_ids")
    source = call["inputs_embeds"] if source is None else source
    mask = call.get("attention_mask")
    if packed:
        return _given_packing(model, call, source)
    if mask is None:
        refuse_restarts(call.get("position_ids"), source.shape[0])
        return Packing.dense(source.shape[0], source.shape[1], source.device)
    try:
        packing = Packing.from_mask(mask, *model._bert_unpad_layout())
    except (TypeError, ValueError) as error:
        if torch.compiler.is_compiling():
            raise
        return str(error)
    return packing if packing.stock_reason is None else packing.stock_reason


def _stock_reason(model: Packable, call: dict[str, Any]) -> str | None:
    """Returns why the stock modules have to run a call, as far as shapes and options say."""
    config = model.config
    for name in model._bert_unpad_padded:
        asked = call.get(name)
        # Anything but False asks for them: 0 and [] are indices of hidden states.
        if asked is None:
            asked = getattr(config, name, False)
        if asked is not False:
            return f"{name} is asked for"
    for name in _STOCK_ARGUMENTS:
        value = call.get(name)
        if value is not None and value is not False:
            return f"{name} is given"
    if reason := recording_reason():
        return reason
    if reason := model._bert_unpad_reason(call.get("cu_seq_lens_q") is not None):
        return reason
    source = call.get("input_ids")
    source = call.get("inputs_embeds") if source is None else source
    if not isinstance(source, Tensor) or source.dim() < 2:
        return "there are no input_ids or inputs_embeds of shape [batch, tokens, ...]"
    if source.device.type == "meta":
        return "the input is on the meta device"
    mask = call.get("attention_mask")
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or tuple(mask.shape) != tuple(source.shape[:2]):
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        return f"attention_mask is {shape}, not [batch, tokens]"
    return None


def _given_packing(model: Packable, call: dict[str, Any], source: Tensor) -> Packing:
    """Returns the packing of a call with `cu_seq_lens_q`.

    Arguments that do not fit raise an error: the stock modules would compute wrong results.
    """
    if call.get("attention_mask") is not None:
        raise ValueError("attention_mask and cu_seq_lens_q: expected one of them, got both")
    if source.shape[0] != 1:
        raise ValueError(
            "input_ids: expected shape [1, tokens] of packed input (cu_seq_lens_q), "
            f"got {list(source.shape)}"
        )
    if getattr(model, "_bert_unpad_first_is_read", False):
        raise ValueError(
            "cu_seq_lens_q: expected none, because this model's head reads the rows of a padded "
            "batch, such as the first token of each; pass one"
        )
    keys = call.get("cu_seq_lens_k")
    cu_seqlens, longest = call["cu_seq_lens_q"], call.get("max_length_q")
    if keys is not None and keys is not cu_seqlens and keys.shape != cu_seqlens.shape:
        raise ValueError(
            "cu_seq_lens_k: expected the same as cu_seq_lens_q, as this is self-attention"
        )
    packing = Packing.from_cu_seqlens(cu_seqlens, longest, source.shape[1])
    if first_is_read(model) and isinstance(packing.batch, VarlenBatch):  # not in a compiled call
        lengths = packing.batch.lengths
        if bool((lengths == 0).any()):
            raise ValueError(
                "cu_seq_lens_q: expected no empty sequence, because the model reads first tokens"
            )
    return packing


def whole_output(model: Any, call: dict[str, Any], first_only: bool = False) -> Any:
    """A call of a frozen model by one operator, or None; see `WholeModel`."""
    whole = vars(model).get("_bert_unpad_whole")
    return None if whole is None else whole(model, call, first_only)


class Freezable(StockModule):
    """Mixin of what `freeze` changes in the class of a stock base model."""

    _bert_unpad_frozen: bool = False
    """Whether its layers are one module without parameters."""

    def _apply(self, fn: Callable[[Tensor], Tensor], *args, **kwargs):
        found = fn(torch.empty(0)) if self._bert_unpad_frozen else None
        if found is not None and (found.dtype != torch.float32 or not found.is_cpu):
            raise ValueError(
                f"{type(self).__name__}: frozen, and stays in float32 on a CPU, got {found.dtype} "
                f"on {found.device}"
            )
        return super()._apply(fn, *args, **kwargs)

    def _load_from_state_dict(self, *args) -> None:
        if self._bert_unpad_frozen:
            raise ValueError(f"{type(self).__name__}: frozen; expected to be loaded before")
        super()._load_from_state_dict(*args)


class PackedModel(Freezable):
    """Mixin for the class of a stock base model; it comes first in the bases."""

    _bert_unpad_adapter: ModelAdapter
    _bert_unpad_embeds: str
    """The argument of the embeddings that takes embedded tokens."""
    _bert_unpad_arguments: tuple[str, ...]
    _bert_unpad_layer: LayerAdapter
    _bert_unpad_padded: tuple[str, ...] = ("output_attentions", "output_hidden_states")

    def forward(
        self,
        *args,
        packing: Packing | str | None = None,
        first_only: bool = False,
        **kwargs,
    ):
        """The stock forward with two more arguments, which our heads pass.

        Args:
            packing: the packing that a head has computed; `last_hidden_state` is then packed.
            first_only: compute only the first column; `last_hidden_state` is [B, 1, hidden].
        """
        call = bind(self._bert_unpad_arguments, args, kwargs)
        if packing is STOCK or stock_is_asked():
            return super().forward(**call)
        keep_packed = packing is not None
        if packing is None:
            if (out := whole_output(self, call, first_only)) is not None:
                return out
            packing = packing_or_reason(self, call)
        if isinstance(packing, str):
            warn_stock(type(self).__name__, packing)
            return super().forward(**call)
        verify_once(self, call)
        if (call.get("input_ids") is None) == (call.get("inputs_embeds") is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if first_only:
            packing = packing.narrow(None, first=True)
        x = self._bert_unpad_embed(call, packing)
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        adapter = self._bert_unpad_adapter
        out = getattr(self, adapter.stack)(x, attention_mask=None, packing=packing)
        x = out.last_hidden_state
        # Only a head that passed the packing sees the last layer's input.
        fields = {"hidden_states": out.hidden_states} if keep_packed else {}
        if getattr(self, "pooler", None) is not None:
            # A compiled call cannot check for empty sequences. The first row of an empty sequence
            # is that of the next one, and then occurs twice.
            twice = packing.given and torch.compiler.is_compiling()
            rows = packing.first_rows()
            first = x[0].index_select(0, rows) if twice else gather_rows(x[0], rows)
            fields["pooler_output"] = self.pooler(first[:, None].to(dtype))
        if first_only:
            x = x[0][:, None].to(dtype)
        elif not keep_packed:
            x = packing.pad(x.to(dtype))
        out = adapter.output(last_hidden_state=x, **fields)
        return out if wants_dict(self, call) else out.to_tuple()

    def _bert_unpad_reason(self, packed: bool) -> str | None:
        if self._bert_unpad_frozen:
            return None
        adapter, layer = self._bert_unpad_adapter, self._bert_unpad_layer
        return _strange_part(self) or static_reason(self, adapter, layer)

    def _bert_unpad_layout(self) -> tuple[bool, bool]:
        return first_is_read(self), self._bert_unpad_layer.distances is not None

    def _bert_unpad_embed(self, call: dict[str, Any], packing: Packing) -> Tensor:
        """Computes the stock embeddings of the packed tokens, [1, T, hidden]."""
        adapter = self._bert_unpad_adapter
        ids, embeds = call.get("input_ids"), call.get("inputs_embeds")
        positions = call.get("position_ids")
        arguments = {}
        if adapter.token_types:
            arguments["token_type_ids"] = call.get("token_type_ids")
        if packing.columns is not None:
            counts_ids = adapter.positions == "ids"
            positions = token_positions(self.embeddings, counts_ids, call, packing)
            arguments = {
                name: None if value is None else packing.pack(value.expand(packing.shape))
                for name, value in arguments.items()
            }
            ids = None if ids is None else packing.pack(ids)
            embeds = None if embeds is None else packing.pack(embeds)
        arguments[self._bert_unpad_embeds] = embeds
        x = self.embeddings(input_ids=ids, position_ids=positions, **arguments)
        if hasattr(self, "embeddings_project"):
            x = self.embeddings_project(x)
        return x.reshape(1, -1, x.shape[-1])

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), "bert_unpad")))
