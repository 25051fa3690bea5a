"""The stages of a run: what trains in each, with which optimizer and data.

Entering a stage works like resuming a run, only without a file. The model grows. A new optimizer
is made for what trains now and takes over the state of parameters that go on training. DDP and
clipping are made again, and the sampler continues from its state. So a run that is killed before or
after the border gives the same results as one that was not.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from bert_unpad._balancer import WorkModel
from bert_unpad._cost_file import read_cost
from bert_unpad._import_path import resolve
from bert_unpad.data import PreparedData
from bert_unpad.data.sampling.speed_sampler import SpeedSampler
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.nn.flops import flops_by_length
from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.feed.exchange_feed import ExchangedFeed
from bert_unpad.pretrain.feed.rank_speeds import RankSpeeds
from bert_unpad.pretrain.feed.steps import FeedState, Step
from bert_unpad.pretrain.feed.strategies import (
    Sampler,
    build_sampler,
    feed_steps,
    warn_of_variation,
)
from bert_unpad.pretrain.gradients.compute_clock import Spans
from bert_unpad.pretrain.growth import Growth, Stage, add_layers, cut_layers, freeze
from bert_unpad.pretrain.model import add_gradients_in_products
from bert_unpad.pretrain.parallel import make_way
from bert_unpad.pretrain.prepared_data import open_data
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.run import Run
from bert_unpad.pretrain.update.kinds import find_kind

logger = logging.getLogger(__name__)

_AUTO = "bert_unpad.plan.auto_hook.AutoHook"  # which only its runs import
_LEAD = 8  # updates by which samplers are ahead of training, at most


class Stages:
    """What trains now. Begins in the stage that a run is in, and goes through the later ones.

    Args:
        run: its model has all layers, on its device; it is cut to those of the stage.
        growth: the stages.
        data: with examples of `data.max_seq_length`.

    Raises:
        ConfigError: there is no such stage, or its data have another vocabulary.
    """

    sampler: Sampler

    def __init__(self, run: Run, growth: Growth, data: PreparedData) -> None:
        index = run.progress.stage
        if index >= len(growth.stages):
            raise ConfigError(
                "growth",
                f"expected at least {index + 1} stages, as the checkpoint is of stage {index + 1}, "
                f"got {len(growth.stages)}",
            )
        self.growth = growth
        self.index = index
        self._run, self._data = run, data
        self.position: dict[str, Any] = {}
        """State of the sampler after the latest update."""
        self._place: str | None = None  # of this rank's stream, until `begin`
        self.speeds: RankSpeeds | None = None
        """How fast ranks are; None where all count as alike."""
        if (setting := run.config.batching.rank_speeds) is not None:
            speeds = RankSpeeds(setting, run.ranks, run.progress.rank_speeds)
            self.speeds = speeds if run.ranks.world_size > 1 else None
        several = run.ranks.world_size > 1
        self._auto = resolve(_AUTO)(run) if run.config.comm.hook == "auto" and several else None
        cut_layers(run.model, self.stage.layers)
        freeze(run.model, self.stage)
        self.way = make_way(run)
        """How the ranks share an update."""
        self.way.shard()
        self.way.make_optimizer()
        self._feed()

    @property
    def stage(self) -> Stage:
        """The current one."""
        return self.growth.stages[self.index]

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, in which the run ends."""
        return self.index == len(self.growth.stages) - 1

    def choose_layers(self) -> None:
        """Decides which layers the next update trains, where growth leaves some out."""
        if self.growth.active_layers is not None:
            self._run.model.bert.encoder.active_layers = self.growth.active_layers(
                self._run.progress.step
            )

    def work_of(self, step: Step) -> float:
        """The work of this rank in an update, as the balancer counts it."""
        sizes = step.lengths.astype(np.float64)
        return float((self._work.linear * sizes + self._work.quadratic * sizes**2).sum())

    def follow_speeds(self, step: Step, spans: Spans) -> bool:
        """Measures ranks of unequal speed after an update; whether their shares change.

        Args:
            step: this rank's part of the update.
            spans: in which this rank computed.
        """
        self._updates += 1
        if self.speeds is None or not self.speeds.add_update(self.work_of(step), spans):
            return False
        self._run.progress.rank_speeds = self.speeds.values.tolist()
        assert isinstance(self.sampler, SpeedSampler | ExchangedFeed)  # where there are speeds
        self.sampler.set_speeds(self.speeds.values, self._updates + _LEAD)
        return True

    def follow_links(self, spans: Spans) -> dict[str, Any] | None:
        """Lets comm.hook auto choose after an update how the next ones sync gradients.

        Args:
            spans: in which this rank computed.

        Returns:
            Why it has chosen what it has; None if it has not.
        """
        found = None if self._auto is None else self._auto.after_update(spans)
        if found is not None and found["changed"]:
            self.way.synchronise(with_state=True)
            self.way.end()
            self.way.begin()
        return found

    def forget_left_out(self) -> None:
        """Drops the gradients of layers that the update leaves out: they do not change then.

        These gradients are zero where ranks averaged them after the backward pass.
        """
        encoder = self._run.model.bert.encoder
        for layer, active in zip(encoder.layer, encoder.active_layers or (), strict=False):
            if not active:
                layer.zero_grad()

    def begin(self) -> None:
        """Makes ready for the next update, in the stage it belongs to.

        A run never returns to a stage that it has passed, even if the configuration has moved the
        border since. The run's progress records the stage.
        """
        self.way.end()
        progress = self._run.progress
        last = max(self.growth.index(progress.step), self.index)
        if self.index < last:
            self.way.forget_clipping()
        while self.index < last:
            self._enter(self.index + 1)
        if len(self.growth.stages) > 1:
            logger.info(
                "stage %d of %d, up to step %d: %d layers, %d of them trained; examples of up to "
                "%d tokens",
                *(self.index + 1, len(self.growth.stages), self.stage.end, self.stage.layers),
                *(self.stage.layers - self.stage.frozen, self.stage.max_seq_length),
            )
        self.way.begin(leaves_out=self.growth.active_layers is not None)
        if self._place is not None and isinstance(self.sampler, ExchangedFeed):
            self.sampler.load_local_state(self._place)
        self._place = None
        if self._run.ranks.is_first:
            per_rank = self._run.config.batching.per_rank(self._run.ranks.world_size)
            warn_of_variation(self.sampler, per_rank)
        progress.stage = self.index

    def local_state(self) -> dict[str, Any] | None:
        """What of this rank a checkpoint keeps for as many ranks; None: nothing."""
        stream = None
        if isinstance(self.sampler, ExchangedFeed):
            stream = self.sampler.local_state(self.position)
        local = {"comm": self.way.local_state(), "stream": stream}
        return {key: value for key, value in local.items() if value is not None} or None

    def state_dict(self) -> dict[str, Any]:
        """All but the tensors and the run's progress, as JSON; every rank must call it."""
        return {
            "layers": self.stage.layers,
            "optimizer": find_kind(self._run.config.optimizer.name).layout,
            "sampler": self.position,
            "gradients": self.way.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], local: Mapping[str, Any]) -> None:
        """Continues from `state_dict`, and this rank's `local_state` or nothing, from `begin` on.

        Raises:
            ValueError: the position in the data is damaged, or of other data.
        """
        self.position = state["sampler"]
        self.sampler.load_state_dict(self.position)
        self.way.load_state_dict(state["gradients"], local.get("comm"))
        self._place = local.get("stream")

    def _enter(self, index: int) -> None:
        run = self._run
        before, self.index = self.stage, index
        copies = add_layers(run.model, self.stage.sources)
        add_gradients_in_products(run.model)
        freeze(run.model, self.stage)
        self.way.make_optimizer(copies)
        feed = self.sampler
        if before.max_seq_length != self.stage.max_seq_length:
            self.position, self._place = {}, None  # other data
        self._feed()
        if self.position:
            self.sampler.load_state_dict(self.position)
            if isinstance(feed, ExchangedFeed):
                self._place = feed.local_state(self.position) or self._place

    def _feed(self) -> None:
        run, config, data = self._run, self._run.config, self._data
        if self.stage.max_seq_length != config.data.max_seq_length:
            shorter = replace(config.data, max_seq_length=self.stage.max_seq_length)
            data = open_data(shorter, run.ranks, "growth.lengths")
            if data.tokenizer.vocabulary != self._data.tokenizer.vocabulary:
                raise ConfigError(
                    "growth.lengths",
                    "expected the same vocabulary for examples of all lengths, got different ones",
                )
        self._stage_data = data
        self._work = sequence_work(
            run.model, config.batching.cost_file, self.stage.max_seq_length, run.ranks
        )
        self._updates = 0  # with this sampler
        self.sampler = build_sampler(
            config, data, run.ranks, self._work, self.speeds, run.progress.step
        )

    def steps(self, total_steps: int) -> AbstractContextManager[Iterator[tuple[Step, FeedState]]]:
        """The steps to come, from where the sampler stands; see `feed.feed_steps`."""
        run = self._run
        return feed_steps(
            *(run.config, self.sampler, self._stage_data, run.ranks, run.progress.step),
            total_steps,
            padded=self.way.captures,
        )


def sequence_work(
    model: EncoderForPreTraining, cost_file: str | None, longest: int, ranks: Ranks
) -> WorkModel:
    """The work of a sequence: measured, or the floating-point operations of what the model trains.

    All ranks call it, and get the same numbers; rank 0 reads the file.

    Args:
        model: with the layers that it has now, some of them maybe frozen.
        cost_file: see `batching.cost_file`.
        longest: tokens of the longest sequence.
        ranks: the processes of the run.

    Raises:
        ConfigError: the file cannot be read or is none.
    """
    if cost_file is None:
        return WorkModel(*flops_by_length(model.num_flops, longest))

    def read() -> tuple[float, float]:
        try:
            linear, quadratic, _ = read_cost(cost_file)
            WorkModel(linear, quadratic)  # which checks them
        except (OSError, ValueError) as error:
            raise ConfigError("batching.cost_file", str(error)) from error
        return linear, quadratic

    return WorkModel(*ranks.on_first(read))
