"""The state of any optimizer: what a checkpoint keeps of it, and what a later stage takes over.

Of each parameter, all that the optimizer has put into its `state`. Of the parameter groups, what
has changed since they were made, such as a count of steps; the rest is hyperparameters, which come
from the configuration. The learning rate is a function of the step.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

from bert_unpad.distributed import ShardedOptimizer
from bert_unpad.optim.parameter_lists import local as local_shard
from bert_unpad.pretrain.config import ConfigError

_PLAIN = (Tensor, bool, int, float, str, type(None))
# Groups as they were made, without their parameters.
_MADE: WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What holds the state that is on this rank, and the parameters it belongs to."""
    # ZeroRedundancyOptimizer and ShardedOptimizer have one.
    return getattr(optimizer, "optim", optimizer)


def check_state(optimizer: torch.optim.Optimizer) -> bool:
    """Checks that a checkpoint can hold the state on this rank, and be loaded without running code.

    Returns:
        Whether there is any, as there is none while updates are left out.

    Raises:
        ConfigError: it holds objects, or belongs to no parameter.
    """
    state = local_optimizer(optimizer).state
    strange: list[Any] = [key for key in state if not isinstance(key, Tensor)]
    leaves = tree_leaves([list(state.values()), group_state(optimizer)])
    strange += [leaf for leaf in leaves if not isinstance(leaf, _PLAIN)]
    if strange:
        raise ConfigError(
            "optimizer.name",
            "expected one whose state are tensors, numbers and text for each parameter, got "
            f"{type(strange[0]).__name__} in its state",
        )
    return bool(state)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state on this rank."""
    states = local_optimizer(optimizer).state.values()
    return sum(local_shard(v).nbytes for v in tree_leaves(list(states)) if isinstance(v, Tensor))


def parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """Names of the parameters that this rank updates."""
    mine = set(_parameters(local_optimizer(optimizer)))
    return {name for name, parameter in model.named_parameters() if parameter in mine}


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The state that is on this rank, by the names of the parameters; nothing is copied.

    Where ranks have parts of parameters, all must call it, and each gets some parameters' whole
    state, on the CPU. Under FSDP it is of DTensors.
    """
    if isinstance(optimizer, ShardedOptimizer) and optimizer.is_cut:
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        mine = list(names)[dist.get_rank() :: dist.get_world_size()]
        return {names[p]: state for p, state in optimizer.whole_state(mine, "cpu").items() if state}
    states = local_optimizer(optimizer).state
    return {name: states[p] for name, p in model.named_parameters() if states.get(p)}


def load_named_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Puts the result of `named_state` into an optimizer of the same parameters, uncast.

    Tensors go to the device of their parameter; a count of steps stays on the host unless the
    optimizer works on the device only, as in PyTorch.
    """
    local = local_optimizer(optimizer)
    local.state.clear()
    parameters = dict(model.named_parameters())
    groups = {p: group for group in local.param_groups for p in group["params"]}
    for name, values in state.items():
        parameter = parameters[name]
        group, placed = groups[parameter], {}
        on_device = group.get("capturable") or group.get("fused")
        for key, value in values.items():
            device = parameter.device if key != "step" or on_device else torch.device("cpu")
            placed[key] = tree_map(
                lambda x, d=device, p=parameter: _placed(x, d, p) if isinstance(x, Tensor) else x,
                value,
            )
        local.state[parameter] = placed


def remember_groups(optimizer: torch.optim.Optimizer) -> None:
    """Notes the parameter groups as they are before the first step, for `group_state`."""
    _MADE[local_optimizer(optimizer)] = copy.deepcopy(_bare_groups(optimizer))


def group_state(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """What has changed in the parameter groups, by their numbers; nothing is copied."""
    made = _MADE.get(local_optimizer(optimizer), [])
    changed = {}
    for number, (group, before) in enumerate(zip(_bare_groups(optimizer), made, strict=False)):
        now = {x: y for x, y in group.items() if x not in before or not _same(y, before[x])}
        if now:
            changed[str(number)] = now
    return changed


def load_group_state(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Puts the result of `group_state` into an optimizer with as many groups."""
    local = local_optimizer(optimizer)
    for groups in {id(x): x.param_groups for x in (optimizer, local)}.values():
        for number, values in state.items():
            groups[int(number)].update(values)


def take_over(
    new: torch.optim.Optimizer,
    old: torch.optim.Optimizer,
    copies: Mapping[nn.Parameter, nn.Parameter],
) -> None:
    """Gives an optimizer the states of another one.

    Parameters of both keep theirs, copies get those of their originals; others have none yet.

    Args:
        new: of the parameters that train from now on.
        old: of those that have trained so far.
        copies: new parameters, with what each is a copy of.
    """
    known, local = local_optimizer(old).state, local_optimizer(new)
    for parameter in _parameters(local):
        origin = parameter if parameter in known else copies.get(parameter, parameter)
        if origin in known:
            local.state[parameter] = tree_map(_clone, dict(known[origin]))
    load_group_state(new, tree_map(_clone, group_state(old)))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _bare_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = local_optimizer(optimizer).param_groups
    return [{x: y for x, y in group.items() if x not in ("params", "lr")} for group in groups]


def _placed(value: Tensor, device: torch.device, parameter: nn.Parameter) -> Tensor:
    """A whole tensor on a device; sharded as its parameter is."""
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(value.to(device), mesh, placements, src_data_rank=None)
    return value.to(device)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and one == other


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
