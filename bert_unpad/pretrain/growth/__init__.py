"""Schedules of what trains when, and what they are made of.

A new one is a function `(GrowthConfig, Setting) -> Growth` in `schedules.py`. Add its
name to `SCHEDULES` and to `GrowthConfig.name`, and to `LIMITS` in config/limits.py the options that
it reads and what it does not go with.
"""

from collections.abc import Callable

from bert_unpad._import_path import resolve
from bert_unpad.pretrain.config import GrowthConfig
from bert_unpad.pretrain.growth.grow import add_layers, cut_layers, freeze
from bert_unpad.pretrain.growth.schedules import lengths, mslt, none, stacking
from bert_unpad.pretrain.growth.stage import Growth, Setting, Stage

__all__ = [
    "SCHEDULES",
    "Growth",
    "Setting",
    "Stage",
    "add_layers",
    "cut_layers",
    "freeze",
    "make_growth",
]


SCHEDULES: dict[str, Callable[[GrowthConfig, Setting], Growth] | str] = {
    "none": none,
    "mslt": mslt,
    "stacking": stacking,
    "layer_drop": "bert_unpad.experimental.layer_drop.layer_drop",
    "lengths": lengths,
}


def make_growth(config: GrowthConfig, setting: Setting) -> Growth:
    """The schedule that the configuration names.

    Raises:
        ConfigError: it does not fit the model, the data or the number of updates.
    """
    return resolve(SCHEDULES[config.name])(config, setting)
