"""Model outputs whose logits are computed on first use.

A training step reads only the loss, and logits at all positions cost as much as several layers.
Reading them as an attribute, by key or index, or in a tuple computes them, in the stock shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers.utils import ModelOutput
else:
    ModelOutput = object


class LazyTensor:
    """A tensor of known dtype that is computed on first use.

    In training, frameworks that walk over a model's outputs (accelerate casts 16-bit ones to fp32)
    see this object, and a cast keeps it lazy. Any other use computes the tensor.
    """

    def __init__(
        self, compute: Callable[[], Tensor], dtype: torch.dtype, training: bool = True
    ) -> None:
        """Stores how to compute the tensor.

        Args:
            compute: computes the tensor.
            dtype: dtype of the tensor.
            training: whether walking over a model's outputs keeps this lazy. The Trainer's
                evaluation walks over outputs to find the logits, so there it should not.
        """
        self._value: Tensor | Callable[[], Tensor] = compute
        self.training = training
        self.dtype = dtype

    @property
    def computed(self) -> bool:
        """Whether the tensor has been computed."""
        return isinstance(self._value, Tensor)

    def get(self) -> Tensor:
        """Returns the tensor; computes it on first use."""
        if not isinstance(self._value, Tensor):
            self._value = self._value()
        return self._value

    def to(self, *args, **kwargs) -> LazyTensor | Tensor:
        """Converts as `Tensor.to` does; a cast to a dtype stays lazy."""
        if not self.computed and len(args) == 1 and isinstance(args[0], torch.dtype):
            return LazyTensor(lambda: self.get().to(args[0], **kwargs), args[0], self.training)
        return self.get().to(*args, **kwargs)

    def float(self) -> LazyTensor | Tensor:
        """Casts to float32, lazily."""
        return self.to(torch.float32)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_value":
            raise AttributeError(name)
        return getattr(self.get(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.get()[index]

    def __len__(self) -> int:
        return len(self.get())

    def __reduce__(self):
        return _identity, (self.get(),)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        given = torch.utils._pytree.tree_map(_computed, (args, kwargs or {}))
        return function(*given[0], **given[1])


def _computed(value: Any) -> Any:
    return value.get() if isinstance(value, LazyTensor) else value


def _walked(value: Any) -> Any:
    return value.get() if isinstance(value, LazyTensor) and not value.training else value


def _identity(value: Tensor) -> Tensor:
    return value


class _LazyFields(ModelOutput):
    """Mixin for a ModelOutput that returns tensors where it holds LazyTensors."""

    def __post_init__(self) -> None:
        # transformers 5.0 reads every field here; that must not compute them.
        vars(self)["_bert_unpad_raw"] = True
        super().__post_init__()
        del vars(self)["_bert_unpad_raw"]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if isinstance(value, LazyTensor) and "_bert_unpad_raw" not in vars(self):
            return value.get()
        return value

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            key = list(self.keys())[key]
        return _computed(super().__getitem__(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return _computed(super().get(key, default))

    def items(self):
        return [(name, _walked(value)) for name, value in super().items()]

    def values(self):
        return [_walked(value) for value in super().values()]

    def __reduce__(self):
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return functools.partial(type(self).__mro__[2], **fields), ()


@functools.cache
def lazy_output_class(stock: type) -> type:
    """Returns a subclass of the ModelOutput class `stock` that may hold LazyTensors."""
    return type(stock.__name__, (_LazyFields, stock), {"__module__": stock.__module__})
