"""What every way of sharing an update has: from a step's inputs to updated parameters.

Losses are divided by the counts of the GLOBAL batch (masked tokens, pairs of segments), so the
gradient is that of the global batch, however many sequences and tokens each rank has.
"""

import dataclasses
import gc
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.distributed import BucketClip
from bert_unpad.nn import Encoder, EncoderForPreTraining, PreTrainingOutput
from bert_unpad.ops.delayed_scaling import DelayedScaling
from bert_unpad.optim.base import FusedOptimizer
from bert_unpad.pretrain.feed.steps import Step
from bert_unpad.pretrain.gradients.clipping import GradientReport, clip_gradients_
from bert_unpad.pretrain.gradients.comm_hook import CommHook
from bert_unpad.pretrain.gradients.comm_hooks import SETTLING_PASSES, build_comm_hook
from bert_unpad.pretrain.gradients.compute_clock import ComputeClock
from bert_unpad.pretrain.gradients.loss_scale import LossScale
from bert_unpad.pretrain.losses import SUMS, TASKS, stack_outputs
from bert_unpad.pretrain.model import to_device
from bert_unpad.pretrain.ranks import HostSums
from bert_unpad.pretrain.run import Run
from bert_unpad.pretrain.update.optimizer import (
    build_optimizer,
    round_weights_in_updates,
    set_lr,
    step_if,
)
from bert_unpad.pretrain.update.overlap import OverlappedUpdater
from bert_unpad.pretrain.update.state import take_over

logger = logging.getLogger(__name__)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds PyTorch's generators for one step on one rank.

    A step's random numbers then depend on nothing that came before, and a resumed run needs no
    generator state.
    """
    (state,) = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state >> np.uint64(1)))


class Way:
    """How ranks share the work and the memory of an update; this base is a rank alone.

    A stage is `make_optimizer`, `begin`, its updates, `end`; an update is `accumulate`, `finish`,
    `step`. All ranks make the same calls.

    Args:
        run: whose model trains; on its device.
    """

    waits_in_passes = False
    """Whether ranks wait for each other within passes."""
    shares_state = False
    """Whether ranks keep the optimizer's state of some parameters each."""
    cuts_parameters = False
    """Whether a rank updates parts of parameters."""
    captures = False
    """Whether passes are CUDA graphs: inputs have a few shapes, and gradients keep their place."""

    optimizer: torch.optim.Optimizer
    """What makes the updates; from `make_optimizer` on."""
    # From `begin` to `end`.
    _hook: CommHook
    _replica: nn.Module
    _bucket: BucketClip | None

    def __init__(self, run: Run) -> None:
        self.run = run
        alone = run.ranks.world_size == 1
        # One rank has nothing to overlap: its whole gradient is one bucket.
        mode = run.config.clip.mode
        self._mode = "after" if alone and mode != "none" else mode
        self.clock = ComputeClock(run.device, not (alone or self.waits_in_passes))
        """Measures how long this rank computes; off where that cannot be told from waiting."""
        self.loss_scale: LossScale | None = None
        """What losses are multiplied by in fp16; None in other precisions."""
        if run.config.precision == "fp16":
            self.loss_scale = LossScale(run.config.loss_scale, run.device)
        self._beside: OverlappedUpdater | None = None
        self._scalings: list[DelayedScaling] = []
        self._loaded: dict[str, Any] = {}  # by `load_state_dict`, until `begin`

    def make_optimizer(self, copies: Mapping[nn.Parameter, nn.Parameter] | None = None) -> None:
        """Makes the optimizer of the parameters that train now.

        Args:
            copies: new parameters, with what each is a copy of. Parameters that have trained
                before keep their states, copies get those of their originals. None: all begin
                without.

        Raises:
            ConfigError: there is no such optimizer, or it does not take the options.
        """
        run = self.run
        made = build_optimizer(run.model, run.config.optimizer, self._build)
        if copies is not None:
            take_over(made, self.optimizer, copies)
        if not self.shares_state:
            round_weights_in_updates(run.model, made, run.config, run.device)
        self.optimizer = made

    def begin(self, leaves_out: bool = False) -> None:
        """Makes ready for the next update, with the parameters that require gradients now.

        Args:
            leaves_out: whether updates may leave layers out.

        Raises:
            ConfigError: `comm` does not fit the number of ranks or the device.
        """
        run, config = self.run, self.run.config
        if config.amax_history is not None:
            self._delay_scaling(config.amax_history)
        self._hook = build_comm_hook(run.comm, run.ranks, self.optimizer)
        self._bucket = None
        if config.compile:
            run.model.compile(dynamic=True)
        self._replica = self._wrap(leaves_out)
        if not self.captures:
            self.clock.watch(run.model)
        self._load_squares(self._loaded.pop("clip", {}))
        self._hook.start(run.progress.step)
        if config.optimizer.overlap:
            assert isinstance(self.optimizer, FusedOptimizer)  # as `check_optimizer` says
            self._beside = OverlappedUpdater(run.model, self.optimizer)
        if (local := self._loaded.pop("local", None)) is not None:
            self._load_memory(local)

    def end(self) -> None:
        """Waits for the update, and lets go of the model, which may change then."""
        if self._beside is not None:
            self._beside.end()
            self._beside = None
        if hasattr(self, "_hook"):
            del self._replica, self._hook, self._bucket
            gc.collect()  # DDP is part of reference cycles, and its hooks go when it does

    def accumulate(self, step: Step, counts: HostSums) -> Tensor:
        """Adds the gradient of the global batch's loss to the parameters' `.grad`, on every rank.

        The loss is the mean over the global batch's masked tokens plus the mean over its pairs of
        segments with a label. Ranks average, hence the factor of their number. Gradients travel in
        the last pass only.

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
            first, last = number == 0, number == len(step.passes) - 1
            sums += stack_outputs(self._run_pass(inputs, factors, first, last))
        self._send()
        self.clock.stop(at_gradients=True)
        return sums

    def finish(self) -> GradientReport:
        """Makes `.grad` the clipped average, after `accumulate`."""
        report = self._clip()
        finite = self._hook.agree(report.finite)
        if self.loss_scale is not None:
            self.loss_scale.update(finite)
        if not self.shares_state:
            self.clock.start()  # the update; ranks that share the state wait for each other in it
        return dataclasses.replace(report, finite=finite)

    def step(self, finite: Tensor, lr: float) -> None:
        """Updates the parameters unless the gradient is not finite, and drops the gradient.

        Args:
            finite: bool [], whether the gradient is; see `step_if`.
            lr: learning rate of this update.
        """
        set_lr(self.optimizer, lr)
        if self._beside is None:
            step_if(self.optimizer, finite)
        else:
            self._beside.step(finite)
        self.clock.stop()
        # Averages models now and then, where each rank updates its own (local SGD).
        self._hook.after_update(self.run.model.parameters())
        for scaling in self._scalings:
            scaling.update(dist.group.WORLD if self.run.ranks.world_size > 1 else None)
        if not self.captures:  # else the first pass of the next step writes over it
            self.optimizer.zero_grad(set_to_none=True)

    def synchronise(self, with_state: bool = False) -> None:
        """Makes the model, as the last update leaves it, the same on all ranks.

        Args:
            with_state: the optimizer's state too.
        """
        if self._beside is not None:
            self._beside.wait()
        self._hook.synchronise(self.run.model, self.optimizer if with_state else None)

    def shard(self) -> None:
        """Shards the model, in place, before its optimizer is made."""

    def whole(self) -> EncoderForPreTraining:
        """The model with whole parameters, on rank 0; all ranks must call it."""
        return self.run.model

    def state_dict(self) -> dict[str, Any]:
        """What the next step's gradient depends on, of all ranks, as JSON; all must call it."""
        scale = {} if self.loss_scale is None else self.loss_scale.state_dict()
        scalings = [scaling.state_dict() for scaling in self._scalings]
        return {"clip": self._squares(), "loss_scale": scale, "fp8": scalings}

    def local_state(self) -> dict[str, Any] | None:
        """What a checkpoint must keep of this rank alone; None for nothing."""
        state = self._hook.local_state()
        return None if state is None else {"hook": self._hook.name, "state": state}

    def load_state_dict(
        self, state: Mapping[str, Any], local: Mapping[str, Any] | None = None
    ) -> None:
        """Continues from `state_dict`, and from `local_state` if given; before `begin`."""
        self._loaded = {**state, "local": local}
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state.get("loss_scale", {}))

    def forget_clipping(self) -> None:
        """Drops the loaded state of clipping, which belonged to other parameters."""
        self._loaded.pop("clip", None)

    # What ways do differently.

    def _build(
        self, kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], **options: Any
    ) -> torch.optim.Optimizer:
        """This rank's optimizer of a class, with the options of that class."""
        return kind(groups, **options)

    def _wrap(self, leaves_out: bool) -> nn.Module:
        """The model as passes call it, with clipping attached; see `begin`."""
        return self.run.model

    def _run_pass(
        self, inputs: PackedInputs, factors: Callable[[], Tensor], first: bool, last: bool
    ) -> PreTrainingOutput:
        """A forward and backward pass of a step; `factors` gives what losses are multiplied by."""
        with self._pass(last):
            with self.run.autocast:
                outputs = self._replica(to_device(inputs, self.run.model, self.run.device))
            loss = outputs[0] * factors()[0] + outputs[2] * factors()[1]
            loss.backward()
        return outputs

    def _pass(self, last: bool) -> AbstractContextManager[None]:
        """The context of a pass; gradients travel in the last one of a step."""
        return nullcontext()

    def _send(self) -> None:
        """Called once the last pass of a step is launched."""

    def _clip(self) -> GradientReport:
        """Makes `.grad` the clipped average, after the backward passes of a step."""
        if self.loss_scale is not None and self._bucket is None:
            self.loss_scale.unscale_(self.run.model.parameters())
        bound = self.run.config.clip.max_norm if self._mode == "after" else math.inf
        norm = clip_gradients_(self.run.model.parameters(), bound)
        return GradientReport(
            norm, (norm > bound).long(), int(self._mode == "after"), norm.isfinite()
        )

    # What they share.

    def _squares(self) -> dict[str, Any]:
        """What the next step's bounds on buckets depend on, of all ranks, as JSON."""
        if self._bucket is None:
            return {}
        state, ranks = self._bucket.state_dict(), self.run.ranks
        count = len(state["squares"])
        squares = torch.zeros(ranks.world_size, count, dtype=torch.float64, device=ranks.device)
        squares[ranks.rank] = torch.tensor(state["squares"], dtype=torch.float64)
        return {"sizes": state["sizes"], "squares": ranks.sum(squares).tolist()}

    def _load_squares(self, state: Mapping[str, Any]) -> None:
        """Continues from `_squares`; after a change of the number of ranks it changes nothing."""
        ranks = self.run.ranks
        if self._bucket is not None and len(state.get("squares", ())) == ranks.world_size:
            squares = state["squares"][ranks.rank]
            self._bucket.load_state_dict({"sizes": state["sizes"], "squares": squares})

    def _load_memory(self, local: Mapping[str, Any]) -> None:
        """Continues from `local_state`; what another hook has left is dropped."""
        if local["hook"] == self._hook.name:
            self._hook.load_local_state(local["state"])
        else:
            logger.warning("the checkpoint's memory of another comm hook or optimizer is dropped")

    def _delay_scaling(self, window: int) -> None:
        """Gives the layers there are now delayed scales, with what is known of them."""
        states = [scaling.state_dict() for scaling in self._scalings]
        states = self._loaded.pop("fp8", None) or states
        encoders = [m for m in self.run.model.modules() if isinstance(m, Encoder)]
        self._scalings = [encoder.delay_scaling(window, self.run.device) for encoder in encoders]
        for scaling, state in zip(self._scalings, states, strict=False):
            scaling.load_state_dict(state)

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


def make_empty_passes(
    replica: nn.Module,
    model: EncoderForPreTraining,
    device: torch.device,
    after_pass: Callable[[], None] = lambda: None,
) -> None:
    """Runs passes over an empty batch, whose gradients are zero, until buckets no longer change.

    Args:
        replica: what passes call.
        model: whose gradients are dropped.
        device: of the model.
        after_pass: called after each pass.
    """
    empty = PackedInputs.build(VarlenBatch.from_lengths([]), torch.empty(0, dtype=torch.int64))
    empty = empty.to(device)
    for _ in range(SETTLING_PASSES):
        outputs = replica(empty)
        (outputs[0] + outputs[2]).backward()
        after_pass()
        model.zero_grad()
