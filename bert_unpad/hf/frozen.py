"""What `freeze` puts in the place of a model's layers and embeddings: constants, not parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bert_unpad.hf.fallback import recording_reason, stock_is_asked
from bert_unpad.hf.inference import LayerPlan, compute_around, compute_layers
from bert_unpad.hf.layer_parts import LayerAdapter
from bert_unpad.hf.models import wants_dict
from bert_unpad.hf.outputs import LazyTensor, lazy_output_class
from bert_unpad.hf.packing import Packing
from bert_unpad.hf.plain_modules import norm_of, unchanged, untouched
from bert_unpad.ops.encoder_layer import Affine, EncoderEmbeddings, encoder_model, pack_weight


class FrozenLayers(nn.Module):
    """All layers of a list, in the list's place: one operator, and no parameters."""

    def __init__(
        self, layers: nn.ModuleList, adapter: LayerAdapter, plans: tuple[LayerPlan, ...]
    ) -> None:
        super().__init__()
        self._layers = [[_packed(t.detach()) for t in plan.tensors()] for plan in plans]
        self.tensors = [t for layer in self._layers for t in layer]
        self.shapes = tuple(plan.shape for plan in plans)
        self._distances = adapter.distances
        # They are in no dictionary of modules, either.
        self._attentions = [adapter.parts(layer).attention for layer in layers if self._distances]
        # ModernBERT's model asks each layer which angles it takes; here they follow from positions.
        self.attention_type = getattr(layers[0], "attention_type", None)
        self.eval()

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        packing: Packing | None = None,
        shared: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Computes [1, T, hidden], or the rows of `packing.last`.

        Raises:
            ValueError: the stock modules were to compute this call; or not in float32.
        """
        if packing is None:
            raise ValueError("a frozen model has no stock modules: expected a call without them")
        if (
            self.training
            or hidden_states.dtype != torch.float32
            or torch.is_autocast_enabled("cpu")
        ):
            raise ValueError("a frozen model infers in float32: expected eval() and no autocast")
        x = hidden_states[0].contiguous()
        if self._distances is None:
            out = compute_layers(x, packing, self.tensors, self.shapes)
            assert out is not None  # `freeze` asks for exact angles
            return out
        whole, last = dataclasses.replace(packing, last=None), self._attentions[-1]
        for attention, tensors, shape in zip(
            self._attentions, self._layers, self.shapes, strict=True
        ):
            rows = packing if attention is last else whole
            x = compute_around(self._distances, attention, x, tensors, shape, rows, shared)
        return x[None]

    def _save_to_state_dict(self, *args: Any) -> None:
        raise ValueError("a frozen model cannot be saved: expected to be saved before `freeze`")

    @property
    def ready(self) -> bool:
        """Whether nothing asks for more than to infer in float32."""
        return not self.training and not torch.is_autocast_enabled("cpu")

    @property
    def independent(self) -> bool:
        """Whether the layers need nothing but hidden states and positions."""
        return self._distances is None

    def extra_repr(self) -> str:
        return f"{len(self.shapes)} layers, bert_unpad"


def _packed(t: Tensor) -> Tensor:
    """A parameter in the order of the product, if it is a weight that has another one."""
    return pack_weight(t, torch.float32) if t.dim() == 2 else t


class WholeModel:
    """A frozen model from ids to hidden states as one operator, for calls that have no more."""

    def __init__(self, embeddings: EncoderEmbeddings, layers: FrozenLayers, output: type) -> None:
        self._embeddings, self._layers, self._output = embeddings, layers, output

    def __call__(self, model: Any, call: Mapping[str, Any], first_only: bool = False) -> Any:
        """Computes a call of the base model; None: it has more, or something is wrong with it.

        Args:
            model: the base model.
            call: its arguments by name.
            first_only: compute only the first column.
        """
        if any(x is not None and x is not False and n not in _SIMPLE for n, x in call.items()):
            return None
        ids: Any = call.get("input_ids")
        mask, types = call.get("attention_mask"), call.get("token_type_ids")
        config = model.config
        if (
            not _is_plain(ids, _IDS)
            or not (mask is None or _is_plain(mask, _MASKS))
            or not (types is None or _is_plain(types, _IDS))
            or config.output_attentions
            or config.output_hidden_states
            or torch.compiler.is_compiling()
            or recording_reason()
            or stock_is_asked()
            or not self._layers.ready
        ):
            return None
        try:
            x = encoder_model(
                ids,
                mask,
                types,
                self._embeddings,
                self._layers.tensors,
                self._layers.shapes,
                result="first" if first_only else "hidden",
                reads_first=model._bert_unpad_layout()[0],
            )
        except RuntimeError:
            return None
        x = x[:, None] if first_only else x
        kind, fields = self._output, {}
        if (pooler := model._modules.get("pooler")) is not None:
            # Embeddings by the mean never read it.
            fields["pooler_output"] = LazyTensor(lambda: pooler(x), x.dtype, training=False)
            kind = lazy_output_class(kind)
        out = kind(last_hidden_state=x, **fields)
        return out if wants_dict(model, dict(call)) else out.to_tuple()


_SIMPLE = ("input_ids", "attention_mask", "token_type_ids", "return_dict")
_IDS = (torch.int64,)
_MASKS = (torch.int64, torch.bool)


def _is_plain(t: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    return type(t) is Tensor and t.dim() == 2 and t.dtype in dtypes and t.is_contiguous()


def outer_parts(model: Any, paths: Mapping[str, str], counts_ids: bool) -> EncoderEmbeddings | None:
    """What is before and after the layers of a model; None if something there has to be called.

    Args:
        model: the base model.
        paths: of the modules, by the fields of `EncoderEmbeddings`; some models lack one.
        counts_ids: whether positions are counted from the ids that are not padding.
    """
    modules: dict[str, Any] = {name: _module(model, path) for name, path in paths.items()}
    parent: Any = model._modules.get("embeddings")
    tables = [modules.get(name) for name in ("word", "position", "token_type")]
    norms = [modules.get(name) for name in ("norm", "final_norm")]
    if "embeddings_project" in model._modules:
        return None
    if parent is not None:
        others = set(parent._modules.values()) - set(modules.values())
        if not unchanged(parent) or any(type(other) is not nn.Dropout for other in others):
            return None
    for table in filter(None, tables):
        if type(table) is not nn.Embedding or not untouched(table) or table.max_norm is not None:
            return None
    plain = [norm and norm_of(norm, norm.weight) for norm in norms]
    if [norm is None for norm in norms] != [norm is None for norm in plain]:
        return None
    word, position, types = (table and table.weight.detach() for table in tables)
    assert word is not None
    norm, final_norm = (norm and Affine(norm.weight.detach(), norm.bias) for norm in plain)
    eps, final_eps = (0.0 if norm is None else norm.eps for norm in plain)
    parts = EncoderEmbeddings(word, position, types, norm, final_norm, (eps, final_eps))
    if counts_ids:
        padding = parent.padding_idx
        parts = parts._replace(first_position=padding + 1, padding_id=padding)
    return parts


def _module(model: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = model
    for name in path.split("."):
        found = None if found is None else found._modules.get(name)
    return found
