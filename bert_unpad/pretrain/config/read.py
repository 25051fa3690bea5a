"""Reads a configuration from YAML files and the command line, and writes the pages of help.

Only this needs jsonargparse, so `make_parser` is imported where a command line is read: the other
parts of the trainer work without.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from bert_unpad.pretrain.config.errors import ConfigError
from bert_unpad.pretrain.config.given import Given, read_given
from bert_unpad.pretrain.config.options import describe, find_options
from bert_unpad.pretrain.config.run import PretrainConfig
from bert_unpad.pretrain.config.update import OptimizerConfig

_OPTIONS = {s.name: s for s in find_options(PretrainConfig) if s.tier != "code_only"}


@dataclass(frozen=True)
class Settings:
    """What a command line and its files ask for."""

    config: PretrainConfig
    text: str
    """The configuration in full, as YAML."""
    replaced: Mapping[str, str]
    """Options of `optimizer`, without the section's name, that a file gives for another optimizer
    than that of the run, and the name of that other one."""

    def with_optimizer(self, **values: Any) -> Settings:
        """The same with other options of `optimizer`, which must be plain values or None."""
        optimizer = dataclasses.replace(self.config.optimizer, **values)
        full = yaml.safe_load(self.text)
        given = {**full["optimizer"], **values}.items()
        full["optimizer"] = {key: value for key, value in given if value is not None}
        text = yaml.safe_dump(full, default_flow_style=False, allow_unicode=True, sort_keys=False)
        config = dataclasses.replace(self.config, optimizer=optimizer)
        return dataclasses.replace(self, config=config, text=text)


def read_config(arguments: Sequence[str] | None = None) -> tuple[PretrainConfig, str]:
    """The configuration that `read_settings` reads, and the same in full as YAML."""
    settings = read_settings(arguments)
    return settings.config, settings.text


def read_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Reads `--config FILE` and `--section.key VALUE`, the later ones winning.

    Args:
        arguments: the command line, by default the process's own.

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


def _read(arguments: list[str]) -> Settings:
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
    return Settings(config, text, _replaced(given))


def _replaced(given: Sequence[Given]) -> dict[str, str]:
    """Options of `optimizer` that a file gives for another optimizer, and the name of that one.

    A file's options are for the optimizer that is named when the whole file is read.
    """
    name, meant = OptimizerConfig.name, {}
    for values, in_file in given:
        name = values.get("optimizer.name", name)
        for option in values:
            section, _, key = option.partition(".")
            if section == "optimizer":
                meant[key] = name if in_file else None
    return {key: other for key, other in meant.items() if other not in (None, name)}


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


def _explain(message: str, given: Sequence[Given]) -> ConfigError:
    """The parser's error about an option's value, in the words of all errors."""
    values = {name: value for one in given for name, value in one.values.items()}
    found = re.search(r'^(?:Parser key "|argument --)([\w.]+)', message)
    if found is None or found[1] not in values:
        return ConfigError("config", message)
    name = found[1]
    return ConfigError(name, f"expected {describe(_OPTIONS[name].type)}, got {values[name]!r}")
