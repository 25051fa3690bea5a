"""Averages gradients while the backward pass goes on, and leaves each rank one part of each bucket.

What DDP does, with a reduce-scatter instead of the allreduce.
"""

from collections.abc import Callable, Container, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_unpad.distributed.bucket_clip import BucketClip, ClipReport
from bert_unpad.distributed.shard_buckets import Bucket, plan_buckets
from bert_unpad.distributed.shard_exchange import start_reduce_scatter
from bert_unpad.ops import multi_tensor_l2norm, multi_tensor_scale_

_FIRST_BUCKET, _BUCKET = 2**20, 25 * 2**20  # bytes, as DDP's


class GradientShards:
    """The gradients of some parameters, by hooks on them; see `ShardedOptimizer`.

    Args:
        names: all parameters, with their names.
        group: the ranks; None for all.
        bucket_cap_mb: size in MiB at which a bucket is full; None: 25, and 1 for the first.
        find_unused: allow parameters without a gradient.
        arriving: numbers of the buckets whose parameters have not been updated yet.
    """

    def __init__(
        self,
        names: Mapping[nn.Parameter, str],
        group: dist.ProcessGroup | None,
        bucket_cap_mb: float | None,
        find_unused: bool,
        arriving: Container[int],
    ) -> None:
        self.buckets: list[Bucket] = []
        """Buckets in the order in which they become ready; made by the first `reduce`."""
        self.bucket_of: dict[nn.Parameter, int] = {}
        """The number of each parameter's bucket."""
        self.syncs = True
        """Whether backward passes send gradients."""
        self._names, self._group = names, group
        self._parameters = list(names)
        self._ranks = dist.get_world_size(group)
        cap = None if bucket_cap_mb is None else int(bucket_cap_mb * 2**20)
        self._caps = (_FIRST_BUCKET, _BUCKET) if cap is None else (cap, cap)
        self._find_unused = find_unused
        self._arriving = arriving
        self._views: dict[nn.Parameter, Tensor] = {}  # of the buckets' gradients
        self.begin_pass()
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def set_clipping(self, clip: BucketClip | None, max_norm: float | None) -> None:
        """Bounds each rank's buckets, and the average's norm; see `ShardedOptimizer`."""
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm: expected a number above 0, got {max_norm}")
        self._clip = clip
        self._max_norm = float("inf") if max_norm is None else max_norm
        self._clips_average = clip is None or max_norm is not None
        if clip is not None:
            clip.attach_to_shards(sum(p.numel() for p in self._parameters))

    def begin_pass(self) -> None:
        """Forgets the gradients of the pass before."""
        self._ready: dict[nn.Parameter, None] = {}  # in the order of readiness
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._sent: list[Callable[[], None]] = []
        self._report: ClipReport | None = None

    def drop(self) -> None:
        """Drops all gradients, also those on their way."""
        if self._report is None:
            for finish in self._sent:
                finish()
        for parameter in self._parameters:
            parameter.grad = None
        self.begin_pass()

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self.syncs:
            return
        if parameter in self._ready or self._report is not None:
            raise RuntimeError(
                "ShardedOptimizer: expected one backward pass per step, got another; run all but "
                "the last under no_sync()"
            )
        self._ready[parameter] = None
        if not self.buckets:
            return
        number = self.bucket_of[parameter]
        if number in self._arriving:
            raise RuntimeError(
                f"ShardedOptimizer: {self._names[parameter]} was used before its update arrived; "
                "call wait() before using parameters outside of their modules' forward passes"
            )
        self._fill(parameter)
        self._missing[number] -= 1
        self._send_what_is_full()

    def _fill(self, parameter: nn.Parameter) -> None:
        """Moves a parameter's gradient into its bucket; None counts as zero."""
        view = self._views[parameter]
        if parameter.grad is None:
            view.zero_()
        elif self._clip is None:
            torch.mul(parameter.grad, 1.0 / self._ranks, out=view)
        else:
            view.copy_(parameter.grad)  # whose norm is wanted
        parameter.grad = None

    def _send_what_is_full(self) -> None:
        """Sends buckets in their order, which is the same on all ranks."""
        while len(self._sent) < len(self.buckets) and not self._missing[len(self._sent)]:
            number = len(self._sent)
            bucket = self.buckets[number]
            bucket.clear_gaps()
            wire = bucket.gradient
            if self._clip is not None:
                last = number == len(self.buckets) - 1
                wire = self._clip.clip_bucket(
                    wire, number, last, 1.0 / self._ranks, bucket.shard, bucket.numel
                )
            scratch = bucket.scratch_like(wire)
            self._sent.append(start_reduce_scatter(wire, bucket.shard, self._group, scratch))

    def reduce(self) -> tuple[ClipReport, set[nn.Parameter]]:
        """Waits for the average of this rank's parts, and clips it.

        Returns:
            A report, and the parameters that no rank has a gradient of.

        Raises:
            RuntimeError: a parameter has no gradient here, which `find_unused` does not allow.
        """
        missing = [p for p in self._parameters if p not in self._ready and p.grad is None]
        if missing and not self._find_unused:
            names = ", ".join(self._names[p] for p in missing[:5])
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise RuntimeError(
                f"ShardedOptimizer: expected a gradient of every parameter, got none of {names}"
                f"{more}; give find_unused_parameters=True if that may happen"
            )
        if not self.buckets:
            self._build()
        for parameter in self._parameters:
            if parameter not in self._ready or parameter.grad is not None:
                self._fill(parameter)
        self._missing = [0] * len(self.buckets)
        self._send_what_is_full()
        # After the buckets, which other ranks may have sent during their backward passes.
        unused = self._agree_on_unused(missing) if self._find_unused else set()
        for finish in self._sent:
            finish()
        self._report = self._clip_average()
        return self._report, unused

    def _agree_on_unused(self, missing: Sequence[nn.Parameter]) -> set[nn.Parameter]:
        absent = set(missing)
        device = self._parameters[0].device
        used = torch.tensor([float(p not in absent) for p in self._parameters], device=device)
        dist.all_reduce(used, group=self._group)
        return {p for p, count in zip(self._parameters, used.tolist(), strict=True) if not count}

    def _clip_average(self) -> ClipReport:
        if self._clip is not None and not self._clips_average:
            return self._clip.report()
        shards = [bucket.shard for bucket in self.buckets]
        square = multi_tensor_l2norm(shards)[0].square()
        dist.all_reduce(square, group=self._group)
        norm = square.sqrt()
        if self._max_norm != float("inf"):
            # As torch.nn.utils.clip_grads_with_norm_ does it.
            multi_tensor_scale_(shards, (self._max_norm / (norm + 1e-6)).clamp(max=1.0))
        bound = torch.full((1,), self._max_norm, device=norm.device)
        return ClipReport(norm.reshape(1), bound, norm.isfinite())

    def _build(self) -> None:
        """Makes buckets in the order in which gradients got ready on the first rank."""
        numbers = {p: number for number, p in enumerate(self._parameters)}
        # Those without one at the end; they get ready in about the reverse order of use.
        order = list(dict.fromkeys([*self._ready, *reversed(self._parameters)]))
        common = torch.tensor([numbers[p] for p in order], device=self._parameters[0].device)
        dist.broadcast(common, group=self._group, group_src=0)
        order = [self._parameters[number] for number in common.tolist()]
        rank = dist.get_rank(self._group)
        for number, parameters in enumerate(plan_buckets(order, *self._caps)):
            bucket = Bucket(parameters, rank, self._ranks)
            self.buckets.append(bucket)
            self.bucket_of |= dict.fromkeys(parameters, number)
            self._views |= zip(parameters, bucket.views(bucket.gradient), strict=True)
