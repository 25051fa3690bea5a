"""What the fused optimizers share: their options, their state, loading it, and a step.

State and groups use the names of `torch.optim.AdamW`, so that state dicts load in both directions.
Moments and master weights are always float32. `Optimizer.load_state_dict` would cast them to the
parameters' dtype, so `FusedOptimizer` loads them itself. Each rank updates its shard of a sharded
parameter (DTensor).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, groupby, pairwise
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad._sharded_types import is_dtensor
from bert_unpad.ops.fp8 import QuantizedWeight, renew_quantized
from bert_unpad.ops.optim import multi_tensor_l2norm
from bert_unpad.ops.rounded_weights import RoundedWeight
from bert_unpad.optim.checks import check_options, is_count
from bert_unpad.optim.copying import CopyableOptimizer
from bert_unpad.optim.parameter_lists import (
    ParameterList,
    Update,
    local,
    own_rows,
    scalar,
    shard_groups,
    sum_over_shards,
)


class FusedOptimizer(CopyableOptimizer):
    """Base class of the fused optimizers and Muon."""

    _step_supports_amp_scaling = True  # GradScaler sets grad_scale and found_inf
    rounds = True
    """Whether it can keep rounded weights, see `keep_rounded`."""
    takes_chunks = True
    """Whether it can update parameters chunk by chunk, see `update_in_chunks`."""
    splits_stacked = False
    """Whether it updates the matrices of groups with `stacked` one by one, see `decay_groups`."""
    shard_group: dist.ProcessGroup | None = None
    """Processes each of which has a part of every parameter, maybe without elements, that is no
    DTensor: norms of parameters are summed over them. All must have the same lists of parameters
    with gradients."""

    def __init__(
        self,
        params: Any,
        options: dict[str, Any],
        max_grad_norm: float | None,
        skip_non_finite: bool,
        norm_group: dist.ProcessGroup | None,
    ) -> None:
        """Takes the default options of a group; adds the other options of `torch.optim.AdamW`."""
        defaults = options | {
            "amsgrad": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "stacked": (),
        }
        lr = 0.0 if isinstance(options["lr"], Tensor) else options["lr"]
        check_options(lr, *(options[name] for name in ("betas", "eps", "weight_decay")))
        if max_grad_norm is not None and not (
            isinstance(max_grad_norm, float | Real) and max_grad_norm > 0
        ):
            raise ValueError(
                f"max_grad_norm: expected a number above 0 or None, got {max_grad_norm!r}"
            )
        self.max_grad_norm = max_grad_norm
        self.skip_non_finite = skip_non_finite
        self.norm_group = norm_group
        self.part_of: dict[Tensor, tuple[torch.Size, tuple[int, int]]] = {}
        """The shape of what a parameter is a part of, and which of its elements the part has."""
        self._skipped: dict[torch.device, Tensor] = {}
        self._rounded: dict[Tensor, RoundedWeight | QuantizedWeight] = {}
        self._chunk_of: Mapping[Tensor, int] = {}
        self._after_chunk: Callable[[int], None] | None = None
        super().__init__(params, defaults)
        for group in self.param_groups:
            on_gpu = any(p.is_cuda for p in group["params"])
            group["capturable"] = on_gpu

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_rounded"] = {
            param: kept.tensor.dtype if isinstance(kept, RoundedWeight) else torch.float8_e4m3fn
            for param, kept in self._rounded.items()
        }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_rounded" in state:  # not in what `load_state_dict` passes
            self._rounded = {}
            for param, dtype in state["_rounded"].items():
                self.keep_rounded([param], dtype)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            if group.get("amsgrad"):
                raise ValueError("amsgrad: expected False in all parameter groups, got True")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: a parameter has not as many rows as its group's `stacked` says.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        stacked = group["stacked"]
        valid = isinstance(stacked, tuple | list) and all(map(is_count, stacked))
        for param in group["params"]:
            rows = param.shape[0] if param.dim() else 0
            if not valid or (stacked and sum(stacked) != rows):
                self.param_groups.pop()
                raise ValueError(
                    f"stacked: expected numbers of rows that add up to {rows}, those of a "
                    f"parameter of shape {list(param.shape)}, got {stacked!r}"
                )
        group["stacked"] = tuple(stacked) if valid else ()

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because a gradient was not finite. Waits for the device."""
        return sum(int(count) for count in self._skipped.values())

    def keep_rounded(self, params: Iterable[Tensor], dtype: torch.dtype) -> None:
        """Writes parameters in 16 or 8 bits too from now on, for products with rounded weights.

        `ops.linear`, `ops.mlp`, `ops.fp8_linear` and the modules made of them take a copy in place
        of rounding the weight again in every forward pass. A copy has the bits of its rounded
        weight. So do updates have the bits that they have without copies, unless there are 16-bit
        copies and `max_grad_norm` is set (by default it is in `FusedLAMB`): then the norm is added
        up in another order, and updates are equal to rounding.

        A weight that something else changes is rounded again, as far as PyTorch counts the change.
        It does not count writes through `.data`, nor collectives such as `dist.broadcast` and
        `dist.all_reduce` on a weight: call `torch.autograd.graph.increment_version` after one.

        Args:
            params: float32 parameters of this optimizer, that no process group shards.
            dtype: bfloat16 or float16, that of the activations; or float8_e4m3fn for
                `ops.fp8_linear`, whose weights are matrices with multiples of 16 rows and columns.
                A parameter has one copy, in the dtype that was given last.

        Raises:
            ValueError: a parameter is not float32, not this optimizer's or of another shape, or
                the dtype is none of these.
            NotImplementedError: this optimizer cannot.
        """
        if not self.rounds:
            raise NotImplementedError(f"{type(self).__name__} keeps no rounded weights")
        if dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
            raise ValueError(
                f"dtype: expected torch.bfloat16, torch.float16 or torch.float8_e4m3fn, got {dtype}"
            )
        own = {id(param) for group in self.param_groups for param in group["params"]}
        for param in params:
            if id(param) not in own:
                raise ValueError(
                    "params: expected parameters of this optimizer, got another of shape "
                    f"{list(param.shape)}"
                )
            if param.dtype != torch.float32 or is_dtensor(param):
                raise ValueError(
                    f"params: expected float32 parameters that are not sharded, got {param.dtype}"
                    f"{', a DTensor' if is_dtensor(param) else ''}"
                )
            in_8_bits = dtype == torch.float8_e4m3fn
            copy = QuantizedWeight(param) if in_8_bits else RoundedWeight(param, dtype)
            self._rounded[param] = copy

    def update_in_chunks(
        self, chunk_of: Mapping[Tensor, int], after_chunk: Callable[[int], None]
    ) -> None:
        """Updates parameters chunk by chunk from now on, with the same bits as all at once.

        A step first decides from all gradients whether it is skipped and what they are divided by.
        Then it updates the parameters of the chunk with the lowest number, their copies in fewer
        bits too, calls `after_chunk` with that number, and goes on with the next chunk. On a GPU
        all of this is launched and nothing waits: what `after_chunk` launches or records comes
        after the chunk's update on the current stream.

        Args:
            chunk_of: the numbers of parameters' chunks; 0 for parameters that it does not name.
            after_chunk: takes the number of a chunk; not called for one without gradients.

        Raises:
            NotImplementedError: this optimizer cannot.
        """
        if not self.takes_chunks:
            raise NotImplementedError(f"{type(self).__name__} updates all parameters at once")
        self._chunk_of, self._after_chunk = chunk_of, after_chunk

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of `torch.optim.AdamW`.

        Raises:
            ValueError: the state uses amsgrad, or its parameter groups differ from these.
        """
        stacked = [group["stacked"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, rows in zip(self.param_groups, stacked, strict=True):
            group["stacked"] = rows  # which says how these parameters lie, as no state can
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, param in zip(ids, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) or name == "step":
                    value = torch.as_tensor(value, dtype=torch.float32)
                    self.state[param][name] = value.to(param.device, copy=True)

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = self.state[param]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(
                    param.detach(), dtype=torch.float32, memory_format=torch.contiguous_format
                )
        if group["master_weights"] and param.dtype != torch.float32 and "master_param" not in state:
            state["master_param"] = param.detach().to(torch.float32, copy=True)
        return state

    def _parameter_lists(self, group: dict[str, Any]) -> list[ParameterList]:
        lists: dict[Any, ParameterList] = {}
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            own = param
            shards: tuple[dist.ProcessGroup, ...] = ()
            sharded = is_dtensor(param)
            if sharded:
                if grad.placements != param.placements:
                    raise RuntimeError(
                        "params: expected gradients placed like their parameter, "
                        f"{param.placements}, got {grad.placements}"
                    )
                own, grad, shards = local(own), local(grad), shard_groups(param)
            if self.shard_group is not None:
                shards = (self.shard_group,)
            if not own.is_contiguous():
                raise RuntimeError("params: expected contiguous parameters")
            state = self._state_of(param, group)
            if sharded:
                state = {name: local(tensor) for name, tensor in state.items()}
            grad = grad.contiguous()
            copy = self._rounded.get(param) if self._rounded else None
            if isinstance(copy, RoundedWeight):  # which takes the parameter for its master weights
                copy.renew(param)
                state = state | {"master_param": own}
                own = copy.tensor
            key = (own.device, own.dtype, grad.dtype, "master_param" in state, shards)
            parameters = lists.get(key)
            if parameters is None:
                parameters = lists[key] = ParameterList(shards)
            sizes = self._sizes_of(param, group["stacked"]) if group["stacked"] else ()
            parameters.add(own, grad, state, sizes, whole=param)
            if isinstance(copy, RoundedWeight):
                parameters.rounded.append((param, copy))
            elif copy is not None:
                parameters.quantized.append((param, copy))
        for parameters in lists.values():
            parameters.separate_steps()
        return list(lists.values())

    def _sizes_of(self, param: Tensor, rows: Sequence[int]) -> Sequence[int]:
        """How much this rank has of each matrix in a parameter: rows, or elements of a part."""
        if not self.splits_stacked:
            return ()
        if param in self.part_of:
            shape, (first, last) = self.part_of[param]
            row = shape[1:].numel()
        else:
            row, (first, last) = 1, own_rows(param)
        ends = [min(max(end * row, first), last) for end in accumulate(rows)]
        return [end - begin for begin, end in pairwise([first, *ends])]

    def _global_norm(self, lists: Sequence[ParameterList]) -> Tensor | None:
        """Returns the norm of all gradients over all shards, float32 []."""
        norms = [multi_tensor_l2norm(parameters.tensors["grad"])[0] for parameters in lists]
        total: Tensor | None = None
        for square in sum_over_shards(lists, [norm.square().reshape(1) for norm in norms]):
            total = square[0] if total is None else total + square[0].to(total.device)
        if self.norm_group is not None:
            if total is None:  # this rank has no gradients, but the others wait for it
                total = torch.zeros((), device=self.param_groups[0]["params"][0].device)
            dist.all_reduce(total, group=self.norm_group)
        return None if total is None else total.sqrt()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradient again.

        Returns:
            The result of the closure; None without one.

        Raises:
            RuntimeError: a gradient is sparse, or does not match its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lists = [
            (group, parameters)
            for group in self.param_groups
            for parameters in self._parameter_lists(group)
        ]
        if not lists and self.norm_group is None:
            return loss
        scale = getattr(self, "grad_scale", None)
        found = getattr(self, "found_inf", None)
        needs_norm = self.max_grad_norm is not None or self.skip_non_finite
        norm = self._global_norm([parameters for _, parameters in lists]) if needs_norm else None
        if found is not None:
            norm = torch.where(
                found > 0, torch.inf, torch.zeros_like(found) if norm is None else norm
            )
        if self._chunk_of:  # only now: a norm adds up in the order of the whole lists
            parts = [(group, part) for group, x in lists for part in x.split(self._chunk_of)]
            lists = sorted(parts, key=lambda part: part[1].chunk)
        inverse = None if scale is None else scale.double().reciprocal().float()
        updates: list[Update] = []
        for group, parameters in lists:
            device = parameters.tensors["param"][0].device
            if device not in self._skipped:
                self._skipped[device] = torch.zeros((), dtype=torch.int64, device=device)
            common = {
                "lr": scalar(group["lr"], device),
                "grad_scale": None if inverse is None else inverse.to(device),
                "norm": None if norm is None else norm.to(device),
                # Only the first call of a step counts it as skipped.
                "skipped": None if updates else self._skipped[device],
            }
            updates.append(Update(group, parameters, common))
        for chunk, some in groupby(updates, key=lambda update: update.parameters.chunk):
            self._update_chunk(list(some))
            if self._after_chunk is not None:
                self._after_chunk(chunk)
        return loss

    def _update_chunk(self, updates: Sequence[Update]) -> None:
        """Updates lists of parameters, with their copies in fewer bits."""
        self._update_all(updates)
        for _, parameters, _ in updates:
            torch.autograd.graph.increment_version(parameters.tensors["param"])
            for param, copy in parameters.rounded:
                torch.autograd.graph.increment_version(param)
                copy.mark(param)
            renew_quantized(parameters.quantized)

    def _update_all(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self._update(*update)

    def _update(
        self, group: dict[str, Any], parameters: ParameterList, common: dict[str, Any]
    ) -> None:
        """Updates one list of parameters; `common` holds arguments that all operators take."""
        raise NotImplementedError
