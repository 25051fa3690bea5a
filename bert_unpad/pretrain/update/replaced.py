"""The options that a recipe gives for its own optimizer, where a run names another one."""

from __future__ import annotations

import logging

from bert_unpad.pretrain.config import Settings
from bert_unpad.pretrain.update.arguments import refused_options
from bert_unpad.pretrain.update.kinds import find_kind

__all__ = ["drop_refused"]

logger = logging.getLogger(__name__)

_OF_THE_CLASS = ("lr", "betas", "eps", "weight_decay", "arguments")


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
