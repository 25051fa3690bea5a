"""The optimizers that `optimizer.name` can name: one row of a table each, or any class by its path.

To add one: its name in `bert_unpad._choices.OptimizerName` (in `COMMUNICATING` too if it averages
over the ranks by itself), a row in `KINDS`, and what it does not go with in `config/limits.py`. For
`python -m bert_unpad.plan` to know what it costs, also a row in `bert_unpad/costs/optimizers.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bert_unpad._choices import COMMUNICATING
from bert_unpad._import_path import path_of, resolve
from bert_unpad.optim import (
    FusedAdam,
    FusedLAMB,
    FusedStableAdamW,
    Muon,
    OneBitAdam,
    OneBitLAMB,
    decay_groups,
    muon_groups,
)
from bert_unpad.pretrain.config import ConfigError

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Kind:
    """How an optimizer is made, and what it can do."""

    entry: type[torch.optim.Optimizer] | str
    """The class, or the import path of one that only its runs import."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the name stands for; no option changes them."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of options that are not given, in place of the signature's defaults."""
    groups: Callable[[nn.Module, float], Groups] = decay_groups
    """Parameter groups of a model, from its weight decay."""
    shares_work: bool = False
    """Whether ranks meet in its step to share the work, unless its argument `distributed` is False.
    All must then have the same gradients."""
    shared_layout: str | None = None
    """Name of the layout of its state, where several kinds load each other's."""

    @property
    def optimizer(self) -> type[torch.optim.Optimizer]:
        """The class. The options that are passed on are those its signature has."""
        return resolve(self.entry)

    @property
    def layout(self) -> str:
        """Name of the layout of its state; by default the class's own."""
        return self.shared_layout or path_of(self.entry)


# The comm hook sets comm.start.
_ONE_BIT = {"freeze_step": 1, "group": None}
_OURS = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}
_UNCLIPPED = {"max_grad_norm": None}  # which `clip` does
_ADAM: dict[str, Any] = {"shared_layout": "adam"}

KINDS: dict[str, Kind] = {
    "adamw": Kind(torch.optim.AdamW, {"fused": True}, _OURS, **_ADAM),
    "fused_adam": Kind(FusedAdam, {}, _OURS, **_ADAM),
    "lamb": Kind(FusedLAMB, _UNCLIPPED | {"nesterov": False}, _OURS, **_ADAM),
    "lans": Kind(FusedLAMB, _UNCLIPPED | {"nesterov": True}, _OURS, **_ADAM),
    "stable_adamw": Kind(FusedStableAdamW, {}, _OURS, **_ADAM),
    "muon": Kind(Muon, {}, _OURS, muon_groups, shares_work=True),
    "mt_dao": Kind(
        "bert_unpad.experimental.mt_dao.MTDAO",
        {"start": 0, "group": None},  # the comm hook sets comm.start
        _OURS | {"betas": (0.999, 0.999)},
    ),
    "onebit_adam": Kind(OneBitAdam, _ONE_BIT, _OURS),
    "onebit_lamb": Kind(OneBitLAMB, _ONE_BIT, _OURS),
    "zero_one_adam": Kind("bert_unpad.experimental.zero_one_adam.ZeroOneAdam", _ONE_BIT, _OURS),
}


def find_kind(name: str) -> Kind:
    """The row of a name, or a row for the class that an import path leads to.

    Raises:
        ConfigError: there is no such name, module or class, or the class is served by its name
            only.
    """
    if name in KINDS:
        return KINDS[name]
    try:
        found = resolve(name) if name.rpartition(".")[0] else None
    except Exception as error:  # whatever the module raises while it is imported
        raise _unknown(f"{name!r}: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise _unknown(repr(name))
    bases = set(map(path_of, found.__mro__))
    for entry, row in KINDS.items():
        meets = entry in COMMUNICATING or row.shares_work
        if meets and path_of(row.entry) in bases:
            raise ConfigError(
                "optimizer.name",
                f"expected {entry}: ranks meet in its step, for which the trainer makes ready by "
                f"that name only, got {name!r}",
            )
    return Kind(found)


def _unknown(got: str) -> ConfigError:
    return ConfigError(
        "optimizer.name",
        f"expected one of {', '.join(KINDS)}, or the import path of an optimizer's class such as "
        f"torch.optim.SGD, got {got}",
    )
