"""Reads a configuration from YAML files and the command line, and writes the pages of help.

Only this needs jsonargparse, so `make_parser` is imported where a command line is read: the other
parts of the trainer work without.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

from bert_unpad.pretrain.config.errors import ConfigError
from bert_unpad.pretrain.config.given import read_given
from bert_unpad.pretrain.config.options import describe, find_options
from bert_unpad.pretrain.config.run import PretrainConfig

__all__ = ["read_config"]

_OPTIONS = {s.name: s for s in find_options(PretrainConfig) if s.tier != "code_only"}


def read_config(arguments: Sequence[str] | None = None) -> tuple[PretrainConfig, str]:
    """Reads `--config FILE` and `--section.key VALUE`, the later ones winning.

    Args:
        arguments: the command line, by default the process's own.

    Returns:
        The configuration, and the same in full as YAML.

    Raises:
        ConfigError: an option does not exist, has the wrong type or is out of range, or options
            contradict each other.
        SystemExit: (code 0) help or the configuration was asked for, and is printed.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _show_help(arguments)
    try:
        return _read(arguments)
    except RecursionError as error:
        raise ConfigError(
            "config", "expected values in a few levels, got some nested hundreds of levels deep"
        ) from error


def _read(arguments: list[str]) -> tuple[PretrainConfig, str]:
    from bert_unpad.pretrain.config.parser import make_parser

    given = read_given(arguments, _OPTIONS)
    parser = make_parser()
    try:
        parsed = parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise _explain(str(error), given) from error
    except OverflowError as error:  # of an integer of some 300 digits
        raise ConfigError(
            "config", f"expected numbers of 64 bits, got a larger one: {error}"
        ) from error
    del parsed["config"]
    try:
        text = parser.dump(parsed)
    except ValueError as error:  # it takes what is nested for a value of the wrong type
        raise RecursionError(str(error)) from error
    try:
        fields = parser.instantiate(parsed)
    except ValueError as error:  # DataConfig checks itself; its message begins with the field
        name, _, message = str(error).partition(": ")
        raise ConfigError(f"data.{name}", message) from error
    config = PretrainConfig(**vars(fields))
    config.validate()
    return config, text


def _show_help(arguments: Sequence[str]) -> None:
    """Prints a page of help and ends the process, if one is asked for."""
    from bert_unpad.pretrain.config.parser import make_parser

    for place, argument in enumerate(arguments):
        flag, _, page = argument.partition("=")
        if flag not in ("-h", "--help"):
            continue
        page = page or "".join(arguments[place + 1 : place + 2])
        make_parser(("common", "advanced") if page == "advanced" else ("common",)).print_help()
        raise SystemExit(0)


def _explain(message: str, given: dict[str, Any]) -> ConfigError:
    """The parser's error about an option's value, in the words of all errors."""
    found = re.search(r'^(?:Parser key "|argument --)([\w.]+)', message)
    if found is None or found[1] not in given:
        return ConfigError("config", message)
    name = found[1]
    return ConfigError(name, f"expected {describe(_OPTIONS[name].type)}, got {given[name]!r}")
