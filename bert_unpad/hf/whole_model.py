"""A frozen model from ids to hidden states, as one operator."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bert_unpad.hf.fallback import recording_reason, stock_is_asked
from bert_unpad.hf.frozen_layers import FrozenLayers
from bert_unpad.hf.models import wants_dict
from bert_unpad.hf.outputs import LazyTensor, lazy_output_class
from bert_unpad.hf.plain_modules import norm_of, rate, unchanged
from bert_unpad.hf.snapshot import Snapshot
from bert_unpad.ops.encoder_layer import Affine, EncoderEmbeddings, encoder_model


class _Outer(NamedTuple):
    """The modules around the layers of a frozen model, and the layers."""

    layers: FrozenLayers
    modules: Mapping[str, Any]
    """Those with parameters, named like the fields of `EncoderEmbeddings`."""
    numbers: Mapping[str, Any]
    """The fields of `EncoderEmbeddings` that are no tensors."""

    def embeddings(self) -> EncoderEmbeddings:
        """Returns the parameters as they are now."""
        found: dict[str, Any] = dict.fromkeys(("position", "token_type", "norm", "final_norm"))
        for name, module in self.modules.items():
            weight, bias = map(module._parameters.get, ("weight", "bias"))
            found[name] = Affine(weight, bias) if name in ("norm", "final_norm") else weight
        return EncoderEmbeddings(**found, **self.numbers)


class WholeModel:
    """A frozen model from ids to hidden states as one operator, for calls that have no more."""

    def __init__(self, paths: Mapping[str, str], counts_ids: bool, output: type) -> None:
        """Stores how to find the modules.

        Args:
            paths: of those around the layers, by the fields of `EncoderEmbeddings`; some models
                lack one.
            counts_ids: whether positions are counted from the ids that are not padding.
            output: the class of the model's output.
        """
        self._paths, self._counts_ids, self._output = paths, counts_ids, output
        self._read: tuple[Snapshot, _Outer | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy looks at its own modules.
        return vars(self) | {"_read": None}

    def __call__(self, model: Any, call: Mapping[str, Any], first_only: bool = False) -> Any:
        """Computes a call of the base model; None: its modules have to.

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
            or (outer := self._outer(model)) is None
            or not outer.layers.ready
        ):
            return None
        embeddings = outer.embeddings()
        if torch.is_grad_enabled() and any(t.requires_grad for t in embeddings.tensors()):
            return None
        try:
            x = encoder_model(
                *(ids, mask, types, embeddings, outer.layers.tensors, outer.layers.shapes),
                result="first" if first_only else "hidden",
                reads_first=model._bert_unpad_layout()[0],
            )
        except RuntimeError:
            return None  # the modules say what is wrong, or compute what this operator cannot
        x = x[:, None] if first_only else x
        kind, fields = self._output, {}
        if (pooler := model._modules.get("pooler")) is not None:
            # Embeddings by the mean never read it.
            first, grad = x[:, :1].clone(), torch.is_grad_enabled()

            def pooled() -> Tensor:
                with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=False):
                    return pooler(first)

            fields["pooler_output"] = LazyTensor(pooled, x.dtype, training=False)
            kind = lazy_output_class(kind)
        out = kind(last_hidden_state=x, **fields)
        return out if wants_dict(model, dict(call)) else out.to_tuple()

    def _outer(self, model: Any) -> _Outer | None:
        """The modules of a model, read again where one was replaced or hooked since."""
        roots = [child for name, child in model._modules.items() if name != "pooler"]
        if self._read is None or not self._read[0].holds(roots):
            snapshot = Snapshot(roots, _ATTRIBUTES)
            found = None if snapshot.hooked else _find(model, roots, self._paths, self._counts_ids)
            self._read = snapshot, found
        return self._read[1]


_SIMPLE = ("input_ids", "attention_mask", "token_type_ids", "return_dict")
_IDS = (torch.int64,)
_MASKS = (torch.int64, torch.bool)
_ATTRIBUTES = ("training", "p", "eps", "variance_epsilon", "padding_idx", "max_norm")


def _is_plain(t: Any, dtypes: tuple[torch.dtype, ...]) -> bool:
    return type(t) is Tensor and t.dim() == 2 and t.dtype in dtypes and t.is_contiguous()


def _find(
    model: Any, roots: list[Any], paths: Mapping[str, str], counts_ids: bool
) -> _Outer | None:
    """What is around the layers of a model, none of which has a hook; None if one of them does more
    than `encoder_model`."""
    found: dict[str, Any] = {name: _module(model, path) for name, path in paths.items()}
    within = {module for root in roots for module in root.modules()}
    layers = [module for module in within if isinstance(module, FrozenLayers)]
    if len(layers) != 1 or layers[0].biases or found["word"] is None:
        return None
    for module in within - set(layers) - set(found.values()):
        kind = type(module)
        passes = kind is nn.ModuleList or (kind is not nn.Dropout and unchanged(module))
        if not passes and rate(module) != 0.0:
            return None
    for table in filter(None, map(found.get, ("word", "position", "token_type"))):
        weight = table._parameters.get("weight")
        plain = type(table) is nn.Embedding and type(weight) is nn.Parameter
        if not plain or not weight.is_contiguous() or table.max_norm is not None:
            return None
    eps, rms = [0.0, 0.0], layers[0].shapes[0].rms
    for i, name in enumerate(("norm", "final_norm")):
        if (module := found.get(name)) is not None:
            norm = norm_of(module, found["word"].weight)
            if norm is None or norm.rms != rms:
                return None
            eps[i] = norm.eps
    numbers: dict[str, Any] = {"eps": (eps[0], eps[1])}
    if counts_ids:
        padding = model._modules["embeddings"].padding_idx
        numbers |= {"first_position": padding + 1, "padding_id": padding}
    there = {name: module for name, module in found.items() if module is not None}
    return _Outer(layers[0], there, numbers)


def _module(model: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = model
    for name in path.split("."):
        found = None if found is None else found._modules.get(name)
    return found
