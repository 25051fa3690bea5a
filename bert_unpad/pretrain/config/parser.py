"""The command line's parser of a run's options, by jsonargparse."""

import argparse
import dataclasses
import functools
import typing

import jsonargparse

from bert_unpad.pretrain.config.options import find_options
from bert_unpad.pretrain.config.run import PretrainConfig

_SETTINGS = find_options(PretrainConfig)
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


@functools.cache
def make_parser(tiers: tuple[str, ...] = ("common", "advanced")) -> jsonargparse.ArgumentParser:
    """A parser of the options of some tiers, made once a process: that takes half a second."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    shown = [option for option in _SETTINGS if option.tier in tiers]
    hidden = sum(option.tier not in ("code_only", *tiers) for option in _SETTINGS)
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
    left_out = [option.name for option in _SETTINGS if option not in shown]
    parser.add_class_arguments(PretrainConfig, skip={*_SECTIONS, *left_out})
    for name, section in _SECTIONS.items():
        prefix = f"{name}."
        skip = {x.removeprefix(prefix) for x in left_out if x.startswith(prefix)}
        parser.add_class_arguments(section, name, skip=skip)
    return parser
