"""Which options of `optimizer` its class takes, by its signature, and with which values."""

from __future__ import annotations

import inspect
from typing import Any

from bert_unpad.pretrain.config import ConfigError, OptimizerConfig
from bert_unpad.pretrain.update.kinds import Kind

__all__ = ["class_arguments"]

_NO_DEFAULT = (inspect.Parameter.empty, None)
_FORMS = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}  # a value of each option


def class_arguments(kind: Kind, config: OptimizerConfig) -> dict[str, Any]:
    """The arguments of the optimizer's class other than the parameters.

    An option that is not given takes the value of `kind.defaults`, or else of the signature. No
    option is passed on to a class that has no such argument, or one of another form (three betas).

    Raises:
        ConfigError: the class has no `lr`, or does not take an option that is given, or
            `optimizer.arguments` names what it does not take, or what has an option of its own.
    """
    signature = inspect.signature(kind.optimizer).parameters
    if "lr" not in signature:
        raise ConfigError(
            "optimizer.name",
            f"expected a class with an argument lr, which the schedule sets, got {config.name}",
        )
    arguments: dict[str, Any] = {"lr": config.lr}
    options = {"lr"}
    for name, form in _FORMS.items():
        given = getattr(config, name)
        if name in signature and _has_form(default := signature[name].default, form):
            options.add(name)
            value = kind.defaults.get(name, default) if given is None else given
            if value not in _NO_DEFAULT:
                arguments[name] = tuple(value) if isinstance(form, tuple) else value
        elif given is not None:
            problem = "has no such argument"
            if name in signature:
                problem = f"has {name}={signature[name].default!r} (see optimizer.arguments)"
            raise ConfigError(
                f"optimizer.{name}",
                f"expected null with optimizer.name {config.name}, whose class {problem}, got "
                f"{given}",
            )
    more = config.arguments or {}
    parameters = next(iter(signature))
    taken = {parameters, *options, *kind.arguments}
    known = [x for x, y in signature.items() if x not in taken and y.kind is not y.VAR_KEYWORD]
    takes_any = any(x.kind is x.VAR_KEYWORD for x in signature.values())
    for name in more:
        if name in options:
            raise ConfigError("optimizer.arguments", f"expected optimizer.{name}, got {name} here")
        if name not in known and (name in taken or not takes_any):
            raise ConfigError(
                "optimizer.arguments",
                f"expected arguments of {config.name} ({', '.join(known)}), got {name!r}",
            )
    return {**arguments, **kind.arguments, **more}


def _has_form(default: Any, form: Any) -> bool:
    """Whether an argument with this default takes values such as `form`."""
    if default in _NO_DEFAULT:
        return True
    if isinstance(form, tuple):
        return isinstance(default, tuple | list) and len(default) == len(form)
    return isinstance(default, int | float) and not isinstance(default, bool)
