"""From settings to a finished run: the order of events, and nothing else."""

import logging
import sys
from pathlib import Path

from bert_unpad import ops
from bert_unpad.data import PreparedData
from bert_unpad.data.sampling.warmup_sampler import WarmupSampler
from bert_unpad.data.store.cache import default_cache_dir
from bert_unpad.data.text.tokenizer import TextTokenizer
from bert_unpad.nn import EncoderForPreTraining
from bert_unpad.pretrain.config import ConfigError, PretrainConfig
from bert_unpad.pretrain.config.output import EvaluationConfig
from bert_unpad.pretrain.evaluate import Evaluator
from bert_unpad.pretrain.gradients.cuda_graphs import check_graphs
from bert_unpad.pretrain.growth import Growth, Setting, make_growth
from bert_unpad.pretrain.interrupt import StopRequest
from bert_unpad.pretrain.loop import Trainer
from bert_unpad.pretrain.model import build_model, check_model
from bert_unpad.pretrain.output.checkpoint import Checkpointer
from bert_unpad.pretrain.output.checkpoint_files import newest_checkpoint
from bert_unpad.pretrain.output.metrics import drop_later_examples
from bert_unpad.pretrain.output.mlperf_log import MlperfLog
from bert_unpad.pretrain.output.report import is_reported, write_report
from bert_unpad.pretrain.output.run_folder import check_folders, save_settings
from bert_unpad.pretrain.output.run_lock import RunLock, run_lock
from bert_unpad.pretrain.parallel import WAYS
from bert_unpad.pretrain.prepared_data import DATA_ERRORS, open_data, short_examples
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.run import Run
from bert_unpad.pretrain.run_state import RunState
from bert_unpad.pretrain.stages import Stages
from bert_unpad.pretrain.update.check import check_optimizer

logger = logging.getLogger(__name__)


def pretrain(config: PretrainConfig, resolved: str, ranks: Ranks) -> int:
    """Trains, or continues, one run on this process's share of the work.

    Args:
        config: validated.
        resolved: the same as YAML, saved with the run.
        ranks: this process among all of the run; each of them has to call this.

    Returns:
        The exit code, see `bert_unpad.pretrain.main`.

    Raises:
        ConfigError: a setting does not fit the data, the machine or the saved run, or another run
            uses the folder.
    """
    mlperf = MlperfLog(config, ranks)
    check_graphs(config, ranks)
    way = WAYS[config.optimizer.shard]
    check_optimizer(
        config,
        ranks.device,
        shares_state=way.shares_state,
        cuts_parameters=way.cuts_parameters,
    )
    check_model(config, ranks.device)
    check_folders(config, ranks)
    with run_lock(config, ranks) as lock:
        return _pretrain(config, resolved, ranks, lock, mlperf)


def _pretrain(
    config: PretrainConfig, resolved: str, ranks: Ranks, lock: RunLock | None, mlperf: MlperfLog
) -> int:
    checkpoint = _find_checkpoint(config, ranks)
    mlperf.check_is_new(checkpoint)
    # Before the data where a tokenizer is given: what does not fit is found before data are
    # prepared, and MLPerf's clock, which starts with the data, leaves it out.
    given = _given_tokenizer(config)
    model = None if given is None else _model(config, given, ranks)
    mlperf.start_run()
    data = open_data(config.data, ranks)
    if (line := short_examples(data)) is not None:
        logger.info(line)
    run = Run(config, ranks, model or _model(config, data.tokenizer, ranks))
    growth = _growth(run)
    evaluator = _evaluator(run, data)
    if lock is not None and config.resume == "never":
        lock.set_aside()
    mlperf.open_file()
    checkpointer = Checkpointer(config.checkpoint_dir, config.checkpoint.keep_last, ranks, lock)
    if run.device.type == "cuda":
        file = default_cache_dir() / "cublaslt_algorithms.txt"
        ops.time_algorithms(config.time_products, path=file if config.time_products else None)
    state = RunState(run, checkpointer)
    if checkpoint is None:
        stages = Stages(run, growth, data)
    else:
        stages = state.restore(checkpoint, growth, data)
    if ranks.is_first:
        save_settings(run.dir, resolved)
        examples_of = ranks.world_size if config.logging.examples else 0
        drop_later_examples(run.dir, run.progress.step, examples_of)
    total_steps = _total_steps(run, stages)

    if run.progress.step < total_steps and not run.progress.target_reached:
        stages.begin()
        trainer = Trainer(run, stages, state, evaluator, mlperf, total_steps)
        with StopRequest() as stop:
            finished = trainer.train(stop)
        if not finished:
            logger.info(
                "stopped by a signal; saved at step %d of %d", run.progress.step, total_steps
            )
            ranks.barrier()
            return stop.exit_code
    elif is_reported(run.dir, run.progress.step):
        logger.info(
            "nothing to do: all %d steps are done, and the report is in %s (training, evaluation "
            "and export are skipped; give another run_dir, or --resume never, to train again)",
            run.progress.step,
            run.dir,
        )
        return 0
    else:
        logger.info("all %d steps are done: skipping to the report", run.progress.step)

    run.model = stages.way.whole()
    if ranks.is_first:
        write_report(run, data)
    ranks.barrier()
    return 0


def _find_checkpoint(config: PretrainConfig, ranks: Ranks) -> Path | None:
    """The checkpoint to continue from, the same on all ranks."""
    if config.resume == "never":
        return None
    found = ranks.on_first(lambda: newest_checkpoint(config.checkpoint_dir))
    if config.resume == "must" and found is None:
        raise ConfigError("resume", f"expected a checkpoint in {config.checkpoint_dir}, got none")
    return found


def _given_tokenizer(config: PretrainConfig) -> TextTokenizer | None:
    """The tokenizer that the settings name; None where it comes with the data."""
    try:
        return config.data.given_tokenizer()
    except DATA_ERRORS as error:
        raise ConfigError("data", str(error)) from error


def _model(config: PretrainConfig, tokenizer: TextTokenizer, ranks: Ranks) -> EncoderForPreTraining:
    """The model for a tokenizer, on its device."""
    sizes = (tokenizer.vocab_size, config.data.max_seq_length)
    return build_model(config, *sizes, tokenizer.pad_id, tokenizer.mask_id).to(ranks.device)


_WHOLE = ("none", "lengths")  # schedules that train all layers all the time


def _growth(run: Run) -> Growth:
    """The stages of the run."""
    config = run.config
    if run.model.config.num_hidden_groups is not None and config.growth.name not in _WHOLE:
        raise ConfigError(
            "growth.name",
            f"expected {' or '.join(_WHOLE)} for a model whose layers share weights, which has no "
            f"layer to add, freeze or leave out alone, got {config.growth.name}",
        )
    return make_growth(
        config.growth,
        Setting(
            config.seed,
            config.schedule.total_steps or sys.maxsize,  # without borders a run may count epochs
            run.model.config.num_hidden_layers,
            config.data.max_seq_length,
        ),
    )


def _evaluator(run: Run, data: PreparedData) -> Evaluator | None:
    settings = run.config.evaluation
    if settings.examples == 0:
        return None
    if not len(data.validation):
        where = "data.validation_share of two documents or more, for shards: "
        where += "?validation=PATH"
        if settings.examples == EvaluationConfig.examples and settings.target_accuracy is None:
            logger.info("no example is held out (%s): training without evaluation", where)
            return None
        raise ConfigError(
            "evaluation.examples",
            f"expected 0 or held-out examples ({where}), got {settings.examples} and no example "
            "held out",
        )
    return Evaluator(
        data.collator("validation"),
        settings.examples,
        data.train.lengths,
        run.config.batching.per_pass(run.ranks.world_size),
        run.ranks,
        run.autocast,
        run.config.data.objective,
    )


def _total_steps(run: Run, stages: Stages) -> int:
    """Updates of the whole run. Epochs are counted in what the sampler still has to give."""
    schedule, sampler = run.config.schedule, stages.sampler
    if schedule.total_steps is not None:
        return schedule.total_steps
    assert schedule.epochs is not None
    assert not isinstance(sampler, WarmupSampler)  # as the rules between options say
    whole_epochs = schedule.epochs - sampler.epoch - 1
    return run.progress.step + max(sampler.steps_left + whole_epochs * sampler.steps_per_epoch, 0)
