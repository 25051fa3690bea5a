"""Apply a function to all tensors of a dataclass, for example to move them to another device."""

import dataclasses

from torch import Tensor


def tensor_fields(packed) -> tuple[str, ...]:
    """The names of the fields that are tensors."""
    fields = dataclasses.fields(packed)
    return tuple(f.name for f in fields if isinstance(getattr(packed, f.name), Tensor))


def map_tensors(packed, names, function):
    """Copies a dataclass with `function` applied to the named fields; keeps its cached values."""
    copy = dataclasses.replace(packed, **{name: function(getattr(packed, name)) for name in names})
    cached = {"groups", "group_sizes"} & vars(packed).keys()
    vars(copy).update({name: vars(packed)[name] for name in cached})
    return copy
