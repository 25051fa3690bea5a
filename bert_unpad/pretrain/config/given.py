"""What a command line and its YAML files set, by name, before anything checks the values.

So an option that does not exist is named in the same way wherever it is given.
"""

from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bert_unpad._files import read_regular
from bert_unpad.pretrain.config.errors import ConfigError

_FLAG = "print_config"  # has no value, or one after `=`


class Given(NamedTuple):
    """What one file, or one argument of the command line, sets."""

    values: dict[str, Any]
    """The values, by option."""
    in_file: bool
    """Whether it is a file."""


def read_given(arguments: Sequence[str], names: Collection[str]) -> list[Given]:
    """What a command line and the files that it names set, in order: later values win.

    Args:
        arguments: the command line.
        names: all options.

    Raises:
        ConfigError: an option does not exist, has no value, or a file is not a YAML file.
    """
    sections = {name.partition(".")[0] for name in names if "." in name}
    found = []
    for pairs, in_file in _sources(arguments, sections):
        values = {}
        for name, value in pairs:
            name = name.removesuffix("+")  # which adds to a list
            if name not in names:
                close = get_close_matches(name, names, n=1) or ["those of --help=advanced"]
                raise ConfigError(
                    name, f"expected an option such as {close[0]}, got an unknown one"
                )
            values[name] = value
        found.append(Given(values, in_file))
    return found


def _sources(
    arguments: Sequence[str], sections: Collection[str]
) -> Iterator[tuple[Iterator[tuple[str, Any]], bool]]:
    """The options of each argument or file, and whether it is a file."""
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or not name:
            raise ConfigError("command line", f"expected --section.key VALUE, got {argument!r}")
        if name == _FLAG:
            continue
        if not equals:
            if not rest:
                raise ConfigError(name, "expected a value, got none")
            value = rest.pop(0)
        if name == "config":
            yield _flat(_load_file(value), "", sections), True
        elif name in sections:
            in_file = Path(value).is_file()
            content = _load_file(value, name) if in_file else _load(value, name)
            yield _flat({name: content}, "", sections), in_file
        else:
            yield iter([(name, value)]), False


def _flat(values: Any, prefix: str, sections: Collection[str]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name not in sections:
            yield name, value
        elif isinstance(value, dict):
            yield from _flat(value, f"{name}.", sections)
        else:
            raise ConfigError(name, f"expected options of this section, got {value!r}")


def _load_file(path: str, name: str = "config") -> Any:
    try:
        text = read_regular(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(name, f"expected a YAML file in UTF-8, got bytes: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(name, f"expected a YAML file, got {path!r}: {error}") from error
    return _load(text, name)


def _load(text: str, name: str) -> Any:
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(name, f"expected YAML, got an error: {problem}") from error
    if not isinstance(values, dict | None):
        raise ConfigError(name, f"expected options in YAML, got {values!r}")
    return values or {}
