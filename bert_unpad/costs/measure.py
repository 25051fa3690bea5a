"""What a calibration times on a rank: passes and updates, compression, allreduces.

Each is sampled many times, in turn with the others, and its median counts: when the machine slows
down or speeds up, that hits all of them alike. With several ranks all sample at the same time, and
the slowest counts, because all wait for it in training.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.costs.network import Link
from bert_unpad.costs.timing import random_inputs, run_pass
from bert_unpad.costs.workload import Workload
from bert_unpad.distributed import BucketClip
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.config import ClipConfig, CommConfig, OptimizerConfig
from bert_unpad.pretrain.gradients.clipping import clip_gradients_, make_bucket_clip
from bert_unpad.pretrain.gradients.comm_hooks import build_comm_hook
from bert_unpad.pretrain.parallel.ddp import wrap_in_ddp
from bert_unpad.pretrain.parallel.way import make_empty_passes
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.update.optimizer import build_optimizer

_LINK_SIZES = tuple(4**n for n in range(5, 13))
"""Numbers of an allreduce: 4 KiB to 64 MiB."""


def dtype_of(workload: Workload) -> torch.dtype:
    """The type of the activations; with fp8 products alone are in 8 bits."""
    names = {"fp16": torch.float16, "fp32": torch.float32}
    return names.get(workload.precision, torch.bfloat16)


def time_together(step: Callable[[], object], device: torch.device) -> float:
    """Seconds that a step takes on the slowest rank; all ranks begin it at the same time."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several:
        dist.barrier()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = time.perf_counter() - start
    if not several:
        return taken
    slowest = torch.tensor([taken], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


class PassTimes(NamedTuple):
    """Median seconds of what `PassTimer` times."""

    passes: list[float]
    """A pass of each batch, which makes new gradients."""
    accumulate: float
    """What a pass takes longer if it adds to gradients that are there."""
    clip: float
    """Clipping."""
    update: float
    """The optimizer."""


# Batches: what part of the longest length sequences have, and how many there are. Tokens and their
# squares vary independently, which tells linear from quadratic and fixed cost.
_SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 4))
_SMALLEST = 3


class PassTimer:
    """Passes of several batches, clipping, and the optimizer.

    Args:
        workload: whose model, precision, optimizer and longest sequence are used.
        model: in training mode, on its device; its weights hardly change.
        rows: multiplies every batch, so that a fast device has enough to do.
    """

    def __init__(self, workload: Workload, model: nn.Module, rows: int = 1) -> None:
        longest = workload.longest
        self.batches = [[max(longest // part, 2)] * (count * rows) for part, count in _SHAPES]
        self._model = model
        self._device = next(model.parameters()).device
        self._dtype = dtype_of(workload)
        self._optimizer = build_optimizer(model, OptimizerConfig(name=workload.optimizer, lr=1e-6))
        self._inputs = [
            random_inputs(workload.config, lengths).to(self._device) for lengths in self.batches
        ]
        self._rounds: list[list[float]] = []
        self._round()  # loads what is loaded lazily, makes the optimizer's state

    def sample(self) -> float:
        """Times each batch, clipping and the optimizer once; returns their seconds together."""
        self._rounds.append(self._round())
        return sum(self._rounds[-1])

    def medians(self) -> PassTimes:
        """The median seconds of everything."""
        *passes, again, clip, update = (
            statistics.median(column) for column in zip(*self._rounds, strict=True)
        )
        return PassTimes(passes, max(again - passes[_SMALLEST], 0.0), clip, update)

    def _round(self) -> list[float]:
        passes = [partial(run_pass, self._model, one, self._dtype) for one in self._inputs]
        taken = []
        for one_pass in passes:
            self._optimizer.zero_grad()  # as in the first pass of an update
            taken.append(time_together(one_pass, self._device))
        for step in (passes[_SMALLEST], self._clip, self._optimizer.step):
            taken.append(time_together(step, self._device))
        return taken

    def _clip(self) -> None:
        clip_gradients_(self._model.parameters(), 1.0)


class CompressionTimer:
    """What a sync computes: how much longer a pass takes with it than without.

    The group is this rank alone, so that nothing travels.

    Args:
        workload: what is trained.
        model: copied.
        compression: none, bf16 or power_sgd.
        alone: the group of this rank alone.
        clip: how buckets are clipped; by default they are not.
        bucket_mb: limit of a bucket in MiB, see `make_replica`.
    """

    def __init__(
        self,
        workload: Workload,
        model: EncoderForPreTraining,
        compression: str,
        alone: dist.ProcessGroup,
        clip: ClipConfig | None = None,
        bucket_mb: float | None = None,
    ) -> None:
        self._device = next(model.parameters()).device
        self._replica, self._bucket = make_replica(
            copy.deepcopy(model), compression, alone, bucket_mb, clip=clip
        )
        # A short batch: only the difference counts.
        lengths = [min(workload.longest, 8)]
        self._inputs = random_inputs(workload.config, lengths).to(self._device)
        self._dtype = dtype_of(workload)
        self._synced: list[float] = []
        self._bare: list[float] = []
        self._sync()  # loads what is loaded lazily

    def sample(self) -> float:
        """Times a pass with the sync and one without; returns their seconds together."""
        self._replica.zero_grad()
        self._synced.append(time_together(self._sync, self._device))
        self._replica.zero_grad()
        with self._replica.no_sync():
            self._bare.append(time_together(self._run, self._device))
        return self._synced[-1] + self._bare[-1]

    def median(self) -> float:
        """Seconds that the sync computes, at least 0."""
        return max(statistics.median(self._synced) - statistics.median(self._bare), 0.0)

    def _run(self) -> None:
        run_pass(self._replica, self._inputs, self._dtype)

    def _sync(self) -> None:
        self._run()
        if self._bucket is not None:
            self._bucket.report()


def link_times(
    device: torch.device,
    seconds: float,
    lengths: Sequence[int] = _LINK_SIZES,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[float], list[float]]:
    """Bytes and median seconds of allreduces.

    Args:
        device: where the tensors lie.
        seconds: that it may take, about; on a slow network large sizes are left out.
        lengths: numbers of each allreduce, ascending.
        group: of this rank, one of equal groups that do the same side by side; None: all ranks.
    """
    share = seconds / len(lengths)
    sizes, times = [], []
    for numbers in lengths:
        tensor = torch.zeros(numbers, device=device)
        allreduce = partial(dist.all_reduce, tensor, group=group)
        allreduce()
        once = time_together(allreduce, device)
        rounds = round(min(max(share / once, 3), 50))
        taken = [time_together(allreduce, device) for _ in range(rounds)]
        sizes.append(4.0 * numbers)
        times.append(statistics.median(taken))
        if len(times) > 1 and times[-1] > share:
            break
    return sizes, times


def fit_link(sizes: Sequence[float], seconds: Sequence[float], ranks: int) -> Link:
    """Fits latency and bandwidth, neither negative, to ring allreduces by least relative error.

    Args:
        sizes: bytes of each, ascending; at least 2.
        seconds: that each took.
        ranks: that took part, 2 or more.

    Raises:
        ValueError: there are fewer than 2 sizes or ranks.
    """
    if len(sizes) < 2 or len(seconds) != len(sizes):
        raise ValueError(f"sizes, seconds: expected 2 or more of both, got {len(sizes)}")
    if ranks < 2:
        raise ValueError(f"ranks: expected 2 or more, got {ranks}")
    terms = np.array([[2 * (ranks - 1), 2 * (ranks - 1) / ranks * size] for size in sizes])
    scaled = terms / np.asarray(seconds)[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(scaled, np.ones(len(sizes)), rcond=None)
    if latency < 0 or per_byte <= 0:  # noise; the largest size then says most of what matters
        latency, per_byte = 0.0, seconds[-1] / terms[-1, 1]
    return Link(float(latency), float(1 / per_byte))


def make_replica(
    model: EncoderForPreTraining,
    compression: str,
    group: dist.ProcessGroup | None = None,
    bucket_mb: float | None = None,
    node_size: int | None = None,
    clip: ClipConfig | None = None,
) -> tuple[DistributedDataParallel, BucketClip | None]:
    """Wraps a model, whose passes then sync gradients as they will go on to.

    Args:
        model: on its device; not wrapped before.
        compression: how gradients travel.
        group: of the ranks that average; by default all.
        bucket_mb: limit of a bucket in MiB, where the trainer leaves that open; by default DDP's.
        node_size: ranks of a node, neighbours in rank, within which gradients that are not
            compressed are averaged first; None: over all ranks at once.
        clip: how buckets are clipped; by default they are not.

    Returns:
        The replica, and what clips or casts its buckets, if anything does.
    """
    # The trainer does not wrap the model of a single rank; a group of one rank is wrapped here.
    ranks = Ranks(
        rank=dist.get_rank(),
        world_size=max(dist.get_world_size(), 2),
        device=next(model.parameters()).device,
        checkpoint_group=None,
        node_size=node_size or 1,
        local_rank=dist.get_rank() % (node_size or 1),
    )
    if compression == "power_sgd":
        comm = CommConfig(hook="power_sgd", start=0)
    else:
        comm = CommConfig(hook="allreduce" if node_size is None else "hierarchical", start=0)
    hook = build_comm_hook(comm, ranks)
    if group is not None and compression == "power_sgd":
        hook.state.process_group = group
    wire: Literal["bf16", "fp32"] = "bf16" if compression == "bf16" else "fp32"
    clip = replace(clip or ClipConfig(mode="none"), wire_dtype=wire)
    bucket = make_bucket_clip(clip, loss_scale=None, needed=False)
    limit = None if hook.one_bucket else bucket_mb
    replica = wrap_in_ddp(model, ranks, hook, bucket, limit, group=group)
    make_empty_passes(replica, model, ranks.device)
    return replica, bucket
