"""PartialSync: local updates under DDP, with the model averaged layer by layer (DreamDDP).

DDP needs annotations of `partial_sync_hook` that are objects, not strings. So this module must not
use `from __future__ import annotations`.
"""

import time
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from bert_unpad.experimental.dream_ddp.sync_schedule import schedule_layers

PROFILED = 5
"""Steps that are timed before the schedule is made."""

Mark = float | torch.cuda.Event


class PartialSync:
    """State of `partial_sync_hook`: which layers' parameters are averaged in which step.

    Tang et al., "DreamDDP: Accelerating data parallel distributed LLM training with layer-wise
    scheduled partial synchronization" (2025), arXiv:2502.11058. Each rank updates its model with
    its own gradient. In a period of H steps the parameters of every layer are averaged over the
    ranks at least once. A layer's average starts as soon as its gradient is ready, since the
    backward pass does not need its weights any more, and runs beside the rest of the backward pass.
    `schedule_layers` chooses the layers of each step.

    A step on all ranks: backward pass, `finish`, update. The first `start` steps average gradients.
    So do `PROFILED` more, which are timed: in these the backward pass waits for each bucket, so
    that both times can be told apart. From then on gradients stay local.

    As in the authors' code (github.com/trl730109/DreamDDP), a step adds the local update to the
    average of the weights from before that update, and optimizer states stay local. Chosen here: a
    layer is one of DDP's buckets, the parameters whose gradients are ready together. Times are
    those of training itself, medians over the steps and means over the ranks. A bucket's parameters
    travel as a copy, in one message, which takes the memory of the layers of the largest step; the
    authors average in place, one message for each parameter.

    Args:
        period: steps in which every layer is averaged at least once.
        start: steps with averaged gradients before the timed ones.
        group: the ranks that average, those of the DDP model; None: all.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, period: int, start: int = 0, group: dist.ProcessGroup | None = None) -> None:
        if period < 2:
            raise ValueError(f"period: expected a number >= 2, got {period}")
        if start < 0:
            raise ValueError(f"start: expected a number >= 0, got {start}")
        self.period, self.start, self.group = period, start, group
        self.step = 0
        """Steps so far."""
        self.schedule: list[list[int]] | None = None
        """The buckets that each step of a period averages; None before the times are known. From
        then on the ranks' models differ."""
        self._profile: Tensor | None = None  # float64 [2, buckets]: backward, exchange; seconds
        self._measured: list[Tensor] = []  # the same of each timed step, on this rank
        self._sizes: list[int] = []  # elements of each bucket of the last pass
        self._timed_sizes: list[int] = []  # of the passes that `_measured` is of
        self._marks: list[tuple[Mark, Mark, Mark]] = []  # bucket ready, link free, bucket sent
        self._averages: list[tuple[list[Tensor], Tensor, dist.Work]] = []

    def finish(self) -> None:
        """Puts averaged parameters into the model; after the backward pass, before the update."""
        for parameters, flat, work in self._averages:
            work.wait()
            flat.div_(self._world_size)
            torch._foreach_copy_(parameters, _unflatten_dense_tensors(flat, parameters))
        self._averages = []
        if self._marks:
            if self._sizes != self._timed_sizes:  # DDP forms other buckets after its first pass
                self._measured, self._timed_sizes = [], self._sizes
            self._measured.append(_seconds(self._marks))
            self._marks = []
            if len(self._measured) == PROFILED:
                self._make_schedule()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same schedule, besides `step`.

        Tensors, lists and None.
        """
        return {
            "sizes": list(self._sizes),
            "profile": self._profile,
            "measured": list(self._measured),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`, once backward passes have formed DDP's buckets.

        If the state is of other buckets, it has no effect, and these are timed.
        """
        if state["sizes"] != self._sizes:
            return
        self._measured, self._profile = list(state["measured"]), state["profile"]
        self._timed_sizes = self._sizes
        if self._profile is not None:
            self._set_schedule(self._profile)

    @property
    def _world_size(self) -> int:
        return dist.get_world_size(self.group)

    def _sync_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer, index = bucket.buffer(), bucket.index()
        if index == 0:  # an error may have interrupted the previous pass
            self._sizes, self._marks, self._averages = [], [], []
        self._sizes.append(buffer.numel())
        if self.step < self.start:
            return self._average(buffer)
        if self.schedule is None:
            self._time_average(buffer)
        elif index in self.schedule[self.step % self.period]:
            self._start_average(bucket.parameters())
        done: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        done.set_result(buffer)
        return done

    def _average(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        buffer.div_(self._world_size)
        sent = dist.all_reduce(buffer, group=self.group, async_op=True).get_future()
        return sent.then(lambda future: future.value()[0])

    def _start_average(self, parameters: list[Tensor]) -> None:
        parameters = [p.detach() for p in parameters]
        flat = torch.cat([p.reshape(-1) for p in parameters])
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self._averages.append((parameters, flat, work))

    def _time_average(self, buffer: Tensor) -> None:
        """Averages a bucket of gradients, which are as many bytes as its parameters."""
        ready = _mark(buffer.device)
        # So that the exchange is not timed together with the waiting for the slowest rank.
        dist.all_reduce(buffer.new_zeros(1), group=self.group)
        free = _mark(buffer.device)
        dist.all_reduce(buffer.div_(self._world_size), group=self.group)
        self._marks.append((ready, free, _mark(buffer.device)))
        self._device = buffer.device

    def _make_schedule(self) -> None:
        """Makes the schedule from the times of all ranks; the same on all of them."""
        profile = torch.stack(self._measured).median(0).values.to(self._device)
        dist.all_reduce(profile, group=self.group)
        profile /= self._world_size
        dist.broadcast(profile, group_src=0, group=self.group)
        self._profile = profile.cpu()
        self._set_schedule(self._profile)

    def _set_schedule(self, profile: Tensor) -> None:
        backward, exchange = profile.tolist()
        self.schedule = schedule_layers(backward, exchange, self.period)


def _mark(device: torch.device) -> Mark:
    """This moment; on a GPU, the moment when it gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(marks: list[tuple[Mark, Mark, Mark]]) -> Tensor:
    """The times of a step's backward passes and exchanges by bucket, float64 [2, buckets]."""

    def between(start: Mark, end: Mark) -> float:
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        assert not isinstance(start, float)
        assert not isinstance(end, float)
        end.synchronize()
        return start.elapsed_time(end) / 1000

    exchange = [between(free, sent) for _, free, sent in marks]
    gaps = [between(before[2], after[0]) for before, after in pairwise(marks)]
    return torch.tensor([[0.0, *gaps], exchange], dtype=torch.float64)  # nothing needs the first


def partial_sync_hook(
    state: PartialSync, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook that leaves gradients local and averages layers; see its state."""
    return state._sync_bucket(bucket)
