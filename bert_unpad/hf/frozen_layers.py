"""Layers of a frozen model: constants, and one operator."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from bert_unpad.hf.inference import LayerPlan, compute_around, compute_layers
from bert_unpad.hf.layer_parts import LayerAdapter
from bert_unpad.hf.packing import Packing
from bert_unpad.hf.relative import Bias
from bert_unpad.ops.encoder_layer import pack_weight


class FrozenLayers(nn.Module):
    """All layers of a list, in the list's place: one operator, and no parameters."""

    def __init__(
        self,
        stack: nn.Module,
        layers: nn.ModuleList,
        adapter: LayerAdapter,
        plans: tuple[LayerPlan, ...],
    ) -> None:
        super().__init__()
        self.tensors = [_packed(t.detach()) for plan in plans for t in plan.tensors()]
        self.shapes = tuple(plan.shape for plan in plans)
        self.biases: list[Bias] = []
        if (distances := adapter.distances) is not None:
            with torch.no_grad():
                shared = distances.shared(stack, self.tensors[0])
                attentions = [adapter.parts(layer).attention for layer in layers]
                self.biases = [distances.bias(each, shared) for each in attentions]
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
        if hidden_states.dtype != torch.float32 or not self.ready:
            raise ValueError("a frozen model infers in float32: expected eval() and no autocast")
        x = hidden_states[0].contiguous()
        if not self.biases:
            out = compute_layers(x, packing, self.tensors, self.shapes)
            assert out is not None  # `freeze` asks for exact angles
            return out
        whole, count = dataclasses.replace(packing, last=None), len(self.shapes)
        each = len(self.tensors) // count
        for i, (bias, shape) in enumerate(zip(self.biases, self.shapes, strict=True)):
            tensors = self.tensors[i * each : (i + 1) * each]
            x = compute_around(bias, x, tensors, shape, packing if i + 1 == count else whole)
        return x[None]

    def _save_to_state_dict(self, *args: Any) -> None:
        raise ValueError("a frozen model cannot be saved: expected to be saved before `freeze`")

    def _load_from_state_dict(self, *args: Any) -> None:
        raise ValueError("a frozen model cannot be loaded: expected to be loaded before `freeze`")

    @property
    def ready(self) -> bool:
        """Whether nothing asks for more than to infer in float32."""
        return not self.training and not torch.is_autocast_enabled("cpu")

    def extra_repr(self) -> str:
        return f"{len(self.shapes)} layers, bert_unpad"


def _packed(t: Tensor) -> Tensor:
    """A parameter in the order of the product, if it is a weight that has another one."""
    return pack_weight(t, torch.float32) if t.dim() == 2 else t
