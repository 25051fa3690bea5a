"""Tries an optimizer on a tiny model before training: what it cannot do ends the run at once.

Optimizers of the table are known to work. Of any other class a few updates run on the device of the
run, with made-up gradients. They show whether a step needs a closure or sparse gradients, whether
the optimizer continues with the same bits from a saved state, whether it leaves an update out where
it says that it reads `found_inf`, and, for `optimizer.shard`, whether the update of a parameter
depends on other parameters, and that of a part on other parts.
"""

from __future__ import annotations

import inspect
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.utils._pytree import tree_flatten

from bert_unpad.nn import BertConfig, BertForPreTraining
from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.pretrain.config import ConfigError, OptimizerConfig, PretrainConfig
from bert_unpad.pretrain.config.limits import MODELS_DIFFER
from bert_unpad.pretrain.update.arguments import class_arguments
from bert_unpad.pretrain.update.kinds import KINDS, Kind, find_kind
from bert_unpad.pretrain.update.optimizer import build_optimizer, leaves_out_on_device, set_lr
from bert_unpad.pretrain.update.state import (
    group_state,
    load_group_state,
    load_named_state,
    named_state,
)

__all__ = ["check_optimizer", "try_optimizer"]

_STEPS = 12  # updates before the state is saved, and as many after it
_ROUNDING = 1e-2  # of what a parameter moves; sums over a parameter change more than that
_SIZES = BertConfig(
    vocab_size=24,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=8,
)
_PLAIN = (Tensor, bool, int, float, str)


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
        ConfigError: there is no such optimizer, it does not take the options, or it cannot do what
            the run needs.
    """
    name = config.optimizer.name
    _check_overlap(config, device)
    if name in KINDS:
        _check_row(KINDS[name], config)
        return
    group_values = try_optimizer(config.optimizer, device)
    if config.comm.hook in MODELS_DIFFER and group_values:
        raise ConfigError(
            "comm.hook",
            f"expected another one with optimizer.name {name}, whose parameter groups hold numbers "
            f"({', '.join(group_values)}) that the ranks cannot average, got {config.comm.hook}",
        )
    if shares_state:
        _check_independence(config.optimizer, device)
    if cuts_parameters:
        _check_parts(config.optimizer, device)


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
    if config.comm.hook in MODELS_DIFFER and shares_work:
        raise ConfigError(
            "comm.hook",
            f"expected another one with optimizer.name {config.optimizer.name}, whose ranks share "
            'the work of an update (optimizer.arguments {"distributed": false} ends that), got '
            f"{config.comm.hook}",
        )


def try_optimizer(config: OptimizerConfig, device: torch.device) -> list[str]:
    """Runs an optimizer, saves it, loads it, and leaves an update out.

    Args:
        config: of the optimizer; its state is not shared out.
        device: to run on.

    Returns:
        The names of what it changes in the parameter groups other than counts.

    Raises:
        ConfigError: it cannot do that.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        one, other = _Trial(config, device), _Trial(config, device)
        one.run(range(_STEPS))
        other.load(one)
        found = one.saved()["groups"].values()
        for trial in (one, other):
            trial.run(range(_STEPS, 2 * _STEPS))
        if not one.is_equal(other):
            raise _refusal(
                "that continues with the same bits from its state and parameter groups",
                config.name,
                "other bits",
            )
        if leaves_out_on_device(one.optimizer):
            one.overflow()
            if not one.is_equal(other):
                raise _refusal(
                    "that leaves everything as it is where found_inf is set, as it says it does",
                    config.name,
                    "other weights or another state",
                )
    return sorted({x for group in found for x, y in group.items() if not isinstance(y, int | str)})


def _check_independence(config: OptimizerConfig, device: torch.device) -> None:
    """Checks that parameters are updated alike whichever others the optimizer has."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        whole = _Trial(config, device)
        whole.run(range(_STEPS))
        for half in range(2):
            part = _Trial(config, device, half)
            part.run(range(_STEPS))
            if not part.is_equal(whole):
                raise ConfigError(
                    "optimizer.shard",
                    f"expected none with optimizer.name {config.name}, whose updates of a "
                    f"parameter depend on other parameters, got {config.shard}",
                )


def _check_parts(config: OptimizerConfig, device: torch.device) -> None:
    """Checks that parts of a parameter are updated as they are in the whole, up to rounding."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        start, whole, cut = (_Trial(config, device) for _ in range(3))
        cut.cut()
        for trial in (whole, cut):
            trial.run(range(_STEPS))
    weights = (trial.model.parameters() for trial in (start, whole, cut))
    for before, want, got in zip(*weights, strict=True):
        moved = torch.linalg.vector_norm(want - before)
        if torch.linalg.vector_norm(got - want) > _ROUNDING * moved:
            raise ConfigError(
                "optimizer.shard",
                f"expected none, node, world or fsdp with optimizer.name {config.name}, whose "
                f"update of a part of a parameter depends on the rest of it, got {config.shard}",
            )


class _Trial:
    """An optimizer over a tiny model; the gradients are a function of the step.

    Args:
        config: of the optimizer.
        device: of the model.
        half: which parameters train, 0: those with an even number, 1: an odd one; None: all.
    """

    def __init__(
        self, config: OptimizerConfig, device: torch.device, half: int | None = None
    ) -> None:
        torch.manual_seed(0)
        self._name, self._lr = config.name, config.lr or 1e-3
        self.model = BertForPreTraining(_SIZES).to(device)
        for number, parameter in enumerate(self.model.parameters()):
            parameter.requires_grad_(half in (None, number % 2))
        self.optimizer = build_optimizer(self.model, config)
        self._parts: dict[Tensor, list[Tensor]] = {}
        self._check_arguments(config)
        if hasattr(self.optimizer, "eval"):
            raise _refusal("that needs no eval() before an evaluation", config.name, "eval()")

    def cut(self) -> None:
        """Lets the optimizer, before its first update, have two parts of each parameter instead."""
        for group in self.optimizer.param_groups:
            whole = group["params"]
            for parameter in whole:
                flat = parameter.detach().view(-1)
                middle = flat.numel() // 3
                self._parts[parameter] = [nn.Parameter(x) for x in (flat[:middle], flat[middle:])]
            group["params"] = [part for parameter in whole for part in self._parts[parameter]]
            if "stacked" in group:
                group["stacked"] = ()

    def run(self, steps: range) -> None:
        """Makes updates."""
        for step in steps:
            torch.manual_seed(step)
            for parameter in self.model.parameters():
                gradient = torch.randn(parameter.shape).to(parameter.device)
                parameter.grad = gradient if parameter.requires_grad else None
                if parts := self._parts.get(parameter):
                    gradients = gradient.view(-1).split([part.numel() for part in parts])
                    for part, its_gradient in zip(parts, gradients, strict=True):
                        part.grad = its_gradient if part.numel() else None
            set_lr(self.optimizer, self._lr / (1 + step))
            self._step()

    def overflow(self) -> None:
        """Makes an update that `found_inf` says to leave out."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, torch.inf)
        found = torch.ones((), device=parameter.device)
        self.optimizer.found_inf = found  # type: ignore[attr-defined]
        self._step()

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps of the optimizer; nothing is copied.

        Raises:
            ConfigError: that are objects which a checkpoint does not hold.
        """
        optimizer = self.optimizer
        state = {"state": named_state(self.model, optimizer), "groups": group_state(optimizer)}
        strange = [x for x in optimizer.state if not isinstance(x, Tensor)]
        strange += [
            y for x in state.values() for z in x.values() for y in z.values() if not _is_plain(y)
        ]
        if strange:
            raise _refusal(
                "whose state are tensors, numbers and text for each parameter",
                self._name,
                f"{type(strange[0]).__name__} in its state",
            )
        return state

    def load(self, other: _Trial) -> None:
        """Takes over weights and state as from a checkpoint."""
        self.model.load_state_dict(other.model.state_dict())
        flat, keys = flatten_state_dict(other.saved())
        loaded = unflatten_state_dict({x: _saved_and_loaded(y) for x, y in flat.items()}, keys)
        load_named_state(self.model, self.optimizer, loaded.get("state", {}))
        load_group_state(self.optimizer, loaded.get("groups", {}))

    def is_equal(self, other: _Trial) -> bool:
        """Whether the weights that this one trains, and their states, have the same bits."""
        trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        (mine, ours), (theirs, others) = (tree_flatten(x.values(trained)) for x in (self, other))
        return ours == others and all(map(_same_bits, mine, theirs))

    def values(self, names: list[str]) -> dict[str, Any]:
        """Weights, their states, and the parameter groups."""
        weights, saved = dict(self.model.named_parameters()), self.saved()
        state = {name: [weights[name], saved["state"].get(name)] for name in names}
        return {**state, **saved["groups"]}

    def _check_arguments(self, config: OptimizerConfig) -> None:
        """Checks that a class which takes any argument has done something with those it got."""
        known = {*inspect.signature(type(self.optimizer)).parameters, *self.optimizer.defaults}
        for name in config.arguments or {}:
            if name not in known:
                raise ConfigError(
                    "optimizer.arguments",
                    f"expected arguments that {config.name} reads, got {name!r}, which it ignores",
                )

    def _step(self) -> None:
        try:
            self.optimizer.step()
        except Exception as error:  # whatever the class raises
            raise _refusal(
                "whose step() takes dense gradients and no closure",
                self._name,
                f"{type(error).__name__}: {error}",
            ) from error


def _refusal(expected: str, name: str, got: str) -> ConfigError:
    return ConfigError("optimizer.name", f"expected one {expected}, got {name}: {got}")


def _is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold it, whose values are read without running code."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, _PLAIN)


def _saved_and_loaded(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _same_bits(one: Any, other: Any) -> bool:
    """Whether two values are the same; NaN is the same as NaN."""
    if not isinstance(one, Tensor):
        return type(one) is type(other) and one == other
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.allclose(
        one, other, rtol=0.0, atol=0.0, equal_nan=True
    )
