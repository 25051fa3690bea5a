"""Marks fields of settings by where the command line shows them.

A field without a mark is a common option, which `--help` lists. `advanced` is for options that only
`--help=advanced` lists, `code_only` for settings that are no options: code sets them.
"""

import dataclasses
from typing import Any, Literal

Tier = Literal["common", "advanced", "code_only"]


def advanced(default: Any) -> Any:
    """A field that is an option of the second page of help."""
    return dataclasses.field(default=default, metadata={"tier": "advanced"})


def code_only(default: Any) -> Any:
    """A field that is no option of the command line."""
    return dataclasses.field(default=default, metadata={"tier": "code_only"})


def tier_of(field: dataclasses.Field) -> Tier:
    """Where the command line shows a field of settings."""
    return field.metadata.get("tier", "common")
