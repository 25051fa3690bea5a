"""Which options of `optimizer` its class takes, by its signature, and with which values.

Of a file's options for another optimizer, those that it does not take are dropped.
"""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from bert_unpad.pretrain.config import ConfigError, OptimizerConfig, Settings
from bert_unpad.pretrain.update.kinds import Kind, find_kind

logger = logging.getLogger(__name__)

_NO_DEFAULT = (inspect.Parameter.empty, None)
_FORMS = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}  # a value of each option
_OF_THE_CLASS = ("lr", *_FORMS, "arguments")


def class_arguments(kind: Kind, config: OptimizerConfig) -> dict[str, Any]:
    """The arguments of the optimizer's class other than the parameters.

    An option that is not given takes the value of `kind.defaults`, or else of the signature. No
    option is passed on to a class that has no such argument, or one of another form (three betas).

    Raises:
        ConfigError: the class has no `lr`, or refuses what is given, see `refused_options`.
    """
    for error in refused_options(kind, config).values():
        raise error
    arguments: dict[str, Any] = {"lr": config.lr}
    for name, default in _options_of(kind, config).items():
        given = getattr(config, name)
        value = kind.defaults.get(name, default) if given is None else given
        if value not in _NO_DEFAULT:
            arguments[name] = tuple(value) if isinstance(_FORMS[name], tuple) else value
    return {**arguments, **kind.arguments, **(config.arguments or {})}


def refused_options(kind: Kind, config: OptimizerConfig) -> dict[str, ConfigError]:
    """What is given that the optimizer's class does not take, and why.

    Returns:
        The errors by option (`betas`), or by entry of `optimizer.arguments` (`arguments.momentum`).

    Raises:
        ConfigError: the class has no `lr`.
    """
    signature, options = _signature(kind), _options_of(kind, config)
    found = {}
    for name in _FORMS:
        given = getattr(config, name)
        if given is None or name in options:
            continue
        problem = "has no such argument"
        if name in signature:
            problem = f"has {name}={signature[name].default!r} (see optimizer.arguments)"
        found[name] = ConfigError(
            f"optimizer.{name}",
            f"expected null with optimizer.name {config.name}, whose class {problem}, got {given}",
        )
    parameters = next(iter(signature))
    taken = {parameters, "lr", *options, *kind.arguments}
    known = [x for x, y in signature.items() if x not in taken and y.kind is not y.VAR_KEYWORD]
    takes_any = any(x.kind is x.VAR_KEYWORD for x in signature.values())
    for name in config.arguments or {}:
        if name == "lr" or name in options:
            problem = f"expected optimizer.{name}, got {name} here"
        elif name not in known and (name in taken or not takes_any):
            problem = f"expected arguments of {config.name} ({', '.join(known)}), got {name!r}"
        else:
            continue
        found[f"arguments.{name}"] = ConfigError("optimizer.arguments", problem)
    return found


def _signature(kind: Kind) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.optimizer).parameters


def _options_of(kind: Kind, config: OptimizerConfig) -> dict[str, Any]:
    """The options besides `lr` that the class takes, and its defaults.

    Raises:
        ConfigError: it has no `lr`.
    """
    signature = _signature(kind)
    if "lr" not in signature:
        raise ConfigError(
            "optimizer.name",
            f"expected a class with an argument lr, which the schedule sets, got {config.name}",
        )
    defaults = {name: signature[name].default for name in _FORMS if name in signature}
    return {name: value for name, value in defaults.items() if _has_form(value, _FORMS[name])}


def _has_form(default: Any, form: Any) -> bool:
    """Whether an argument with this default takes values such as `form`."""
    if default in _NO_DEFAULT:
        return True
    if isinstance(form, tuple):
        return isinstance(default, tuple | list) and len(default) == len(form)
    return isinstance(default, int | float) and not isinstance(default, bool)


def drop_refused(settings: Settings) -> Settings:
    """Leaves out the options that a file gives for another optimizer and the run's does not take.

    One line of the log names them, and those that stay. Options of the command line, and those that
    a file gives for this optimizer, are left as they are.

    Raises:
        ConfigError: there is no such optimizer.
    """
    optimizer = settings.config.optimizer
    given = {
        key: value
        for key in _OF_THE_CLASS
        if key in settings.replaced and (value := getattr(optimizer, key)) is not None
    }
    if not given:
        return settings
    refused = refused_options(find_kind(optimizer.name), optimizer)
    entries = given.pop("arguments", {})
    given |= {f"arguments.{key}": value for key, value in entries.items()}
    dropped = {key: value for key, value in given.items() if key in refused}
    kept = {key: value for key, value in given.items() if key not in refused}
    logger.info(
        "optimizer.name %s replaces the file's %s. Options of the file that it does not take are "
        "dropped: %s. Kept: %s",
        optimizer.name,
        " and ".join(sorted({settings.replaced[key.partition(".")[0]] for key in given})),
        _listed(dropped),
        _listed(kept),
    )
    changes: dict[str, object] = dict.fromkeys(x for x in dropped if not x.startswith("arguments."))
    if entries:
        left = {key: value for key, value in entries.items() if f"arguments.{key}" in kept}
        changes["arguments"] = left or None
    return settings.with_optimizer(**changes)


def _listed(options: dict[str, object]) -> str:
    return ", ".join(f"optimizer.{key} {value}" for key, value in options.items()) or "nothing"
