"""From the command line to a finished run: the order of events, and nothing else.

Exit codes: 0 finished; 2 wrong settings; 143 (SIGTERM) or 130 (SIGINT): saved and stopped, the
same command continues; anything else is an error. torchrun reports its own code, 1, for all but 0.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path

import torch
from torch.distributed.checkpoint import CheckpointException

from bert_unpad import ops
from bert_unpad._malloc import keep_freed_memory
from bert_unpad.batch.buckets import Buckets
from bert_unpad.data import DamagedDataError, PreparedData, prepare
from bert_unpad.data.cache import default_cache_dir
from bert_unpad.data.packed_sampler import PackedSampler
from bert_unpad.data.sampler import BalancedSampler, WorkModel
from bert_unpad.nn import BertForPreTraining
from bert_unpad.pretrain.checkpoint import Checkpointer, newest_checkpoint
from bert_unpad.pretrain.clipping import Clipping
from bert_unpad.pretrain.config import ConfigError, PretrainConfig, read_config
from bert_unpad.pretrain.evaluate import Evaluator
from bert_unpad.pretrain.exchanged import ExchangedFeed
from bert_unpad.pretrain.graphs import GraphRunner, check_graphs
from bert_unpad.pretrain.interrupt import StopRequest
from bert_unpad.pretrain.loop import Trainer
from bert_unpad.pretrain.model import build_model, replicate
from bert_unpad.pretrain.optimizer import build_optimizer
from bert_unpad.pretrain.peak import measure_matmul_peak
from bert_unpad.pretrain.ranks import Ranks, join_ranks
from bert_unpad.pretrain.report import is_reported, write_report
from bert_unpad.pretrain.run import Progress, open_run_dir, save_settings
from bert_unpad.pretrain.steps import FeedState, Step, StepCollator, endless_steps

__all__ = ["main", "pretrain"]

logger = logging.getLogger(__name__)

# Of the activations.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `pretrain.py`; returns its exit code.

    Args:
        arguments: the command line without the program's name; by default the process's own.
    """
    keep_freed_memory()
    try:
        config, resolved = read_config(arguments)
        with join_ranks(config) as ranks:
            logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
            if ranks.is_first:
                logging.getLogger("bert_unpad").setLevel(logging.INFO)
            return pretrain(config, resolved, ranks)
    except ConfigError as error:
        print(f"pretrain: error: {error}", file=sys.stderr)
        return 2


def pretrain(config: PretrainConfig, resolved: str, ranks: Ranks) -> int:
    """Trains, or continues, one run on this process's share of the work.

    Args:
        config: validated.
        resolved: the same as YAML, saved with the run.
        ranks: this process among all of the run; each of them has to call this.

    Returns:
        The exit code, see the module.

    Raises:
        ConfigError: a setting does not fit the data, the machine or the saved run.
    """
    _check_packages(config)
    check_graphs(config, ranks)
    found = ranks.from_first(newest_checkpoint(config.checkpoint_dir))
    if config.resume == "must" and found is None:
        raise ConfigError("resume", f"there is no complete checkpoint in {config.checkpoint_dir}")
    if config.resume == "never":
        found = None
    try:
        data = prepare(config.data, progress=None if ranks.is_first else False)
    except (DamagedDataError, FileNotFoundError, ImportError, ValueError) as error:
        raise ConfigError("data", str(error)) from error
    model = build_model(config, data.tokenizer.vocab_size, config.data.max_seq_length)
    sampler = _sampler(config, data, ranks, WorkModel.for_hidden(model.config.hidden_size))
    evaluator = _evaluator(config, data, ranks)
    run_dir = Path(config.run_dir)
    if ranks.is_first:
        open_run_dir(config)
    checkpointer = Checkpointer(config.checkpoint_dir, config.checkpoint.keep_last, ranks)
    model.to(ranks.device)
    if ranks.device.type == "cuda":
        ops.time_algorithms(default_cache_dir() / "cublaslt_algorithms.txt")
    optimizer = build_optimizer(model, config.optimizer)
    progress = Progress()
    if found is not None:
        try:
            progress = Progress(**checkpointer.load(found, model, optimizer))
            sampler.load_state_dict(progress.sampler)
        except (CheckpointException, ValueError) as error:
            raise ConfigError(
                "resume",
                f"{found} is of another model or other data, so give another run_dir, or "
                f"--resume never ({error})",
            ) from error
        logger.info("continuing from %s", found)
    if ranks.is_first:
        save_settings(run_dir, resolved)
    total_steps = _total_steps(config, sampler, progress)

    if progress.step < total_steps and not progress.target_reached:
        peak = measure_matmul_peak(ranks.device, _DTYPES[config.precision])
        logger.info("peak of one process: %s", peak)
        clipping = Clipping(config.clip, ranks, model, config.comm)
        graphs, replica = None, model
        if config.cuda_graphs:
            graphs = GraphRunner(model, _autocast(config, ranks))
        else:
            replica = replicate(model, ranks, config.compile, clipping)
        clipping.load_state_dict(progress.clip)
        clipping.exchange.begin(progress.step)
        if found is not None and (local := checkpointer.load_local(found)) is not None:
            clipping.exchange.load_local_state(local)
        trainer = Trainer(
            config,
            run_dir,
            ranks,
            model,
            replica,
            clipping,
            optimizer,
            checkpointer,
            evaluator,
            progress,
            total_steps=total_steps,
            max_seq_length=config.data.max_seq_length,
            peak=peak,
            autocast=_autocast(config, ranks),
            graphs=graphs,
        )
        with StopRequest() as stop, _steps(config, sampler, data, model, ranks) as steps:
            finished = trainer.run(steps, stop)
        if not finished:
            logger.info("stopped by a signal; saved at step %d of %d", progress.step, total_steps)
            ranks.barrier()
            return stop.exit_code
    elif is_reported(run_dir, progress.step):
        logger.info(
            "nothing to do: all %d steps are done, and the report is in %s (training, evaluation "
            "and export are skipped; give another run_dir, or --resume never, to train again)",
            progress.step,
            run_dir,
        )
        return 0
    else:
        logger.info("all %d steps are done: skipping to the report", progress.step)

    if ranks.is_first:
        write_report(config, run_dir, data, model, progress)
    ranks.barrier()
    return 0


def _check_packages(config: PretrainConfig) -> None:
    """Finds out now, not hours later, that the plots cannot be drawn."""
    if config.logging.plots and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "logging.plots",
            "matplotlib is not installed; install bert_unpad[pretrain] or set this to false",
        )


def _autocast(config: PretrainConfig, ranks: Ranks) -> AbstractContextManager:
    return torch.autocast(
        ranks.device.type,
        dtype=_DTYPES[config.precision],
        enabled=config.precision != "fp32",
        cache_enabled=not config.cuda_graphs,  # a graph would read casts that are long freed
    )


def _evaluator(config: PretrainConfig, data: PreparedData, ranks: Ranks) -> Evaluator | None:
    settings = config.evaluation
    if settings.examples == 0:
        if settings.target_accuracy is not None:
            raise ConfigError("evaluation.target_accuracy", "needs evaluation.examples > 0")
        return None
    if not len(data.validation):
        raise ConfigError(
            "evaluation.examples",
            "no examples are held out; raise data.validation_share (for hdf5: and shards: give "
            "?validation=PATH) or set this to 0",
        )
    return Evaluator(
        data.collator("validation"),
        settings.examples,
        settings.batch_size,
        ranks,
        _autocast(config, ranks),
    )


def _sampler(
    config: PretrainConfig, data: PreparedData, ranks: Ranks, work: WorkModel
) -> BalancedSampler | PackedSampler | ExchangedFeed:
    """What says who trains on what, at the beginning of the first epoch."""
    batching = config.batching
    if batching.strategy == "exchange":
        if data.train.has_masks:
            raise ConfigError(
                "batching.strategy",
                f"exchange does not carry the masks that {config.data.source} brings; use "
                "stratified, or convert it: python -m bert_unpad.data.hdf5 to-shards --unmask",
            )
        return ExchangedFeed(data.train, ranks, batching, config.seed, work)
    place = (data.train.lengths, ranks.world_size, ranks.rank, batching.per_rank(ranks.world_size))
    if batching.strategy == "packed":
        packed = PackedSampler(
            *place,
            config.seed,
            row_tokens=config.data.max_seq_length,
            max_sequences=batching.max_sequences_per_row,
            method=batching.row_packing,
            work=work,
        )
        logger.info(
            "%d sequences in %d rows of %d tokens: %.2f %% of them are real",
            *(len(data.train), packed.rows, config.data.max_seq_length, 100 * packed.fill),
        )
        return packed
    return BalancedSampler(*place, config.seed, batching.strategy, work=work)


def _steps(
    config: PretrainConfig,
    sampler: BalancedSampler | PackedSampler | ExchangedFeed,
    data: PreparedData,
    model: BertForPreTraining,
    ranks: Ranks,
) -> AbstractContextManager[Iterator[tuple[Step, FeedState]]]:
    """Steps from where the sampler stands; its threads end with the context."""
    pin_memory = ranks.device.type == "cuda"
    accumulation = config.batching.accumulation
    buckets = None
    if config.cuda_graphs:
        buckets = Buckets(
            -(-config.batching.per_rank(ranks.world_size) // accumulation),
            config.data.max_seq_length,
            config.data.masked_lm_prob,
        )
    if isinstance(sampler, ExchangedFeed):
        return sampler.steps(data.collator(), model, pin_memory=pin_memory, buckets=buckets)
    return closing(
        endless_steps(
            StepCollator(data.collator(), model, accumulation, buckets),
            sampler,
            prefetch=config.batching.prefetch,
            pin_memory=pin_memory,
            efficiency=ranks.is_first,
        )
    )


def _total_steps(
    config: PretrainConfig,
    sampler: BalancedSampler | PackedSampler | ExchangedFeed,
    progress: Progress,
) -> int:
    """Updates of the whole run. Epochs are counted in what the sampler still has to give."""
    if config.schedule.total_steps is not None:
        return config.schedule.total_steps
    whole_epochs = config.schedule.epochs - sampler.epoch - 1
    return progress.step + max(sampler.steps_left + whole_epochs * sampler.steps_per_epoch, 0)
