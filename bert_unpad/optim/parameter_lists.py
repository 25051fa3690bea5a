"""Lists of parameters as the operators take them, with what an update needs of shards.

Each rank updates its shard of a sharded parameter (DTensor).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad._sharded_types import is_dtensor
from bert_unpad.ops.fp8 import QuantizedWeight
from bert_unpad.ops.rounded_weights import RoundedWeight


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor; other tensors unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Returns the process groups over which a DTensor is sharded."""
    if not is_dtensor(tensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(i) for i, p in enumerate(tensor.placements) if p.is_shard())


def own_rows(param: Tensor) -> tuple[int, int]:
    """Returns the first of a parameter's rows that this rank has, and the one after the last."""
    first, last = 0, param.shape[0]
    if is_dtensor(param):
        for i, placement in enumerate(param.placements):
            if placement.is_shard(0):  # as torch.chunk deals them out
                each = -(-(last - first) // param.device_mesh.size(i))
                own = param.device_mesh.get_local_rank(i)
                first, last = min(first + own * each, last), min(first + (own + 1) * each, last)
    return first, last


class ParameterList:
    """Parameters of one group that one call of an operator can update, with gradients and state.

    Args:
        shards: the process groups over which all of these parameters are sharded.
        chunk: which part of a step updates them, see `FusedOptimizer.update_in_chunks`.
    """

    def __init__(self, shards: tuple[dist.ProcessGroup, ...], chunk: int = 0) -> None:
        self.shards = shards
        self.chunk = chunk
        self.tensors: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.rounded: list[tuple[Tensor, RoundedWeight]] = []
        self.quantized: list[tuple[Tensor, QuantizedWeight]] = []
        self._repeated: list[int] = []
        self._places: list[tuple[Tensor, slice]] = []

    def add(
        self,
        param: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        sizes: Sequence[int] = (),
        *,
        whole: Tensor,
    ) -> None:
        """Appends what this rank has of a parameter, its gradient and its state to the lists.

        With `sizes`, as several tensors of so many rows each. `whole` is the model's parameter,
        which `param` is a part or a copy of.
        """
        tensors = self.tensors
        begin = len(tensors["param"])
        parts = {"param": param, "grad": grad} | state
        if not sizes:
            for name, tensor in parts.items():
                tensors[name].append(tensor)
            self._places.append((whole, slice(begin, begin + 1)))
            return
        for name, tensor in parts.items():
            if tensor.dim():
                tensors[name].extend(tensor.split(list(sizes)))
            else:
                tensors[name].extend([tensor] * len(sizes))
        self._repeated += range(begin + 1, begin + len(sizes))
        self._places.append((whole, slice(begin, begin + len(sizes))))

    def split(self, chunk_of: Mapping[Tensor, int]) -> list[ParameterList]:
        """The same in one list for each chunk; what `chunk_of` does not name is in chunk 0."""
        parts: dict[int, ParameterList] = {}
        for whole, place in self._places:
            chunk = chunk_of.get(whole, 0)
            part = parts.setdefault(chunk, ParameterList(self.shards, chunk))
            for name, tensors in self.tensors.items():
                part.tensors[name] += tensors[place]
        for part in parts.values():
            part.rounded = [x for x in self.rounded if chunk_of.get(x[0], 0) == part.chunk]
            part.quantized = [x for x in self.quantized if chunk_of.get(x[0], 0) == part.chunk]
        return list(parts.values())

    def separate_steps(self) -> None:
        """Gives all but the first tensor of a parameter a count of its own, as each is moved on."""
        steps = self.tensors["step"]
        if self._repeated and steps:
            copies = torch.stack([steps[i] for i in self._repeated]).unbind()
            for i, copy in zip(self._repeated, copies, strict=True):
                steps[i] = copy

    @property
    def arrays(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """Parameters, gradients and both moments, as the operators take them."""
        tensors = self.tensors
        return tensors["param"], tensors["grad"], tensors["exp_avg"], tensors["exp_avg_sq"]


class Update(NamedTuple):
    """One list of parameters and what its update needs."""

    group: dict[str, Any]
    """Options of the parameters' group."""
    parameters: ParameterList
    common: dict[str, Any]
    """Arguments that all operators take."""


def sum_over_shards(lists: Sequence[ParameterList], rows: Sequence[Tensor]) -> list[Tensor]:
    """Adds up each list's rows over its shards; one allreduce for all that are sharded alike.

    Args:
        lists: parameters, the same on all ranks.
        rows: for each list a tensor of this rank's sums; those of lists that are sharded alike have
            as many columns.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, (parameters, row) in enumerate(zip(lists, rows, strict=True)):
        alike.setdefault((parameters.shards, row.device), []).append(index)
    out = list(rows)
    for (shards, _), indices in alike.items():
        if not shards:
            continue
        total = torch.cat([rows[index] for index in indices])
        for group in shards:
            dist.all_reduce(total, group=group)
        parts = total.split([len(rows[index]) for index in indices])
        for index, part in zip(indices, parts, strict=True):
            out[index] = part
    return out


def scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """Returns a learning rate as float32 [] on the device, without waiting for the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float32).reshape(())
    return torch.full((), value, dtype=torch.float32, device=device)
