"""From a step's inputs to the clipped average gradient on every rank, as the training loop sees it.

Losses are divided by the counts of the GLOBAL batch (masked tokens, pairs of segments), so the
gradient is that of the global batch, however many sequences and tokens each rank has.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_unpad.nn import Encoder
from bert_unpad.ops.delayed_scaling import DelayedScaling
from bert_unpad.pretrain.feed.steps import Step
from bert_unpad.pretrain.gradients.clipping import Clipping, GradientReport
from bert_unpad.pretrain.gradients.comm_hook import CommHook
from bert_unpad.pretrain.gradients.comm_hooks import build_comm_hook
from bert_unpad.pretrain.gradients.compute_clock import ComputeClock
from bert_unpad.pretrain.gradients.cuda_graphs import GraphRunner
from bert_unpad.pretrain.gradients.graph_buckets import GraphBuckets
from bert_unpad.pretrain.gradients.loss_scale import LossScale
from bert_unpad.pretrain.losses import SUMS, TASKS, stack_outputs
from bert_unpad.pretrain.model import to_device
from bert_unpad.pretrain.parallel import make_way
from bert_unpad.pretrain.ranks import HostSums
from bert_unpad.pretrain.run import Run

logger = logging.getLogger(__name__)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds PyTorch's generators for one step on one rank.

    A step's random numbers then depend on nothing that came before, and a resumed run needs no
    generator state.
    """
    (state,) = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state >> np.uint64(1)))


class GradientSync:
    """Runs the backward passes, scales the loss, clips, and averages gradients over the ranks.

    One step is `accumulate`, `finish`, the optimizer's update, `after_update`. All ranks make the
    same calls.

    Args:
        run: whose model trains; on its device.
    """

    # From `begin` to `end`.
    _hook: CommHook
    _clipping: Clipping
    _replica: nn.Module

    def __init__(self, run: Run) -> None:
        self.run = run
        self.way = make_way(run.config.optimizer, run.ranks)
        """How the ranks share an update."""
        alone = run.ranks.world_size == 1
        self.clock = ComputeClock(run.device, not (alone or self.way.waits_in_passes))
        """Measures how long this rank computes; off where that cannot be told from waiting."""
        self.loss_scale: LossScale | None = None
        """What losses are multiplied by in fp16; None in other precisions."""
        if run.config.precision == "fp16":
            self.loss_scale = LossScale(run.config.loss_scale, run.device)
        self._graphs: GraphRunner | None = None
        self._buckets: GraphBuckets | None = None
        self._clip_state: dict[str, Any] = {}
        self._scalings: list[DelayedScaling] = []
        self._scaling_states: list[dict[str, Any]] = []

    @property
    def keeps_gradients(self) -> bool:
        """Whether `.grad` stays where it is, because CUDA graphs write there; `accumulate` begins
        with what it holds forgotten."""
        return self._graphs is not None

    def begin(
        self, leaves_out: bool = False, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Makes ready for the next update, with the parameters that require gradients now.

        Args:
            leaves_out: whether updates may leave layers out.
            optimizer: what makes the updates; comm hooks and clipping depend on it.

        Raises:
            ConfigError: `comm` does not fit the number of ranks or the device.
        """
        run, config = self.run, self.run.config
        if config.amax_history is not None:
            self._delay_scaling(config.amax_history)
        self._hook = build_comm_hook(config.comm, run.ranks, optimizer)
        if config.cuda_graphs and run.ranks.world_size > 1 and config.clip.mode != "before":
            self._buckets = GraphBuckets(run.model, config.comm.bucket_mb)
        self._clipping = self.way.clipping(
            config.clip, run.ranks, run.model, self._hook, self.loss_scale, self._buckets
        )
        if config.cuda_graphs:
            self._graphs, self._replica = GraphRunner(run.model, run.autocast), run.model
        else:
            if config.compile:
                run.model.compile(dynamic=True)
            self._replica = self.way.wrap(run, self._clipping, self._hook, leaves_out)
            self.clock.watch(run.model)
        self._clipping.load_state_dict(self._clip_state)
        self._clip_state = {}
        self._hook.start(run.progress.step)

    def end(self) -> None:
        """Lets go of DDP and its hooks, before the model changes."""
        if hasattr(self, "_hook"):
            del self._replica, self._hook, self._clipping
            gc.collect()  # DDP is part of reference cycles, and its hooks go when it does

    def accumulate(self, step: Step, counts: HostSums) -> Tensor:
        """Adds the gradient of the global batch's loss to the parameters' `.grad`, on every rank.

        The loss is the mean over the global batch's masked tokens plus the mean over its pairs of
        segments with a label. DDP averages over the ranks, hence the factor of their number.
        Gradients travel in the last pass only.

        Args:
            step: this rank's inputs.
            counts: being added up over all ranks; must begin with `step.counts`.

        Returns:
            This rank's losses and correct predictions, float64 [4] in the order of
            `losses.SUMS`, on the device.
        """
        self.clock.start()
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.run.device)
        # Asked for after the first forward pass, during which the counts are added up.
        factors = cache(partial(self._loss_factors, step, counts))
        for number, inputs in enumerate(step.passes):
            if self._graphs is not None:
                sums += stack_outputs(self._graphs(inputs, factors(), first=number == 0))
                continue
            with self._travelling(last=number == len(step.passes) - 1):
                with self.run.autocast:
                    outputs = self._replica(to_device(inputs, self.run.model, self.run.device))
                loss = outputs[0] * factors()[0] + outputs[2] * factors()[1]
                loss.backward()
            sums += stack_outputs(outputs)
        if self._buckets is not None:
            self._buckets.send()
        self.clock.stop(at_gradients=True)
        return sums

    def finish(self) -> GradientReport:
        """Makes `.grad` the clipped average, after `accumulate`."""
        report = self._clipping.clip()
        finite = self._hook.agree(report.finite)
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        if not self.way.shares_state:
            self.clock.start()  # the update; ranks that share the state wait for each other in it
        return dataclasses.replace(report, finite=finite)

    def after_update(self) -> None:
        """Averages the models now and then, where each rank updates its own (local SGD), and makes
        the next delayed scales."""
        self.clock.stop()
        self._hook.after_update(self.run.model.parameters())
        for scaling in self._scalings:
            scaling.update(dist.group.WORLD if self.run.ranks.world_size > 1 else None)

    def synchronise(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Makes the model, and the optimizer's state if given, the same on all ranks."""
        self._hook.synchronise(self.run.model, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """What the next step's gradient depends on, of all ranks, as JSON; all must call it."""
        scale = {} if self.loss_scale is None else self.loss_scale.state_dict()
        scalings = [scaling.state_dict() for scaling in self._scalings]
        return {"clip": self._clipping.state_dict(), "loss_scale": scale, "fp8": scalings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state_dict`; before `begin`. An empty one changes nothing."""
        self._clip_state = dict(state.get("clip", {}))
        self._scaling_states = list(state.get("fp8", []))
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state.get("loss_scale", {}))

    def forget_clipping(self) -> None:
        """Drops the loaded state of clipping, which belonged to other parameters."""
        self._clip_state = {}

    def local_state(self) -> dict[str, Any] | None:
        """What a checkpoint must keep of this rank alone; None for nothing."""
        state = self._hook.local_state()
        return None if state is None else {"hook": self._hook.name, "state": state}

    def load_local_state(self, state: dict[str, Any]) -> None:
        """Continues from `local_state`, after `begin`; what another hook has left is dropped."""
        if state.get("hook") == self._hook.name:
            self._hook.load_local_state(state["state"])
        else:
            logger.warning("the checkpoint's memory of another comm hook or optimizer is dropped")

    def _delay_scaling(self, window: int) -> None:
        """Gives the layers there are now delayed scales, with what is known of them."""
        states = self._scaling_states or [scaling.state_dict() for scaling in self._scalings]
        encoders = [m for m in self.run.model.modules() if isinstance(m, Encoder)]
        self._scalings = [encoder.delay_scaling(window, self.run.device) for encoder in encoders]
        for scaling, state in zip(self._scalings, states, strict=False):
            scaling.load_state_dict(state)
        self._scaling_states = []

    def _travelling(self, last: bool) -> AbstractContextManager:
        """The context of a pass: gradients are averaged in the last one, unless clipping does."""
        if last and self._clipping.in_backward:
            return nullcontext()
        return self.way.no_sync(self._replica)

    def _loss_factors(self, step: Step, counts: HostSums) -> Tensor:
        """What the sums of the two losses are multiplied by, float32 [2]."""
        self.clock.stop()
        counts.on_device()
        self.clock.start()
        tasks, names = TASKS[self.run.config.data.objective], list(step.counts)
        # Where there is one task, the second loss is 0 and has no gradient.
        places = [names.index(task.count) for task in (tasks[0], tasks[-1])]
        # Clamped: a global batch without a label of one kind has a loss of 0 for it.
        factors = torch.stack(
            [
                task.weight * self.run.ranks.world_size / counts.on_device()[place].clamp(min=1)
                for task, place in zip((tasks[0], tasks[-1]), places, strict=True)
            ]
        ).float()
        return factors if self.loss_scale is None else factors * self.loss_scale.value
