"""What 1-bit Adam, 1-bit LAMB and 0/1 Adam share: the phases, and the exchange between ranks.

While an optimizer takes averaged gradients, its step is one of the fused operators. Else each rank
puts what it has into one flat buffer, and `OneBitAllreduce` averages it. Filling the buffer takes
two `torch._foreach` passes (a copy that casts, a lerp); the update after the exchange is one fused
operator. Parameters whose size is a multiple of 4 come first in the buffer, so that the operators
find theirs at addresses that are multiples of 16 bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad._sharded_types import is_dtensor
from bert_unpad.distributed.collectives import all_gather_single
from bert_unpad.distributed.one_bit import OneBitAllreduce
from bert_unpad.ops.optim import adam_, frozen_adam_, multi_tensor_l2norm
from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.optim.checks import check_count
from bert_unpad.optim.parameter_lists import ParameterList

Scale = Literal["buffer", "tensor", "row", "element"]
# Roots of the variance count as at least that share of their root mean square: the momentum of a
# weight that had almost no gradients would otherwise outweigh all others once it has one.
_LEAST_ROOT = 0.03


@dataclass(frozen=True)
class Segment:
    """Parameters of one group that one call of an operator can update, and their places."""

    group: dict[str, Any]
    params: list[Tensor]
    views: list[Tensor]
    """Parts of the flat buffer, in the parameters' shapes."""


class OneBitOptimizer(FusedOptimizer):
    """Base class of OneBitAdam, OneBitLAMB and `experimental.ZeroOneAdam`.

    Args:
        params: parameters or groups, all on one device.
        options: default options of a group.
        freeze_step: number of steps after which the variance stays as it is.
        skip_non_finite: as in `FusedAdam`, while gradients are averaged.
        group: the ranks, by default all; one if torch.distributed is not initialised.
        scale: what has one scale, see `OneBitAdam`.

    Raises:
        ValueError: a number is out of range, or `scale` unknown; the message names it.
    """

    rounds = False
    takes_chunks = False

    def __init__(
        self,
        params: Any,
        options: dict[str, Any],
        freeze_step: int,
        skip_non_finite: bool,
        group: dist.ProcessGroup | None,
        scale: Scale,
    ) -> None:
        check_count("freeze_step", freeze_step)
        if scale not in get_args(Scale):
            expected = ", ".join(get_args(Scale))
            raise ValueError(f"scale: expected one of {expected}, got {scale!r}")
        self.scale = scale
        self.freeze_step = freeze_step
        self._ranks = group
        self._checked = False
        self._flat = torch.empty(0)  # the first compressed step lays it out, and the segments
        self._segments: list[Segment] = []
        self._exchange: OneBitAllreduce | None = None
        self._saved_errors: dict[str, Any] | None = None
        super().__init__(params, options | {"updates": 0}, None, skip_non_finite, None)

    def __getstate__(self) -> dict[str, Any]:
        # pickle would write the whole buffer with each view of it; it holds nothing between steps.
        return super().__getstate__() | {"_flat": torch.empty(0), "_segments": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if state.get("_exchange") is not None:
            self._lay_out()

    @property
    def updates(self) -> int:
        """Calls of `step` so far, the skipped ones included.

        It decides on the phase, so it must be the same on all ranks. State dicts have it in the
        parameter groups.
        """
        return self.param_groups[0]["updates"]

    @updates.setter
    def updates(self, count: int) -> None:
        for group in self.param_groups:
            group["updates"] = count

    @property
    def averages_gradients(self) -> bool:
        """Whether the next `step` takes gradients averaged over the ranks, not each rank's own."""
        return self.updates < self.freeze_step

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank's compressed buffers took to reach the other ranks so far."""
        return 0 if self._exchange is None else self._exchange.bytes_sent

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of `torch.optim.AdamW`; see `FusedAdam`.

        Errors start at zero again, unless `load_local_state` follows.
        """
        super().load_state_dict(state_dict)
        self._checked = False
        self._exchange = self._saved_errors = None
        self._flat, self._segments = torch.empty(0), []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, before the first compressed step.

        Raises:
            RuntimeError: there was one; it fixes which values travel.
        """
        if getattr(self, "_segments", ()):
            raise RuntimeError("add_param_group: expected no compressed step before, got one")
        self._checked = False
        super().add_param_group(param_group)

    def synchronise(self) -> None:
        """Makes weights and state the same on all ranks where they differ: between two exchanges.

        Not the errors, which are each rank's own. All ranks must call it.
        """

    def local_state(self) -> dict[str, Any] | None:
        """What only this rank has, beside `state_dict`: its errors; None before there are any."""
        if self._exchange is None:
            return self._saved_errors
        return self._exchange.state_dict() or None

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Continues from `local_state` of the same rank among as many.

        On another number of ranks errors have to start at zero: do not call it then.

        Raises:
            ValueError: the errors have other sizes; raised by the next compressed step if there
                was none.
        """
        if self._exchange is None:
            self._saved_errors = state
        else:
            self._exchange.load_state_dict(state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that require a gradient; all ranks must call it.

        Args:
            closure: computes the loss and its gradient again.

        Returns:
            The result of the closure; None without one.

        Raises:
            RuntimeError: a parameter or gradient is sharded, sparse, or does not match; or the
                ranks have different parameters.
        """
        if not self._checked:
            self._check()
        if self.averages_gradients:
            loss = super().step(closure)
            if self._segments:
                self._set_factors()  # the variance has changed
        else:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if not self._segments:
                self._lay_out()
            self._own_step()
            for segment in self._segments:
                torch.autograd.graph.increment_version(segment.params)
        self.updates += 1
        return loss

    def _update(
        self, group: dict[str, Any], parameters: ParameterList, common: dict[str, Any]
    ) -> None:
        tensors = parameters.tensors
        adam_(
            *(tensors[name] for name in ("param", "grad", "exp_avg", "exp_avg_sq", "step")),
            masters=tensors["master_param"],
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            bias_correction=group.get("bias_correction", False),
            **common,
        )

    def _own_step(self) -> None:
        """Makes a step from this rank's own gradients."""
        raise NotImplementedError

    def _params(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            yield from ((group, param) for param in group["params"] if param.requires_grad)

    def _check(self) -> None:
        """All ranks must have the same parameters in the same order, with the same values."""
        params = [param.detach() for _, param in self._params()]
        for param in params:
            if is_dtensor(param):
                raise RuntimeError(
                    "params: expected whole parameters, since each rank compresses the momentum of "
                    "all of them, got a sharded one (DTensor)"
                )
            if not param.is_contiguous():
                raise RuntimeError("params: expected contiguous parameters")
        devices = {param.device for param in params}
        if len(devices) != 1:
            got = ", ".join(sorted(map(str, devices))) or "no parameter"
            raise RuntimeError(f"params: expected all on one device, got {got}")
        if dist.is_initialized():
            norms = multi_tensor_l2norm(params)[1].double()
            places = torch.arange(1, len(norms) + 1, device=norms.device)
            numel = norms.new_tensor(sum(param.numel() for param in params))
            own = torch.stack([numel, (norms * places).sum()])
            found = own.new_empty(dist.get_world_size(self._ranks), 2)
            all_gather_single(found.view(-1), own, group=self._ranks)
            if not torch.allclose(found, found[:1].expand_as(found), rtol=1e-4, atol=0.0):
                raise RuntimeError(
                    "params: expected the same parameters and values on all ranks, got different "
                    "ones; state that is shared out (ZeroRedundancyOptimizer) is not supported, "
                    "since each rank compresses the momentum of all parameters"
                )
        self._checked = True

    def _lay_out(self) -> None:
        """Decides on each parameter's place in the flat buffer, once."""
        pairs = sorted(self._params(), key=lambda pair: pair[1].numel() % 4 != 0)
        sizes = [param.numel() for _, param in pairs]
        flat = torch.zeros(sum(sizes), device=pairs[0][1].device)
        lists: dict[Any, Segment] = {}
        for (group, param), view in zip(pairs, flat.split(sizes), strict=True):
            state = self._state_of(param, group)
            # One call of the operator corrects by one number of updates of the variance.
            counted = int(state["variance_step"]) if "variance_step" in state else 0
            key = (id(group), param.dtype, "master_param" in state, counted)
            segment = lists.setdefault(key, Segment(group, [], []))
            segment.params.append(param)
            segment.views.append(view.view(param.shape))
        if self._exchange is None:
            exchange = OneBitAllreduce(len(flat), flat.device, self._ranks)
            if self._saved_errors is not None:
                exchange.load_state_dict(self._saved_errors)
                self._saved_errors = None
            self._exchange = exchange
        self._flat, self._segments = flat, list(lists.values())
        self._set_factors()

    def _set_factors(self) -> None:
        """Sets the factors by which values are multiplied before compression, if `scale` says so.

        They are one over the root of the variance, which is the same on all ranks, so none travels.
        """
        if self.scale == "buffer" or self._exchange is None or self._exchange.ranks == 1:
            return
        for segment in self._segments:
            for view, variance in zip(
                segment.views, self._states(segment, "exp_avg_sq"), strict=True
            ):
                if self.scale == "row" and variance.dim() > 1:
                    variance = variance.flatten(1).mean(1).view(-1, *[1] * (variance.dim() - 1))
                elif self.scale != "element":
                    variance = variance.mean()
                view.copy_(variance)
        mean = self._flat.mean()
        variance = self._flat.clamp(min=_LEAST_ROOT**2 * mean) / mean
        exponents = torch.where(mean > 0, variance, 1.0).frexp().exponent // 2
        self._exchange.use_factors(torch.ldexp(torch.ones_like(self._flat), -exponents))

    def _states(self, segment: Segment, name: str) -> list[Tensor]:
        return [self.state[param][name] for param in segment.params]

    def _weights(self, segment: Segment) -> list[Tensor]:
        """What a segment's updates add to: its master weights, or the parameters themselves."""
        if "master_param" in self.state[segment.params[0]]:
            return self._states(segment, "master_param")
        return [param.detach() for param in segment.params]

    def _inverse_scale(self) -> Tensor | None:
        """What gradients are to be multiplied by, float32 []."""
        scale = getattr(self, "grad_scale", None)
        return None if scale is None else scale.double().reciprocal().float().to(self._flat.device)

    def _own_gradients(self, segment: Segment) -> list[Tensor]:
        """The parameters' gradients; zeros for those that have none."""
        grads = [p.grad for p in segment.params]
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        return [
            torch.zeros_like(param) if grad is None else grad
            for param, grad in zip(segment.params, grads, strict=True)
        ]

    def _fill_with_momenta(self) -> None:
        """Writes each momentum after this rank's gradient to the flat buffer."""
        inverse = self._inverse_scale()
        for segment in self._segments:
            torch._foreach_copy_(segment.views, self._own_gradients(segment))
            if inverse is not None:
                torch._foreach_mul_(segment.views, inverse)
            beta1 = segment.group["betas"][0]
            torch._foreach_lerp_(segment.views, self._states(segment, "exp_avg"), beta1)

    def _average(self) -> Tensor:
        """Averages the flat buffer; float32 [], not finite where the step must be left out."""
        found = getattr(self, "found_inf", None)
        return self._exchange.average_(self._flat, found)  # type: ignore[union-attr]  # laid out

    def _apply(
        self,
        segment: Segment,
        grads: list[Tensor],
        lr: Tensor,
        norm: Tensor,
        *,
        weight_decay: float,
        averaged: bool = True,
        grad_scale: Tensor | None = None,
        bias_correction: bool = False,
    ) -> None:
        """Makes a step by the frozen variance, unless `norm` is not finite."""
        group, device = segment.group, norm.device
        skipped = None
        if segment is self._segments[0]:  # only the first call of a step counts it
            if device not in self._skipped:
                self._skipped[device] = torch.zeros((), dtype=torch.int64, device=device)
            skipped = self._skipped[device]
        state = self.state[segment.params[0]]
        # At least 1, also where there was no gradient in the warm-up: exp_avg_sq is 0 there.
        counted = state["variance_step"].clamp(min=1) if bias_correction else None
        frozen_adam_(
            [param.detach() for param in segment.params],
            grads,
            *(self._states(segment, name) for name in ("exp_avg", "exp_avg_sq", "step")),
            lr=lr,
            variance_step=counted,
            masters=self._states(segment, "master_param") if "master_param" in state else (),
            grad_scale=grad_scale,
            norm=norm,
            skipped=skipped,
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=weight_decay,
            averaged=averaged,
            bias_correction=bias_correction,
        )
