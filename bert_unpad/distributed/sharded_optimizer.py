"""ShardedOptimizer: each rank updates its part of the parameters, and both exchanges overlap.

Stage 1 of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054), with buckets: gradients are
reduce-scattered while the backward pass goes on, and updated parameters are all-gathered while the
next forward pass does. Together that moves the bytes of one allreduce.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bert_unpad.distributed.bucket_clip import BucketClip, ClipReport
from bert_unpad.distributed.forward_waits import ForwardWaits
from bert_unpad.distributed.gradient_shards import GradientShards
from bert_unpad.distributed.shard_exchange import start_all_gather
from bert_unpad.distributed.shard_state import gather_state, slice_state


class ShardedOptimizer(torch.optim.Optimizer):
    """Averages the gradients of a replicated module and updates it, each rank one part.

    Takes the place of DDP and of the optimizer. Parameters lie in buckets, in the order in which
    the first backward pass made their gradients ready. As soon as a bucket's gradients are there,
    it is reduce-scattered: each rank gets the average of one part. `step` updates these parts with
    the given optimizer, which so keeps 1/ranks of its state, and all-gathers the parameters bucket
    by bucket. Each module waits for its own parameters right before its next forward pass.

    The optimizer must update each element from that element's gradient and state alone, as
    `torch.optim.AdamW` does, or be one of `bert_unpad.optim`: where LAMB, LANS and StableAdamW need
    sums over a whole parameter, these are added up over the ranks in one small allreduce (LANS:
    two). All ranks make the same calls. The first backward pass does not overlap.

    On two CPU ranks with `FusedAdam`, parameters have the bits that they have under DDP; otherwise
    they are equal to rounding, because sums have another order. The same calls on as many ranks
    give the same bits every time, also after a state has been saved and loaded, as long as the
    first backward pass makes gradients ready in the same order.

    A gradient is spent by `step`: parameters' `.grad` are None after the backward pass, except
    within `no_sync`. An update with a gradient that is not finite on some rank is left out on all.

    Use parameters through the forward passes of their modules or `state_dict`, or call `wait`
    first: others may not have arrived yet. Not for modules under torch.compile.

    Args:
        module: on its device, with the same parameters on all ranks; they and the buffers are
            broadcast from the first rank. Parameters must be contiguous and on one device.
        params: all of its parameters that require a gradient, or groups of them.
        optimizer_class: makes the optimizer of each rank's parts.
        process_group: the ranks; by default all. gloo serves CPUs and NCCL GPUs.
        bucket_cap_mb: size in MiB at which a bucket is full; None: 25, and 1 for the first.
        clip: bounds each rank's buckets before they are sent, and has the dtype on the wire.
        max_norm: bounds the norm of the averaged gradient, which takes one more small allreduce;
            infinity only computes it. By default None with `clip`, infinity without.
        find_unused_parameters: allow parameters without a gradient. The ranks then agree on them,
            which makes the host wait for the device. One that no rank has a gradient of is left
            out of the update.
        defaults: arguments of `optimizer_class`.

    Raises:
        ValueError: `params` are not the module's, one of them is not contiguous, or the optimizer
            is known to need whole parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        clip: BucketClip | None = None,
        max_norm: float | None = None,
        find_unused_parameters: bool = False,
        **defaults: Any,
    ) -> None:
        self.optim = optimizer_class(params, **defaults)
        """The optimizer of this rank's parts. Until the first backward pass it has all parameters;
        then each becomes a vector of what is in this rank's part, maybe without elements."""
        super().__init__(self.optim.param_groups, self.optim.defaults)
        self._share_groups()
        self._parameters = [p for group in self.param_groups for p in group["params"]]
        names = _names_of(module, self._parameters)
        self._group = process_group
        if getattr(self.optim, "updates_by", None) == "parameters":
            raise ValueError(
                "optimizer_class: expected one that can update parts of parameters, got "
                f"{type(self.optim).__name__}"
            )
        # Those of bert_unpad.optim; their sums over the ranks need every parameter on all of them.
        self._needs_all_parts = hasattr(self.optim, "shard_group")
        if hasattr(self.optim, "shard_group"):
            self.optim.shard_group = process_group or dist.group.WORLD
        self._arrivals: dict[int, Callable[[], None]] = {}  # of buckets on their way
        self._gather_order: list[int] = []
        self._slices: dict[nn.Parameter, nn.Parameter] = {}
        self._spans: dict[nn.Parameter, tuple[int, int]] = {}
        self._report: ClipReport | None = None
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.detach(), group=process_group, group_src=0)
        self._waits = ForwardWaits(module, self._wait_for)
        self._gradients = GradientShards(
            names, process_group, bucket_cap_mb, find_unused_parameters, self._arrivals
        )
        self.set_clipping(clip, max_norm)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "ShardedOptimizer: expected state_dict, as its hooks are on one module; "
            "got a copy or pickle of the whole"
        )

    @property
    def is_cut(self) -> bool:
        """Whether `optim` has this rank's parts, and no longer whole parameters."""
        return bool(self._slices)

    def _share_groups(self) -> None:
        self.param_groups, self.state = self.optim.param_groups, self.optim.state

    def set_clipping(self, clip: BucketClip | None, max_norm: float | None = None) -> None:
        """Replaces `clip` and `max_norm`, between two updates."""
        self._gradients.set_clipping(clip, max_norm)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes add up gradients on this rank, as DDP's `no_sync`."""
        before, self._gradients.syncs = self._gradients.syncs, False
        try:
            yield
        finally:
            self._gradients.syncs = before

    @torch.no_grad()
    def reduce_gradients(self) -> ClipReport:
        """Waits for the averaged gradient of this rank's parts, and clips it to `max_norm`.

        `step` calls this; call it before to see the report.

        Returns:
            With `clip` and no `max_norm`, the norms of this rank's buckets before clipping;
            otherwise the norm of the average, and its bound.

        Raises:
            RuntimeError: a parameter has no gradient, and `find_unused_parameters` is False.
        """
        if self._report is None:
            self._report, unused = self._gradients.reduce()
            if not self.is_cut:
                self._cut()
            for bucket in self._gradients.buckets:
                gradients = bucket.shares(bucket.shard)
                for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
                    updated = parameter not in unused and (
                        self._needs_all_parts or gradient.numel()
                    )
                    self._slices[parameter].grad = gradient if updated else None
        return self._report

    def _cut(self) -> None:
        """Replaces the parameters of the optimizer, and its state, by this rank's parts."""
        part_of = getattr(self.optim, "part_of", {})
        for bucket in self._gradients.buckets:
            parts = bucket.shares(bucket.weights[bucket.part])
            for parameter, span, part in zip(bucket.parameters, bucket.spans(), parts, strict=True):
                self._slices[parameter] = nn.Parameter(part)
                self._spans[parameter] = span
                part_of[self._slices[parameter]] = parameter.shape, span
        whole, self.optim.state = self.optim.state, defaultdict(dict)
        for p, part in self._slices.items():
            if p in whole:
                self.optim.state[part] = slice_state(whole[p], p, *self._spans[p])
        for group in self.optim.param_groups:
            group["params"] = [self._slices[p] for p in group["params"]]
        self._share_groups()
        # Ranks may have used different modules in the first pass, but must send in one order.
        order = torch.tensor(
            self._waits.assign(self._gradients.bucket_of), device=self._parameters[0].device
        )
        dist.broadcast(order, group_src=0, group=self._group)
        self._gather_order = order.tolist()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parts, and starts to send them to the others.

        Args:
            closure: computes the loss and its gradient.

        Returns:
            The result of the closure; None without one.

        Raises:
            RuntimeError: see `reduce_gradients`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        finite = self.reduce_gradients().finite
        self.wait()  # for what no forward pass has used
        if getattr(self.optim, "_step_supports_amp_scaling", False):
            self.optim.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.optim.step()
        elif bool(finite):
            self.optim.step()
        for number in self._gather_order:
            bucket = self._gradients.buckets[number]
            self._arrivals[number] = start_all_gather(bucket.weights, bucket.part, self._group)
        torch.autograd.graph.increment_version(self._parameters)
        self._begin_pass()
        return loss

    def _begin_pass(self) -> None:
        self._report = None
        self._gradients.begin_pass()

    def wait(self) -> None:
        """Waits until all updated parameters have arrived."""
        self._wait_for(None)

    def _wait_for(self, buckets: Sequence[int] | None) -> None:
        for number in self._gather_order if buckets is None else buckets:
            arrived = self._arrivals.pop(number, None)
            if arrived is not None:
                arrived()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, also those on their way; `step` leaves none."""
        self._report = None
        self._gradients.drop()

    def whole_state(
        self, wanted: Iterable[nn.Parameter], device: torch.device | str | None = None
    ) -> dict[nn.Parameter, dict[str, Any]]:
        """Gathers the state of whole parameters from all ranks, in their shapes.

        Args:
            wanted: parameters whose state to return; ranks may want different ones.
            device: where the results are; None: on the parameters' device.
        """
        kept = set(wanted)
        if not self.is_cut:
            return {p: dict(self.optim.state.get(p, {})) for p in self._parameters if p in kept}
        parts = {p: self.optim.state.get(part, {}) for p, part in self._slices.items()}
        return gather_state(self._gradients.buckets, parts, kept, device, self._group)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as that of `optimizer_class` on whole parameters; all ranks call it.

        It loads into that optimizer without shards, and on any number of ranks.
        """
        state = self.whole_state(self._parameters)
        packed = self.optim.state_dict()
        packed["state"] = {i: state[p] for i, p in enumerate(self._parameters) if state[p]}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a `state_dict` of this class, or of the optimizer without shards.

        Raises:
            ValueError: its groups or shapes differ from these.
        """
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        if self.is_cut and len(ids) == len(self._parameters):
            parts = {
                i: slice_state(state_dict["state"][i], p, *self._spans[p])
                for i, p in zip(ids, self._parameters, strict=True)
                if i in state_dict["state"]
            }
            state_dict = {**state_dict, "state": parts}
        self.optim.load_state_dict(state_dict)
        self._share_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, in the constructor only: buckets do not grow."""
        if hasattr(self, "_parameters"):
            raise RuntimeError("ShardedOptimizer: expected all parameters in the constructor")
        super().add_param_group(param_group)


def _names_of(module: nn.Module, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, str]:
    """The names of parameters in a module, which must be those that require a gradient."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    given = set(parameters)
    if strange := len(given - names.keys()):
        raise ValueError(f"params: expected parameters of the module, got {strange} others")
    left = [name for p, name in names.items() if p.requires_grad and p not in given]
    if left:
        raise ValueError(f"params: expected all that require a gradient, not {', '.join(left)}")
    for parameter in parameters:
        if not parameter.is_contiguous():
            raise ValueError(
                f"params: expected contiguous parameters, got {names[parameter]} with strides "
                f"{parameter.stride()}"
            )
    return {p: name for p, name in names.items() if p in given}
