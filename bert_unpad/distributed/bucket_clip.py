"""BucketClip: a DDP communication hook that clips each rank's buckets before they are averaged.

DDP checks the hook's parameter name, and needs annotations that are objects, not strings. So this
module must not use `from __future__ import annotations`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.distributed.allreduce import Allreduce
from bert_unpad.distributed.bucket_shares import BucketShares, Policy
from bert_unpad.ops import clip_bucket_

Hook = Callable[[Any, Any], torch.futures.Future[Tensor]]
_FLOAT16_MAX = 65504.0


class Bucket(Protocol):
    """What is needed of a bucket; DDP's have it."""

    def buffer(self) -> Tensor:
        """The gradients, one after another; the average replaces them."""

    def index(self) -> int:
        """The bucket's number within the pass, from 0."""

    def is_last(self) -> bool:
        """Whether the pass ends with it."""


@dataclass(frozen=True)
class ClipReport:
    """Norms and bounds of the last backward pass that synchronised gradients, on the device."""

    norms: Tensor
    """float32 [buckets]: norms of this rank's buckets before clipping, in the order of sending."""
    bounds: Tensor
    """float32 [buckets]: the bound on the norm of each bucket."""
    finite: Tensor
    """bool []: whether the averaged gradient is finite; the same on all ranks."""

    @property
    def norm(self) -> Tensor:
        """float32 []: the norm of this rank's whole gradient before clipping."""
        return torch.linalg.vector_norm(self.norms)

    @property
    def clipped(self) -> Tensor:
        """int64 []: the number of this rank's buckets that were clipped."""
        return (self.norms > self.bounds).sum()


class BucketClip:
    """Bounds the norm of the averaged gradient by clipping each rank's buckets as they get ready.

    Clipping the whole gradient before the average has to wait for the last bucket, and so gives up
    the overlap of communication and backward pass. Here each rank clips bucket b to a bound C_b,
    and the squares of these bounds add up to max_norm^2. Then a rank's clipped gradient has norm at
    most sqrt(sum C_b^2) = max_norm, and by the triangle inequality so has the average, however
    large the gradient of one rank is. Bounds may differ between ranks. `policy` decides how
    max_norm^2 is divided among the buckets:

    - `equal`: C_b = max_norm / sqrt(N) with N buckets.
    - `numel`: C_b = max_norm * sqrt(n_b / n), with n_b of all n elements in bucket b.
    - `adaptive`: C_b = max_norm * sqrt(s_b), with s_b the bucket's share of this rank's squared
      norm in the previous step. (1 % of the budget is divided by size, so that every bucket gets
      some.) If shares change little from step to step, this preserves the gradient's direction
      almost as well as clipping it as a whole. Norms that are not finite are ignored.

    N and n_b refer to the buckets that DDP really uses. DDP may rebuild its buckets, as it does
    after the first pass. If the buckets of a pass differ from those of the previous one, bounds are
    divided by size from the first new bucket on; their squares still add up to max_norm^2.

    The bound holds up to rounding: 1e-5 of the norm, and half a unit in the last place of each
    number that is cast to a 16-bit `wire_dtype`, added up or averaged in it.

    A bucket that holds an infinity or a NaN arrives as NaN throughout, on every rank. Then
    `report().finite` is false on all ranks, and all can skip the update together.

    The host never waits. Works with accumulation in `no_sync` (the accumulated gradient is clipped
    once), `gradient_as_bucket_view`, `static_graph`, `find_unused_parameters` and buckets of
    different dtypes.

    Args:
        max_norm: bound on the norm of the averaged gradient; with infinity, buckets are only cast.
        policy: equal, numel or adaptive.
        wire_dtype: dtype in which float32 buckets are sent, bfloat16 or float16; None sends each
            bucket in its own dtype.
        error_feedback: add the rounding error of the cast to `wire_dtype` to the next step's
            gradient before it is clipped. Takes as much float32 memory as the gradient.
        loss_scale: factor that the loss was multiplied by, float32 [] on the device. Buckets are
            first divided by it, so that norms, bounds and residuals are those of the unscaled
            gradient.

    Raises:
        ValueError: the policy is unknown, or a number or dtype is out of range.
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
            raise ValueError(f"max_norm: expected a number above 0, got {max_norm}")
        if wire_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"wire_dtype: expected None, torch.bfloat16 or torch.float16, got {wire_dtype}"
            )
        if wire_dtype == torch.float16 and max_norm > _FLOAT16_MAX:
            raise ValueError(
                f"max_norm: expected at most {_FLOAT16_MAX:.0f}, the largest float16, "
                f"got {max_norm}"
            )
        if error_feedback and wire_dtype is None:
            raise ValueError(
                "error_feedback: expected False without a wire_dtype, which alone loses precision"
            )
        BucketShares(policy, 0)  # checks the name
        self.max_norm = float(max_norm)
        self.policy = policy
        self.wire_dtype = wire_dtype
        self.error_feedback = error_feedback
        self.loss_scale = loss_scale
        self._shares: BucketShares | None = None
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
        """Registers this as the communication hook of `model`, which must not have another one.

        Args:
            model: a model before its first backward pass.
            hook: averages the clipped bucket instead of an allreduce, for example PyTorch's
                `powerSGD_hook` or `post_localSGD_hook`. What it adds itself (the error feedback of
                PowerSGD) is not bounded.
            state: the state that `hook` is called with.
            allreduce: sums clipped buckets over all ranks of the model, for example
                `HierarchicalAllreduce`; by default `torch.distributed.all_reduce`.

        Returns:
            This object.

        Raises:
            RuntimeError: this BucketClip is attached already, or the model has another hook.
            ValueError: a `hook` is given together with a wire dtype or an allreduce.
        """
        self._check_free()
        if hook is not None and self.wire_dtype is not None:
            raise ValueError(
                "hook: expected none with a wire_dtype; a hook sends buckets in their own dtype"
            )
        if hook is not None and allreduce is not None:
            raise ValueError("hook and allreduce: expected one of them, got both")
        ignored = set(getattr(model, "parameters_to_ignore", ()))
        numel = sum(
            parameter.numel()
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        )
        model.register_comm_hook(self, _clip_and_sync)
        self._hook, self._hook_state = hook, state
        self._prepare(numel, model.process_group, allreduce)
        return self

    def attach_to_shards(self, numel: int) -> None:
        """Prepares for `clip_bucket` on buckets of `numel` elements in all, by another than DDP.

        Raises:
            RuntimeError: this BucketClip is attached already.
        """
        self._check_free()
        self._hook = None
        self._shares = BucketShares(self.policy, numel)

    def attach_buckets(
        self,
        sizes: Sequence[int],
        group: dist.ProcessGroup | None = None,
        allreduce: Allreduce | None = None,
    ) -> "BucketClip":
        """Makes ready for `sync`, with which the caller hands over each bucket, without DDP.

        Args:
            sizes: elements of each bucket of a pass, in the order of `sync`.
            group: the ranks to average over; None: all.
            allreduce: as in `attach`.

        Returns:
            This object.

        Raises:
            RuntimeError: this BucketClip is attached already.
        """
        self._check_free()
        self._hook = self._hook_state = None
        self._prepare(sum(sizes), group, allreduce)
        self._attached().load_state_dict({"sizes": list(sizes), "squares": []})
        return self

    def _check_free(self) -> None:
        if self._shares is not None:
            raise RuntimeError("this BucketClip is already attached to a model")

    def _prepare(
        self, numel: int, group: dist.ProcessGroup | None, allreduce: Allreduce | None
    ) -> None:
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._allreduce = self._flat if allreduce is None else allreduce
        self._shares = BucketShares(self.policy, numel)

    def report(self) -> ClipReport:
        """Reports on the last backward pass that synchronised gradients; call it before the next.

        Raises:
            RuntimeError: there was no such pass.
        """
        if not self._last:
            raise RuntimeError("no gradient has been synchronised yet")
        norms, shares, results = zip(*self._last, strict=True)
        device = norms[0].device
        bounds = torch.stack([_on(share, device) for share in shares]).sqrt() * self.max_norm
        # A bucket that is not finite is NaN throughout, so its first number shows it. A hook may
        # change that, so all its numbers are checked: the least and the greatest are finite only if
        # all are, and take a tenth of the time of isfinite() on a CPU.
        seen = [result if self._hook else result[:1] for result in results]
        ends = [end.float() for result in seen for end in torch.aminmax(result)]
        finite = torch.stack(ends).isfinite().all()
        return ClipReport(torch.stack(norms), bounds, finite)

    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank's bounds of the next step depend on; leaves out residuals."""
        return self._attached().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`; has no effect if the buckets differ by now."""
        self._attached().load_state_dict(state)

    def _attached(self) -> BucketShares:
        if self._shares is None:
            raise RuntimeError("this BucketClip is not attached to a model")
        return self._shares

    def sync(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Clips a bucket and starts to average it; DDP calls this through its hook.

        Args:
            bucket: the next one of this pass.

        Returns:
            A future of the average, which is in the bucket's buffer then.
        """
        buffer = bucket.buffer()
        factor = 1.0 if self._hook else 1.0 / self._world_size
        wire = self.clip_bucket(buffer, bucket.index(), bucket.is_last(), factor, buffer)
        if self._hook is not None:
            return self._hook(self._hook_state, bucket)
        sent = self._allreduce(wire)
        return sent if wire is buffer else sent.then(lambda future: buffer.copy_(future.value()))

    def clip_bucket(
        self,
        buffer: Tensor,
        index: int,
        is_last: bool,
        factor: float,
        result: Tensor,
        numel: int | None = None,
    ) -> Tensor:
        """Clips one bucket of a pass, which begins with bucket 0.

        Args:
            buffer: this rank's gradients; overwritten without a wire dtype.
            index: of the bucket.
            is_last: whether this bucket ends the pass.
            factor: multiplies the clipped bucket.
            result: will hold the average of the bucket, or a part of it, when `report` is called.
            numel: elements of parameters in the bucket; None: all of it.

        Returns:
            What to send: `buffer`, or a tensor of the wire dtype, which the next pass overwrites.
        """
        if index == 0:
            self._pass = []  # an error may have interrupted the previous pass
        if self.loss_scale is not None:
            buffer.div_(self.loss_scale)
        share = self._attached().next(numel or buffer.numel(), buffer.device)
        if isinstance(share, Tensor):
            max_norm: float | Tensor = share.sqrt() * self.max_norm
        else:
            max_norm = math.sqrt(share) * self.max_norm
        wire = self._wire(index, buffer)
        norm = clip_bucket_(
            buffer,
            max_norm,
            factor=factor,
            out=None if wire is buffer else wire,
            residual=None if wire is buffer else self._residual(index, buffer),
        )
        self._pass.append((norm, share, result))
        if is_last:
            self._last = self._pass
            self._attached().end(torch.stack([norm for norm, _, _ in self._last]))
        return wire

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
        """Returns the rounding error of the bucket's last cast; zero for a new bucket."""
        if not self.error_feedback:
            return None
        residual = self._residuals.get(index)
        if residual is None or residual.numel() != buffer.numel():
            residual = self._residuals[index] = torch.zeros_like(buffer)
        return residual


def _on(share: float | Tensor, device: torch.device) -> Tensor:
    return share if isinstance(share, Tensor) else torch.full((), share, device=device)


def _clip_and_sync(
    state: BucketClip, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    return state.sync(bucket)
