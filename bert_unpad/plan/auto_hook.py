"""`comm.hook: auto`: how a run syncs gradients, measured, predicted and chosen while it trains.

What an update takes by each method is predicted with the formulas of a plan, from what is measured
of this run: passes and updates by the trainer's clock, the computing of compression, and links by
timed allreduces. Of each the slowest rank's time counts, which all ranks know, so all choose alike.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist

from bert_unpad.costs.compute import ComputeCost
from bert_unpad.costs.device import Device
from bert_unpad.costs.gradient_buckets import fill_buckets, gradients_of
from bert_unpad.costs.links import gpu_cluster
from bert_unpad.costs.measure import CompressionTimer, fit_link, link_times
from bert_unpad.costs.network import Cluster, Link
from bert_unpad.costs.step import StepTime
from bert_unpad.costs.sync import HOOK_COMPRESSIONS
from bert_unpad.costs.workload import OPTIMIZERS, Workload
from bert_unpad.plan.calibrate import process_group, rank_memory
from bert_unpad.plan.candidates import Candidate
from bert_unpad.plan.planner import Planner
from bert_unpad.pretrain.config.communication import CommHookName, Guarantee
from bert_unpad.pretrain.gradients.compute_clock import Spans, span_seconds
from bert_unpad.pretrain.node_groups import common_node_size, node_group
from bert_unpad.pretrain.run import Run

logger = logging.getLogger(__name__)


class Method(NamedTuple):
    """A way to sync gradients, as the trainer's settings have it."""

    hook: CommHookName
    wire_dtype: str = "fp32"
    guarantee: Guarantee = "exact"
    """The strictest one that it keeps."""
    warms_up: bool = False
    """Whether it begins after `comm.start` updates."""

    @property
    def settings(self) -> dict[str, str]:
        """What the run's progress keeps of it."""
        return {"hook": self.hook, "wire_dtype": self.wire_dtype}

    @property
    def compression(self) -> str:
        """What a plan's candidate calls it."""
        if self.hook == "power_sgd":
            return "power_sgd"
        return "none" if self.wire_dtype == "fp32" else self.wire_dtype


METHODS: dict[str, Method] = {
    "allreduce": Method("allreduce"),
    "hierarchical": Method("hierarchical"),
    "allreduce in bf16": Method("allreduce", "bf16", "bounded"),
    "hierarchical in bf16": Method("hierarchical", "bf16", "bounded"),
    "power_sgd": Method("power_sgd", guarantee="bounded", warms_up=True),
    "post_local_sgd": Method("post_local_sgd", guarantee="any", warms_up=True),
}
"""What is chosen from, the simplest first."""

TIE = 0.01
"""A simpler method goes before one that is predicted to be faster by less than this share."""
GAIN = 0.05
"""Share by which another method must be faster than the one in use."""

_WINDOW = 16  # updates whose median counts
_LINK_NUMBERS = (1024, 4 * 2**20)  # of timed allreduces: latency; bandwidth at DDP's size of bucket
_LINK_SECONDS = 0.5  # that these may take, more on slow links
_SAMPLES = 4  # of compression
_USUAL_SHARE, _CHANGED_SHARE = 0.01, 0.1  # of the run's time, for measuring links
_CHANGED = 1.25  # factor by which updates take longer, or less long, when something has changed


class _Flat(Planner):
    """Without averages within nodes first."""

    def hierarchical(self, candidate: Candidate) -> bool:
        return False


def usable(method: Method, nodes: int, cluster: Cluster) -> bool:
    """Whether ranks on so many nodes can use a method, and no simpler one is the same."""
    if method.hook == "hierarchical":
        return cluster.flat and min(nodes, cluster.ranks_per_node) > 1
    return method.hook != "post_local_sgd" or nodes > 1


def predict(
    work: Workload,
    device: Device,
    cluster: Cluster,
    candidate: Candidate,
    period: int,
    bucket_bytes: float | None = None,
    in_use: str = "allreduce",
) -> dict[str, StepTime]:
    """The time of an update by each method that these ranks can use and that fits their memory.

    Args:
        work: what is trained.
        device: the hardware of a rank.
        cluster: links and nodes.
        candidate: nodes, batch and passes of an update; memory is that of its `recompute`, which
            measured passes include.
        period: updates between averages of models, with post_local_sgd.
        bucket_bytes: limit of DDP's buckets; None: PyTorch's.
        in_use: a method that is known to fit.
    """
    flat, within_nodes = (kind(work, device, cluster, bucket_bytes) for kind in (_Flat, Planner))
    found = {}
    for name, method in METHODS.items():
        one = replace(
            candidate,
            compression=method.compression,
            local_sgd_period=period if method.hook == "post_local_sgd" else 1,
        )
        planner = within_nodes if method.hook == "hierarchical" else flat
        fits = name == in_use or method.compression == "none" or planner.fits(one)
        if fits and usable(method, one.nodes, cluster):
            found[name] = planner.update_time(replace(one, recompute="none"))
    return found


def choose(seconds: Mapping[str, float], now: str | None = None) -> str:
    """The fastest of some methods, a simpler one that is about as fast, or the one in use.

    Args:
        seconds: of an update by each, at least one.
        now: the method in use; None: there is none to keep.
    """
    least = min(seconds.values())
    best = next(name for name in METHODS if seconds.get(name, np.inf) <= least * (1 + TIE))
    if now is not None and seconds.get(now, np.inf) <= seconds[best] * (1 + GAIN):
        return now
    return best


class AutoHook:
    """Chooses how a run syncs gradients, and notes it in the run's progress; on every rank alike.

    Begins with what an earlier start of the run has chosen last, and chooses after the first
    `_WINDOW` updates, when `comm.start` is over, and after links were measured: as often as that
    takes 1 % of the time, or 10 % once updates take longer or less long. After a change it looks
    again: what updates took beyond the prediction is added for a method that was in use, and the
    least of that, which is the time of host and data, for another one.

    Args:
        run: of several ranks; its model on its device, before DDP wraps it.

    Raises:
        ConfigError: machines have different numbers of processes.
    """

    def __init__(self, run: Run) -> None:
        self._run, ranks = run, run.ranks
        self._one_bucket = ranks.device.type == "cpu"  # with power_sgd
        size = run.config.comm.bucket_mb
        self._bucket_bytes = None if size is None else size * 2**20
        self._node_size = common_node_size(ranks, "comm.hook", "auto", "another one")
        self._nodes = ranks.world_size // self._node_size
        several = min(self._node_size, self._nodes) > 1
        self._group = node_group(ranks, self._node_size) if several else None
        # Of links: seconds that they took, updates since then, and the seconds of one of these.
        self._cost, self._updates, self._usual = 0.0, 0, 0.0
        self._last = time.perf_counter()
        self._measure_links()
        order = get_args(Guarantee)
        last = order.index(run.config.comm.guarantee)
        self._allowed = {
            name: method
            for name, method in METHODS.items()
            if order.index(method.guarantee) <= last and usable(method, self._nodes, self._cluster)
        }
        saved = run.progress.comm
        known = [name for name, method in self._allowed.items() if method.settings == saved]
        self.method = known[0] if known else "allreduce"
        """The one in use, of `METHODS`."""
        run.progress.comm = METHODS[self.method].settings
        self._compress = self._measure_compression()
        self._looks = not known  # whether it chooses after the next window whatever it measures
        self._first = not known
        self._beyond: dict[str, float] = {}  # seconds of updates beyond what was predicted
        self._laps: list[tuple[float, Spans]] = []

    def after_update(self, spans: Spans) -> dict[str, Any] | None:
        """Takes in an update; all ranks call it after each.

        Args:
            spans: in which this rank computed; the last of them is the optimizer's.

        Returns:
            What it has chosen and why, where it has chosen; `changed` says whether that is another
            method than before. The settings are in the run's progress.
        """
        now = time.perf_counter()
        self._laps.append((now - self._last, spans))
        self._last = now
        if len(self._laps) < _WINDOW:
            return None
        lap, passes, update = self._slowest()
        self._updates += _WINDOW
        self._usual = self._usual or lap
        changed = not 1 / _CHANGED <= lap / self._usual <= _CHANGED
        share = _CHANGED_SHARE if changed else _USUAL_SHARE
        if due := self._cost <= share * lap * self._updates:
            self._measure_links()
            self._beyond = {} if changed else self._beyond
        started = 0 <= self._run.progress.step - self._run.config.comm.start < _WINDOW
        return self._choose(lap, passes, update) if due or started or self._looks else None

    def _choose(self, lap: float, passes: float, update: float) -> dict[str, Any]:
        run, before, comm = self._run, self.method, self._run.config.comm
        times = self._predict(passes, update)
        predicted = {name: time.total for name, time in times.items()}
        median = predicted[before] - times[before].weights  # the median update averages no models
        self._beyond[before] = lap - median
        least = max(min(self._beyond.values()), 0.0)
        expected = {
            name: max(predicted[name] + self._beyond.get(name, least), 0.0)
            for name, method in self._allowed.items()
            if name in predicted and (run.progress.step >= comm.start or not method.warms_up)
        }
        self.method = choose(expected, None if self._first else before)
        changed = self._looks = self.method != before
        self._first = False
        why = f"{self.method} {f'instead of {before}' if changed else 'as before'}: the fastest "
        why += f"with comm.guarantee {comm.guarantee} at step {run.progress.step}; an update has "
        why += f"taken {lap:.3g} s, and is predicted to take "
        why += ", ".join(f"{seconds:.3g} s ({name})" for name, seconds in predicted.items())
        if changed:
            run.progress.comm = METHODS[self.method].settings
            self._usual = 0.0
            if run.ranks.is_first:
                logger.info("comm.hook auto: %s", why)
        return {
            "method": self.method,
            "changed": changed,
            "why": why,
            "measured": {"method": before, "seconds": lap, "passes": passes, "update": update},
            "predicted": predicted,
            "expected": expected,
            "compress": self._compress,
            "links": {x: asdict(getattr(self._cluster, x)) for x in ("node", "network")},
        }

    def _predict(self, passes: float, update: float) -> dict[str, StepTime]:
        """An update by each method, from the seconds of passes and the optimizer now."""
        run, batching = self._run, self._run.config.batching
        batch = batching.per_pass(run.ranks.world_size)
        length = max(round(run.progress.tokens / max(run.progress.sequences, 1)), 1)
        own = self._own(passes) / (batch * batching.accumulation * length)
        device = Device(
            name="this rank",
            memory=rank_memory(run.device),
            passes=ComputeCost(own),
            update=update,
            compress=self._compress,
            one_bucket=self._one_bucket,
        )
        return predict(
            self._workload(length),
            device,
            self._cluster,
            Candidate(self._nodes, batch, batching.accumulation, recompute=run.config.recompute),
            run.config.comm.local_sgd_period,
            self._bucket_bytes,
            self.method,
        )

    def _own(self, passes: float) -> float:
        """Seconds of passes without the sync.

        The clock stops at the last gradient, so it counts what the sync computes of the buckets
        that are full before.
        """
        method, limit = METHODS[self.method], self._bucket_bytes
        if method.hook == "power_sgd" and self._one_bucket:
            return passes
        gradients = gradients_of(self._run.model.config)
        buckets = fill_buckets(gradients, *(() if limit is None else (limit, limit)))
        early = sum(bucket.numel for bucket in buckets if bucket.ready < 1)
        share = early / sum(bucket.numel for bucket in buckets)
        return max(passes - share * self._compress.get(method.compression, 0.0), passes / 2)

    def _workload(self, length: int) -> Workload:
        """What is trained, with sequences of one length: the clock has measured the slowest rank.

        The update is measured too, so the optimizer only counts with its memory.
        """
        config, ranks = self._run.config, self._run.ranks.world_size
        counts = np.zeros(length + 1, np.int64)
        counts[length] = 1
        batch, name = config.batching.per_rank(ranks) * ranks, config.optimizer.name
        optimizer = name if name in OPTIMIZERS else Workload.optimizer
        return Workload(self._run.model.config, counts, batch, 1, config.precision, optimizer)

    def _slowest(self) -> list[float]:
        """Median seconds of the window's updates, of passes and of the optimizer's part in them."""
        laps, self._laps = self._laps, []
        own = [(lap, span_seconds(spans[:-1]), span_seconds(spans[-1:])) for lap, spans in laps]
        times = torch.tensor(own, dtype=torch.float64, device=self._run.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times.median(dim=0).values.tolist()

    def _measure_links(self) -> None:
        ranks, begin = self._run.ranks, time.perf_counter()
        world = node = _measure_link(ranks.device, None, ranks.world_size)
        if self._group is not None:
            node = _measure_link(ranks.device, self._group, self._node_size)
        # One ring through all ranks passes each node's link once.
        network = Link(world.latency, world.bandwidth / self._node_size)
        self._cluster = gpu_cluster(self._node_size, node, network)
        if ranks.device.type == "cpu":
            self._cluster = Cluster(self._node_size, node, network, algorithm="ring", flat=True)
        self._last = time.perf_counter()
        self._cost = max(ranks.gather(self._last - begin))
        self._updates, self._usual = 0, 0.0

    def _measure_compression(self) -> dict[str, float]:
        """Seconds that a sync by each compression computes, with clipping."""
        found, config = {}, self._run.config
        with process_group(self._run.device) as alone:
            for name in HOOK_COMPRESSIONS:  # one copy of the model at a time
                timer = CompressionTimer(
                    *(self._workload(8), self._run.model, name, alone),
                    clip=config.clip,
                    bucket_mb=config.comm.bucket_mb,
                )
                for _ in range(_SAMPLES):
                    timer.sample()
                found[name] = timer.median()
                del timer
        return found


def _measure_link(device: torch.device, group: dist.ProcessGroup | None, ranks: int) -> Link:
    return fit_link(*link_times(device, _LINK_SECONDS, _LINK_NUMBERS, group), ranks)
