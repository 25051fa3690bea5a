"""The stages of a run: what trains in each, its optimizer, its replica and its data.

A border between stages is crossed as a run is resumed, only that nothing goes through a file: the
model grows, the optimizer is made anew for what trains now and takes over the states it can, DDP
and clipping are made anew, and examples go on from the sampler's state. So a run that is killed on
either side of a border repeats the one that was not.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bert_unpad.data import DamagedDataError, PreparedData, prepare
from bert_unpad.data.sampling.balanced_sampler import WorkModel
from bert_unpad.nn import BertForPreTraining
from bert_unpad.pretrain.config import ConfigError, PretrainConfig
from bert_unpad.pretrain.feed.exchange_feed import ExchangedFeed
from bert_unpad.pretrain.feed.steps import FeedState, Step
from bert_unpad.pretrain.feed.strategies import Sampler, build_sampler, feed_steps
from bert_unpad.pretrain.gradients.clipping import Clipping
from bert_unpad.pretrain.gradients.loss_scale import LossScale
from bert_unpad.pretrain.growth import Growth, Stage, add_layers, cut_layers, freeze, next_optimizer
from bert_unpad.pretrain.model import add_gradients_in_products, replicate
from bert_unpad.pretrain.output.run_dir import Progress
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.update.optimizer import shard_group

__all__ = ["DATA_ERRORS", "Stages"]

logger = logging.getLogger(__name__)

DATA_ERRORS = (DamagedDataError, FileNotFoundError, ImportError, PermissionError, ValueError)
"""What `prepare` raises where settings or files are wrong."""


class Stages:
    """What trains now. Begins in the stage that a run is in, and goes through the later ones.

    Args:
        config: of the run.
        growth: its stages.
        ranks: the processes of the run; all of them make the same calls.
        model: all layers, on its device; cut to those of the stage.
        data: with examples of `data.max_seq_length`.
        index: the stage.

    Raises:
        ConfigError: there is no such stage, or its data have another vocabulary.
    """

    optimizer: torch.optim.Optimizer
    sampler: Sampler
    replica: nn.Module | None
    clipping: Clipping | None
    loss_scale: LossScale | None

    def __init__(
        self,
        config: PretrainConfig,
        growth: Growth,
        ranks: Ranks,
        model: BertForPreTraining,
        data: PreparedData,
        index: int = 0,
    ) -> None:
        if index >= len(growth.stages):
            raise ConfigError(
                "growth", f"the checkpoint is of stage {index + 1} of {len(growth.stages)}"
            )
        self.growth = growth
        self.index = index
        self._config, self._ranks, self._model, self._data = config, ranks, model, data
        cut_layers(model, self.stage.layers)
        freeze(model, self.stage)
        self._shard_group = shard_group(config.optimizer, ranks)
        self.optimizer = next_optimizer(model, config.optimizer, group=self._shard_group)
        self.replica = self.clipping = None
        self.loss_scale = None
        if config.precision == "fp16":
            self.loss_scale = LossScale(config.loss_scale, ranks.device)
        self._feed()

    @property
    def stage(self) -> Stage:
        """The current one."""
        return self.growth.stages[self.index]

    @property
    def is_last(self) -> bool:
        """Whether the run ends in this stage, wherever that is."""
        return self.index == len(self.growth.stages) - 1

    def forget_left_out(self) -> None:
        """Drops the gradients of layers that the update leaves out: they do not change then.

        They are zero where gradients were exchanged apart from the backward pass.
        """
        encoder = self._model.bert.encoder
        for layer, kept in zip(encoder.layer, encoder.kept or (), strict=False):
            if not kept:
                layer.zero_grad()

    def begin(self, progress: Progress) -> None:
        """Makes ready for the next update: in the stage it belongs to, exchanging gradients.

        A run that has passed a stage never goes back to it, wherever the configuration puts the
        border now.

        Args:
            progress: of the run; says from now on which stage it is in.
        """
        # DDP's hooks on the parameters go with the object, which is part of reference cycles.
        self.replica = self.clipping = None
        gc.collect()
        last = max(self.growth.index(progress.step), self.index)
        if self.index == last:
            clip = progress.clip
        else:
            clip = {}
            while self.index < last:
                self._enter(self.index + 1, progress)
        config, model = self._config, self._model
        if len(self.growth.stages) > 1:
            logger.info(
                "stage %d of %d, up to step %d: %d layers, %d of them trained; examples of up to "
                "%d tokens",
                *(self.index + 1, len(self.growth.stages), self.stage.end, self.stage.layers),
                *(self.stage.layers - self.stage.frozen, self.stage.max_seq_length),
            )
        self.clipping = Clipping(config.clip, self._ranks, model, config.comm, self.loss_scale)
        self.replica = model  # which CUDA graphs run as it is
        if not config.cuda_graphs:
            self.replica = replicate(
                *(model, self._ranks, config.compile, self.clipping),
                leaves_out=self.growth.kept is not None,
                bucket_mb=config.comm.bucket_mb,
            )
        self.clipping.load_state_dict(clip)
        self.clipping.exchange.begin(progress.step)
        progress.stage, progress.layers = self.index, self.stage.layers

    def local_state(self, progress: Progress) -> dict[str, Any] | None:
        """What of this rank a checkpoint keeps for as many ranks; None: nothing."""
        stream = None
        if isinstance(self.sampler, ExchangedFeed):
            stream = self.sampler.local_state(progress.sampler)
        local = {"comm": self.clipping.exchange.local_state(), "stream": stream}
        return {key: value for key, value in local.items() if value is not None} or None

    def load_local_state(self, local: dict[str, Any]) -> None:
        """Continues from `local_state`, after `begin`."""
        if "comm" in local:
            self.clipping.exchange.load_local_state(local["comm"])
        if "stream" in local and isinstance(self.sampler, ExchangedFeed):
            self.sampler.load_local_state(local["stream"])

    def _enter(self, index: int, progress: Progress) -> None:
        before, self.index = self.stage, index
        copies = add_layers(self._model, self.stage.sources, self._config.seed)
        add_gradients_in_products(self._model, self._config)
        freeze(self._model, self.stage)
        self.optimizer = next_optimizer(
            self._model, self._config.optimizer, self.optimizer, copies, self._shard_group
        )
        state, feed = progress.sampler, self.sampler
        if before.max_seq_length != self.stage.max_seq_length:
            state = progress.sampler = {}  # other data
        self._feed()
        if state:
            self.sampler.load_state_dict(state)
            if isinstance(feed, ExchangedFeed) and (local := feed.local_state(state)) is not None:
                self.sampler.load_local_state(local)

    def _feed(self) -> None:
        config, data = self._config, self._data
        if self.stage.max_seq_length != config.data.max_seq_length:
            data = _prepare(config, self.stage.max_seq_length, self._ranks)
            self._ranks.meet()
            if data.tokenizer.vocabulary != self._data.tokenizer.vocabulary:
                raise ConfigError(
                    "growth.lengths", "examples of different lengths need the same vocabulary"
                )
        self._stage_data = data
        work = WorkModel.for_hidden(self._model.config.hidden_size)
        self.sampler = build_sampler(config, data, self._ranks, work)

    def record(self, progress: Progress) -> None:
        """Puts what the next update's gradient depends on into `progress`; all must call it."""
        progress.clip = self.clipping.state_dict()
        progress.loss_scale = {} if self.loss_scale is None else self.loss_scale.state_dict()

    def steps(self) -> AbstractContextManager[Iterator[tuple[Step, FeedState]]]:
        """The steps to come, from where the sampler stands; see `feed.feed_steps`."""
        return feed_steps(self._config, self.sampler, self._stage_data, self._ranks)


def _prepare(config: PretrainConfig, max_seq_length: int, ranks: Ranks) -> PreparedData:
    try:
        return prepare(
            replace(config.data, max_seq_length=max_seq_length),
            progress=None if ranks.is_first else False,
        )
    except DATA_ERRORS as error:
        raise ConfigError("growth.lengths", str(error)) from error
