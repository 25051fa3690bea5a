"""Which rank trains on what, by the batching strategy, and the steps that follow."""

import itertools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing

from bert_unpad.batch.graph_shapes import GraphShapes
from bert_unpad.data import PreparedData
from bert_unpad.data.masking import masking_rates
from bert_unpad.data.mixture import Mixture
from bert_unpad.data.sampling.balanced_sampler import BalancedSampler, WorkModel
from bert_unpad.data.sampling.packed_sampler import PackedSampler
from bert_unpad.data.sampling.speed_sampler import SpeedSampler
from bert_unpad.data.sampling.warmup_sampler import WarmupSampler
from bert_unpad.pretrain.config import PretrainConfig
from bert_unpad.pretrain.feed.exchange_feed import ExchangedFeed
from bert_unpad.pretrain.feed.rank_speeds import RankSpeeds
from bert_unpad.pretrain.feed.steps import FeedState, Step, StepCollator, endless_steps
from bert_unpad.pretrain.ranks import Ranks

logger = logging.getLogger(__name__)

_MOST_VARIATION = 0.5  # of the work of an update, standard deviation over mean

Sampler = BalancedSampler | PackedSampler | WarmupSampler | SpeedSampler | ExchangedFeed


def build_sampler(
    config: PretrainConfig,
    data: PreparedData,
    ranks: Ranks,
    work: WorkModel,
    speeds: RankSpeeds | None = None,
    updates: int = 0,
) -> Sampler:
    """The sampler of the batching strategy, at the beginning of the first epoch.

    Args:
        config: says which.
        data: the examples.
        ranks: the processes of the run.
        work: work of a sequence by its length.
        speeds: of the ranks; None where all are alike.
        updates: made already, for a batch that still grows.

    Raises:
        ConfigError: the strategy does not fit the data, or the batch the number of ranks.
    """
    batching = config.batching
    if batching.strategy == "exchange":
        stream = data.open_stream(
            ranks.rank,
            ranks.world_size,
            seed=config.seed,
            shuffle_buffer=batching.shuffle_buffer,
        )
        return ExchangedFeed(stream, ranks, batching, work, speeds, updates)
    per_rank = batching.per_rank(ranks.world_size)
    if speeds is not None:
        place = (1, 0, per_rank * ranks.world_size)
    else:
        place = (ranks.world_size, ranks.rank, per_rank)
    warmup = batching.warmup(ranks.world_size)
    if warmup is not None:
        place = (*place[:2], place[2] // warmup.full)
    indexed = _indexed(config, data, place, work)
    whole = indexed if warmup is None else WarmupSampler(indexed, warmup, updates)
    return whole if speeds is None else SpeedSampler(whole, ranks.rank, speeds.values, work=work)


def warn_of_variation(sampler: Sampler, per_rank: int) -> None:
    """Warns where updates have so few sequences on a rank that their lengths become alike."""
    if not isinstance(sampler, BalancedSampler):
        return
    variation = sampler.work_variation()
    if variation > _MOST_VARIATION:
        logger.warning(
            "the work of an update varies by %.2f of its mean, because %d sequences on a rank "
            "have equal work only where all are of about one length; more of them (for example "
            "by batching.accumulation) mix lengths",
            *(variation, per_rank),
        )


def _indexed(
    config: PretrainConfig, data: PreparedData, place: tuple[int, int, int], work: WorkModel
) -> BalancedSampler | PackedSampler:
    """The sampler of a strategy with an index of all lengths.

    Args:
        config: says which.
        data: the examples.
        place: number of ranks, this rank, and its batch size.
        work: work of a sequence by its length.
    """
    batching, lengths = config.batching, data.train.lengths
    if batching.strategy == "packed":
        longest = data.config.max_seq_length
        packed = PackedSampler(*(lengths, *place, config.seed), row_tokens=longest, work=work)
        logger.info(
            "%d sequences in %d rows of %d tokens: %.2f %% of them are real",
            *(len(data.train), packed.rows, longest, 100 * packed.fill),
        )
        return packed
    assert batching.strategy != "exchange"  # which needs no index
    population = data.train if isinstance(data.train, Mixture) else None
    return BalancedSampler(
        *(lengths, *place, config.seed, batching.strategy), work=work, population=population
    )


def feed_steps(
    config: PretrainConfig,
    sampler: Sampler,
    data: PreparedData,
    ranks: Ranks,
    updates: int,
    total_steps: int,
    padded: bool,
) -> AbstractContextManager[Iterator[tuple[Step, FeedState]]]:
    """Steps from where the sampler stands, without end; its threads end with the context.

    Args:
        config: of the run.
        sampler: from `build_sampler`.
        data: the examples.
        ranks: the processes of the run.
        updates: made already.
        total_steps: updates of the whole run.
        padded: to the few shapes that CUDA graphs have.
    """
    progress = (min(update / total_steps, 1.0) for update in itertools.count(updates))
    pin_memory = ranks.device.type == "cuda"
    graph_shapes = None
    if padded:
        graph_shapes = GraphShapes(
            config.batching.per_pass(ranks.world_size),
            config.data.max_seq_length,
            max(masking_rates(config.data.masked_lm_prob)),
        )
    if isinstance(sampler, ExchangedFeed):
        return sampler.steps(
            data.collator(), progress, pin_memory=pin_memory, graph_shapes=graph_shapes
        )
    return closing(
        endless_steps(
            StepCollator(data.collator(), config.batching.accumulation, graph_shapes),
            sampler,
            progress,
            pin_memory=pin_memory,
            efficiency=ranks.is_first,
        )
    )
