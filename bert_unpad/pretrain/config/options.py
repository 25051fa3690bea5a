"""The options of a run by name, and their types as errors describe them."""

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from bert_unpad._tiers import Tier, tier_of


@dataclass(frozen=True)
class Option:
    """One setting of a configuration."""

    name: str
    """`section.key`, or `key` of the top level."""
    type: Any
    """The annotation of its field."""
    tier: Tier
    """Where the command line shows it."""


def find_options(config: type, prefix: str = "") -> list[Option]:
    """All settings of a dataclass and of the dataclasses in it, in order."""
    found, hints = [], typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found += find_options(hint, f"{name}.")
        else:
            found.append(Option(name, hint, tier_of(field)))
    return found


_SINGLE = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_SINGLE |= {dict: "an object"}
_SEVERAL = {int: "integers", float: "numbers"}


def describe(hint: Any) -> str:
    """A type in words, as `expected ...` in an error."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(x) if x is not types.NoneType else "null" for x in arguments)
    if origin is list:
        return f"a list of {_SEVERAL[arguments[0]]}"
    if origin is tuple:
        return f"a list of {len(arguments)} {_SEVERAL[arguments[0]]}"
    return _SINGLE[origin or hint]
