"""Reads a configuration from YAML files and the command line, and writes the pages of help."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import typing
from collections.abc import Sequence
from typing import Any

import jsonargparse

from bert_unpad.pretrain.config.errors import ConfigError
from bert_unpad.pretrain.config.given import read_given
from bert_unpad.pretrain.config.options import describe, find_options
from bert_unpad.pretrain.config.run import PretrainConfig

__all__ = ["read_config"]

_SETTINGS = {setting.name: setting for setting in find_options(PretrainConfig)}
_OPTIONS = {name: s for name, s in _SETTINGS.items() if s.tier != "code_only"}
_SECTIONS = {
    name: section
    for name, section in typing.get_type_hints(PretrainConfig).items()
    if dataclasses.is_dataclass(section)
}


class _Formatter(jsonargparse.DefaultHelpFormatter):
    """Help without types and empty defaults, which texts describe, and without whole sections."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest not in _SECTIONS:
            super().add_argument(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = super()._get_help_string(action).replace("type: %(type)s, ", "")
        return text if action.default is not None else text.replace(" (default: %(default)s)", "")


def _parser(tiers: Sequence[str] = ("common", "advanced")) -> jsonargparse.ArgumentParser:
    """A parser of the options of some tiers."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    shown = [option for option in _SETTINGS.values() if option.tier in tiers]
    hidden = len(_OPTIONS) - len(shown)
    parser = jsonargparse.ArgumentParser(
        prog="pretrain.py",
        usage="%(prog)s [--config FILE] [--section.key VALUE ...]",
        description="Pretrains BERT on packed tokens; see configs/ for recipes.",
        epilog=f"{hidden} more options: --help=advanced" if hidden else None,
        formatter_class=_Formatter,
        exit_on_error=False,
        add_help=False,
    )
    parser.add_argument(
        *("-h", "--help"),
        action="store_true",
        default=argparse.SUPPRESS,
        help="Show the common options; --help=advanced shows all.",
    )
    parser.add_argument(
        "--config",
        action="config",
        metavar="FILE",
        help="YAML file with any of the options below. May be given several times; later files, "
        "and options, win.",
    )
    left_out = [option.name for option in _SETTINGS.values() if option not in shown]
    parser.add_class_arguments(PretrainConfig, skip={*_SECTIONS, *left_out})
    for name, section in _SECTIONS.items():
        prefix = f"{name}."
        skip = {x.removeprefix(prefix) for x in left_out if x.startswith(prefix)}
        parser.add_class_arguments(section, name, skip=skip)
    return parser


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
    given = read_given(arguments, _OPTIONS)
    parser = _parser()
    try:
        parsed = parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        raise _explain(str(error), given) from error
    except OverflowError as error:  # of an integer of some 300 digits
        raise ConfigError(
            "config", f"expected numbers of 64 bits, got a larger one: {error}"
        ) from error
    del parsed["config"]
    text = parser.dump(parsed)
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
    for place, argument in enumerate(arguments):
        flag, _, page = argument.partition("=")
        if flag not in ("-h", "--help"):
            continue
        page = page or "".join(arguments[place + 1 : place + 2])
        _parser(("common", "advanced") if page == "advanced" else ("common",)).print_help()
        raise SystemExit(0)


def _explain(message: str, given: dict[str, Any]) -> ConfigError:
    """The parser's error about an option's value, in the words of all errors."""
    found = re.search(r'^(?:Parser key "|argument --)([\w.]+)', message)
    if found is None or found[1] not in given:
        return ConfigError("config", message)
    name = found[1]
    return ConfigError(name, f"expected {describe(_OPTIONS[name].type)}, got {given[name]!r}")
