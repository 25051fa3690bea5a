"""The state of an optimizer whose parameters are parts of buckets: cut into parts, and gathered."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_unpad.distributed.shard_buckets import Bucket
from bert_unpad.distributed.shard_exchange import start_all_gather

State = Mapping[str, Any]


def slice_state(state: State, parameter: nn.Parameter, first: int, last: int) -> dict[str, Any]:
    """The state of elements `first` to `last` (exclusive) of a parameter.

    Tensors of the parameter's shape are cut; single numbers and what is no tensor are copied.

    Raises:
        ValueError: a tensor has another shape.
    """
    part: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            part[name] = value
        elif name == "step" or (value.dim() == 0 and parameter.dim() > 0):
            part[name] = value.clone()
        elif value.shape == parameter.shape:
            part[name] = value.detach().reshape(-1)[first:last].clone()
        else:
            raise ValueError(
                f"state: expected {name} of the parameter's shape, {list(parameter.shape)}, got "
                f"{list(value.shape)}"
            )
    return part


def gather_state(
    buckets: Sequence[Bucket],
    parts: Mapping[nn.Parameter, State],
    wanted: Collection[nn.Parameter],
    device: torch.device | str | None,
    group: dist.ProcessGroup | None,
) -> dict[nn.Parameter, dict[str, Any]]:
    """The state of whole parameters, put together from the parts of all ranks, bucket by bucket.

    Args:
        buckets: what the parts are parts of; the same on all ranks.
        parts: this rank's state of each parameter.
        wanted: parameters to return; ranks may want different ones.
        device: where the results are; None: on the buckets' device.
        group: the ranks.
    """
    kinds = _kinds_of(buckets, parts, group)
    whole: dict[nn.Parameter, dict[str, Any]] = {p: {} for p in kinds if p in wanted}
    for parameter, state in whole.items():
        for name, value in kinds[parameter].items():
            moved = isinstance(value, Tensor)
            state[name] = value.to(device or parameter.device) if moved else value
    for bucket in buckets:
        cut = {  # a dict, because ranks need the same order
            (name, kind): None
            for p in bucket.parameters
            for name, kind in kinds[p].items()
            if isinstance(kind, torch.dtype)
        }
        for name, dtype in cut:
            flat = torch.zeros_like(bucket.weights, dtype=dtype)
            shares = bucket.shares(flat[bucket.part])
            for parameter, share in zip(bucket.parameters, shares, strict=True):
                if name in parts[parameter] and share.numel():
                    share.copy_(parts[parameter][name])
            start_all_gather(flat, bucket.part, group)()
            for parameter, view in zip(bucket.parameters, bucket.views(flat), strict=True):
                if parameter in whole and kinds[parameter].get(name) is dtype:
                    whole[parameter][name] = view.to(device or view.device, copy=True)
    return whole


def _kinds_of(
    buckets: Sequence[Bucket],
    parts: Mapping[nn.Parameter, State],
    group: dist.ProcessGroup | None,
) -> dict[nn.Parameter, dict[str, Any]]:
    """What the state of each parameter holds: dtypes of vectors, and all other values.

    A rank that updates nothing of a parameter has no state of it, or an old one.
    """
    own: dict[nn.Parameter, dict[str, Any]] = {}
    for bucket in buckets:
        for parameter, (first, last) in zip(bucket.parameters, bucket.spans(), strict=True):
            own[parameter] = {} if first == last and parameter.numel() else _kinds(parts[parameter])
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, list(own.values()), group=group)
    return {
        parameter: next((kinds for kinds in of_one if kinds), {})
        for parameter, of_one in zip(own, zip(*of_ranks, strict=True), strict=True)
    }


def _kinds(state: State) -> dict[str, Any]:
    def kind(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.dtype if value.dim() else value.cpu()

    return {name: kind(value) for name, value in state.items()}
