"""Checks that a run can use its optimizer, by what its row of the table or its class declares.

A class that is named by its import path declares in `updates_by` what the update of a number reads
beside counts and the learning rate: "elements", itself; "parameters", the rest of its parameter
too; "sums", sums over that, which it adds up over the ranks that have parts of the parameter, as
subclasses of `bert_unpad.optim.base.FusedOptimizer` can. Without that it may read all of the model.
"""

import torch

from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.pretrain.config import ConfigError, PretrainConfig
from bert_unpad.pretrain.update.arguments import class_arguments
from bert_unpad.pretrain.update.kinds import KINDS, Kind, find_kind

_BY_ELEMENT = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam")
_TORCH = dict.fromkeys((*_BY_ELEMENT, "RMSprop", "Rprop", "SGD"), "elements")
_TORCH["Adafactor"] = "parameters"
"""`updates_by` of PyTorch's classes."""
_TAKE_PARTS = ("elements", "sums")
"""`updates_by` of classes that can update parts of parameters."""


def check_optimizer(
    config: PretrainConfig,
    device: torch.device,
    *,
    shares_state: bool = False,
    cuts_parameters: bool = False,
) -> None:
    """Checks that a run can use its optimizer.

    Args:
        config: of the run.
        device: of the model.
        shares_state: whether ranks keep the state of some parameters each.
        cuts_parameters: whether a rank updates parts of parameters.

    Raises:
        ConfigError: there is no such optimizer, it does not take the options, or it does not
            declare what the run needs.
    """
    name, shard, hook = config.optimizer.name, config.optimizer.shard, config.comm.hook
    _check_overlap(config, device)
    kind = find_kind(name)
    class_arguments(kind, config.optimizer)
    if name in KINDS:
        _check_row(kind, config)
        return
    made = kind.optimizer
    if hasattr(made, "eval"):
        raise ConfigError(
            "optimizer.name",
            f"expected one that needs no eval() before an evaluation, got {name}",
        )
    declared = getattr(made, "updates_by", None)
    if declared is None and made is getattr(torch.optim, made.__name__, None):
        declared = _TORCH.get(made.__name__)
    given = f"optimizer.name {name}, whose class has updates_by {declared!r}"
    if declared not in (*_TAKE_PARTS, "parameters", None):
        raise ConfigError(
            "optimizer.name",
            "expected a class with updates_by 'elements', 'sums' or 'parameters', got "
            f"{declared!r} of {name}",
        )
    if shares_state and declared is None:
        raise ConfigError("optimizer.shard", f"expected none with {given}, got {shard}")
    if cuts_parameters and declared not in _TAKE_PARTS:
        expected = "expected none, node, world or fsdp"
        raise ConfigError("optimizer.shard", f"{expected} with {given}, got {shard}")
    if config.comm.models_differ and declared is None:
        raise ConfigError("comm.hook", f"expected another one with {given}, got {hook}")


def _check_overlap(config: PretrainConfig, device: torch.device) -> None:
    """Checks that updates can be made beside the next forward pass, if they are to be."""
    if not config.optimizer.overlap:
        return
    name = config.optimizer.name
    made = find_kind(name).optimizer
    in_chunks = issubclass(made, FusedOptimizer) and made.takes_chunks
    refused = {
        f"device {device.type}, which has no streams": device.type != "cuda",
        f"optimizer.name {name}, which does not update one layer after another (fused_adam, lamb, "
        "lans and stable_adamw do)": not in_chunks,
    }
    for given, wrong in refused.items():
        if wrong:
            raise ConfigError("optimizer.overlap", f"expected false with {given}, got true")


def _check_row(kind: Kind, config: PretrainConfig) -> None:
    """Checks what a row of the table says that its optimizer can do."""
    arguments = class_arguments(kind, config.optimizer)
    shares_work = kind.shares_work and arguments.get("distributed", True)
    if config.comm.models_differ and shares_work:
        raise ConfigError(
            "comm.hook",
            f"expected another one with optimizer.name {config.optimizer.name}, whose ranks share "
            'the work of an update (optimizer.arguments {"distributed": false} ends that), got '
            f"{config.comm.hook}",
        )
