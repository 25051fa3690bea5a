"""BucketClip: a DDP communication hook that clips every bucket before it is added to the others'.

DDP checks the hook's parameter name and annotations, which must be objects: this module does
without `from __future__ import annotations`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.distributed.allreduce import Allreduce
from bert_unpad.distributed.bucket_shares import Policy, Shares
from bert_unpad.ops import clip_bucket_

__all__ = ["BucketClip", "ClipReport"]

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
_FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class ClipReport:
    """What the last backward pass that exchanged gradients has met. Tensors are on the device."""

    norms: Tensor
    """float32 [buckets]: of this rank's gradient, before clipping, in the order of exchange."""
    bounds: Tensor
    """float32 [buckets]: the bound on each."""
    finite: Tensor
    """bool []: whether the averaged gradient is finite; the same on all ranks."""

    @property
    def norm(self) -> Tensor:
        """float32 []: norm of this rank's whole gradient, before clipping."""
        return torch.linalg.vector_norm(self.norms)

    @property
    def clipped(self) -> Tensor:
        """int64 []: buckets of this rank that were clipped."""
        return (self.norms > self.bounds).sum()


class BucketClip:
    """Bounds the norm of the averaged gradient by clipping each rank's buckets as they get ready.

    Clipping the whole gradient before the average has to wait for the last bucket, and so gives up
    the overlap of communication and backward pass. Here bucket b of every rank is clipped to a
    bound C_b of its own, the squares of which add up to max_norm^2. What a rank sends then has norm
    at most sqrt(sum C_b^2) = max_norm, and by the triangle inequality so has the average, however
    large the gradient of one rank. The bounds need not be equal on all ranks. `policy` says how
    max_norm^2 is shared out among buckets:

    - `equal`: C_b = max_norm / sqrt(N) with N buckets.
    - `numel`: C_b = max_norm * sqrt(n_b / n), with n_b of all n elements in bucket b.
    - `adaptive`: C_b = max_norm * sqrt(s_b), with s_b the bucket's share of this rank's squared
      norm in the step before (1 % of the budget goes by size, so that no bucket is shut out).
      Where shares change little from step to step, this keeps the direction of the gradient almost
      as clipping it as a whole does. Norms that are not finite are left out.

    N and n_b are those of the buckets that DDP really uses. In a pass whose buckets are not those
    of the pass before (the first; the one after DDP has laid them anew) the bounds go by size from
    the first new one on: their squares add up to max_norm^2 all the same.

    Guaranteed up to rounding: 1e-5 of the norm, and half a unit in the last place of each number
    that is cast to a 16-bit `wire_dtype`, added up or averaged in it.

    A bucket with an infinity or a NaN arrives as NaN, all of it, on every rank: `report().finite`
    then is false on all of them, and all can skip the update together.

    The host waits for nothing. Works with accumulation in `no_sync` (the accumulated gradient is
    clipped, once), `gradient_as_bucket_view`, `static_graph`, `find_unused_parameters` and buckets
    of different dtypes.

    Args:
        max_norm: bound on the averaged gradient's norm; infinity casts only.
        policy: equal, numel or adaptive.
        wire_dtype: float32 buckets travel as bfloat16 or float16; None sends each as it is.
        error_feedback: what the cast to `wire_dtype` loses is added to the next step's gradient,
            before that is clipped; takes float32 memory as large as the gradient.
        loss_scale: float32 [] on the device, what the loss was multiplied by; buckets are divided
            by it first, so that norms, bounds and what is left over are of the unscaled gradient.

    Raises:
        ValueError: for an unknown policy, or a number or dtype out of range.
    """

    def __init__(
        self,
        max_norm: float,
        policy: Policy = "equal",
        wire_dtype: torch.dtype | None = None,
        error_feedback: bool = False,
        loss_scale: Tensor | None = None,
    ) -> None:
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        if wire_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"wire_dtype must be None, torch.bfloat16 or torch.float16, got {wire_dtype}"
            )
        if wire_dtype == torch.float16 and max_norm > _FLOAT16_MAX:
            raise ValueError(
                f"max_norm must be at most {_FLOAT16_MAX:.0f}, the largest float16, got {max_norm}"
            )
        if error_feedback and wire_dtype is None:
            raise ValueError("error_feedback needs a wire_dtype: nothing else is lost")
        Shares(policy, 0)  # checks the name
        self.max_norm = float(max_norm)
        self.policy = policy
        self.wire_dtype = wire_dtype
        self.error_feedback = error_feedback
        self.loss_scale = loss_scale
        self._shares: Shares | None = None
        self._wires: dict[int, Tensor] = {}
        self._residuals: dict[int, Tensor] = {}
        self._pass: list[tuple[Tensor, float | Tensor, Tensor]] = []
        self._last: list[tuple[Tensor, float | Tensor, Tensor]] = []

    def attach(
        self,
        model: DistributedDataParallel,
        hook: Hook | None = None,
        state: Any = None,
        allreduce: Allreduce | None = None,
    ) -> "BucketClip":
        """Makes this the communication hook of `model`, which may have no other; returns self.

        Args:
            model: before its first backward pass.
            hook: exchanges the clipped bucket instead of an allreduce, for example PyTorch's
                `powerSGD_hook` or `post_localSGD_hook`; must average. What it adds itself (the
                error feedback of PowerSGD) is not bounded.
            state: the hook's own.
            allreduce: sums what travels over all of the model's ranks, for example
                `HierarchicalAllreduce`; by default `torch.distributed.all_reduce`.

        Raises:
            RuntimeError: this BucketClip, or another hook, is attached already.
            ValueError: a `hook` together with a wire dtype, or with an allreduce.
        """
        if self._shares is not None:
            raise RuntimeError("this BucketClip is attached to a model already")
        if hook is not None and self.wire_dtype is not None:
            raise ValueError(
                "a hook exchanges the bucket in its own dtype: wire_dtype must be None"
            )
        if hook is not None and allreduce is not None:
            raise ValueError("give a hook or an allreduce, not both")
        ignored = set(getattr(model, "parameters_to_ignore", ()))
        numel = sum(
            parameter.numel()
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        )
        self._group = model.process_group
        self._world_size = dist.get_world_size(self._group)
        self._hook, self._hook_state = hook, state
        self._allreduce = self._flat if allreduce is None else allreduce
        model.register_comm_hook(self, _clip_and_exchange)
        self._shares = Shares(self.policy, numel)
        return self

    def report(self) -> ClipReport:
        """Of the last backward pass that exchanged gradients. Call it before the next one.

        Raises:
            RuntimeError: there was none.
        """
        if not self._last:
            raise RuntimeError("no gradient has been exchanged yet")
        norms, shares, results = zip(*self._last, strict=True)
        device = norms[0].device
        bounds = torch.stack([_on(share, device) for share in shares]).sqrt() * self.max_norm
        # What is not finite has spread over all of a bucket, and one number shows it; what a hook
        # of somebody else's makes of it is not known.
        seen = [result if self._hook else result[:1] for result in results]
        finite = torch.stack([result.isfinite().all() for result in seen]).all()
        return ClipReport(torch.stack(norms), bounds, finite)

    def state_dict(self) -> dict[str, Any]:
        """What the bounds of the next step depend on; of this rank. Residuals are not in it."""
        return self._attached().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`; it has no effect if the buckets are others by now."""
        self._attached().load_state_dict(state)

    def _attached(self) -> Shares:
        if self._shares is None:
            raise RuntimeError("this BucketClip is not attached to a model")
        return self._shares

    def _exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer, index = bucket.buffer(), bucket.index()
        if index == 0:
            self._pass = []  # a pass that an error has ended may have left some
        if self.loss_scale is not None:
            buffer.div_(self.loss_scale)
        share = self._attached().next(buffer.numel(), buffer.device)
        if isinstance(share, Tensor):
            max_norm: float | Tensor = share.sqrt() * self.max_norm
        else:
            max_norm = math.sqrt(share) * self.max_norm
        factor = 1.0 if self._hook else 1.0 / self._world_size
        wire = self._wire(index, buffer)
        norm = clip_bucket_(
            buffer,
            max_norm,
            factor=factor,
            out=None if wire is buffer else wire,
            residual=None if wire is buffer else self._residual(index, buffer),
        )
        self._pass.append((norm, share, buffer))
        if bucket.is_last():
            self._last = self._pass
            self._attached().end(torch.stack([norm for norm, _, _ in self._last]))
        if self._hook is not None:
            return self._hook(self._hook_state, bucket)
        sent = self._allreduce(wire)
        return sent if wire is buffer else sent.then(lambda future: buffer.copy_(future.value()))

    def _flat(self, wire: Tensor) -> torch.futures.Future[Tensor]:
        sent = dist.all_reduce(wire, group=self._group, async_op=True).get_future()
        return sent.then(lambda future: future.value()[0])

    def _wire(self, index: int, buffer: Tensor) -> Tensor:
        if self.wire_dtype is None or buffer.dtype != torch.float32:
            return buffer
        wire = self._wires.get(index)
        if wire is None or wire.numel() != buffer.numel():
            wire = self._wires[index] = torch.empty_like(buffer, dtype=self.wire_dtype)
        return wire

    def _residual(self, index: int, buffer: Tensor) -> Tensor | None:
        """What new buckets have left over is unknown, and starts at zero."""
        if not self.error_feedback:
            return None
        residual = self._residuals.get(index)
        if residual is None or residual.numel() != buffer.numel():
            residual = self._residuals[index] = torch.zeros_like(buffer)
        return residual


def _on(share: float | Tensor, device: torch.device) -> Tensor:
    return share if isinstance(share, Tensor) else torch.full((), share, device=device)


def _clip_and_exchange(
    state: BucketClip, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    return state._exchange(bucket)
