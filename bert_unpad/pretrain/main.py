"""From the command line to a finished run: the order of events, and nothing else.

Exit codes: 0 finished; 2 wrong settings, or another run uses the folder; 143 (SIGTERM) or 130
(SIGINT): saved and stopped, the same command continues; anything else is an error. torchrun reports
its own code, 1, for all but 0.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.distributed.checkpoint import CheckpointException

from bert_unpad import ops
from bert_unpad._malloc import keep_freed_memory
from bert_unpad.data import PreparedData, prepare
from bert_unpad.data.store.cache import default_cache_dir
from bert_unpad.pretrain.config import ConfigError, PretrainConfig, read_config
from bert_unpad.pretrain.evaluate import Evaluator
from bert_unpad.pretrain.gradients.cuda_graphs import GraphRunner, check_graphs
from bert_unpad.pretrain.growth import Setting, plan_growth
from bert_unpad.pretrain.interrupt import StopRequest
from bert_unpad.pretrain.loop import Trainer
from bert_unpad.pretrain.model import build_model, check_model
from bert_unpad.pretrain.output.checkpoint import Checkpointer
from bert_unpad.pretrain.output.checkpoint_files import newest_checkpoint
from bert_unpad.pretrain.output.folders import check_folders
from bert_unpad.pretrain.output.matmul_peak import measure_matmul_peak
from bert_unpad.pretrain.output.metrics import drop_later_examples
from bert_unpad.pretrain.output.report import is_reported, write_report
from bert_unpad.pretrain.output.run_dir import Progress, on_first, save_settings
from bert_unpad.pretrain.output.run_lock import RunLock, run_lock
from bert_unpad.pretrain.ranks import Ranks, join_ranks
from bert_unpad.pretrain.stages import DATA_ERRORS, Stages

__all__ = ["forward_context", "main", "pretrain"]

logger = logging.getLogger(__name__)

# Of the activations.
_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


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
        ConfigError: a setting does not fit the data, the machine or the saved run, or another run
            uses the folder.
    """
    _check_packages(config)
    check_graphs(config, ranks)
    check_model(config, ranks.device)
    check_folders(config, ranks)
    with run_lock(config, ranks) as lock:
        return _pretrain(config, resolved, ranks, lock)


def _pretrain(config: PretrainConfig, resolved: str, ranks: Ranks, lock: RunLock | None) -> int:
    found = None
    if config.resume != "never":
        found = on_first(ranks, lambda: newest_checkpoint(config.checkpoint_dir))
    if config.resume == "must" and found is None:
        raise ConfigError("resume", f"there is no checkpoint in {config.checkpoint_dir}")
    try:
        data = prepare(config.data, progress=None if ranks.is_first else False)
    except DATA_ERRORS as error:
        raise ConfigError("data", str(error)) from error
    ranks.meet()  # a machine may have had to prepare data that another one had
    model = build_model(config, data.tokenizer.vocab_size, config.data.max_seq_length)
    growth = plan_growth(
        config.growth,
        Setting(
            config.seed,
            config.schedule.total_steps or sys.maxsize,  # none, which has no borders, takes epochs
            model.config.num_hidden_layers,
            config.data.max_seq_length,
        ),
    )
    evaluator = _evaluator(config, data, ranks)
    run_dir = Path(config.run_dir)
    if lock is not None and config.resume == "never":
        lock.set_aside()
    checkpointer = Checkpointer(config.checkpoint_dir, config.checkpoint.keep_last, ranks, lock)
    model.to(ranks.device)
    if ranks.device.type == "cuda":
        ops.time_algorithms(default_cache_dir() / "cublaslt_algorithms.txt")
    progress = Progress()
    if found is not None:
        progress = Progress(**checkpointer.load_rest(found))
    stages = Stages(config, growth, ranks, model, data, progress.stage)
    if found is not None:
        if progress.layers not in (None, stages.stage.layers):
            raise ConfigError(
                "growth",
                f"{found} has {progress.layers} layers, this stage {stages.stage.layers}: go on "
                "with the growth that the run began with, or give another run_dir",
            )
        try:
            checkpointer.load(found, model, stages.optimizer)
            stages.sampler.load_state_dict(progress.sampler)
            if stages.loss_scale is not None:
                stages.loss_scale.load_state_dict(progress.loss_scale)
        except ConfigError:
            raise
        except (CheckpointException, ValueError) as error:
            raise ConfigError(
                "resume",
                f"{found} is of another model or other data, so give another run_dir, or "
                f"--resume never ({error})",
            ) from error
        logger.info("continuing from %s", found)
    if ranks.is_first:
        save_settings(run_dir, resolved)
        drop_later_examples(
            run_dir, progress.step, ranks.world_size if config.logging.examples else 0
        )
    total_steps = _total_steps(config, stages, progress)

    if progress.step < total_steps and not progress.target_reached:
        peak = measure_matmul_peak(ranks.device, _DTYPES[config.precision])
        logger.info("peak of one process: %s", peak)
        stages.begin(progress)
        graphs = GraphRunner(model, forward_context(config, ranks)) if config.cuda_graphs else None
        if found is not None and (local := checkpointer.load_local(found)) is not None:
            stages.load_local_state(local)
        trainer = Trainer(
            config,
            run_dir,
            ranks,
            model,
            stages,
            checkpointer,
            evaluator,
            progress,
            total_steps=total_steps,
            peak=peak,
            autocast=forward_context(config, ranks),
            graphs=graphs,
        )
        with StopRequest() as stop:
            finished = trainer.run(stop)
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


def forward_context(config: PretrainConfig, ranks: Ranks) -> AbstractContextManager:
    """The autocast of forward passes, in the configuration's precision."""
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
        forward_context(config, ranks),
    )


def _total_steps(config: PretrainConfig, stages: Stages, progress: Progress) -> int:
    """Updates of the whole run. Epochs are counted in what the sampler still has to give."""
    sampler = stages.sampler
    if config.schedule.total_steps is not None:
        return config.schedule.total_steps
    whole_epochs = config.schedule.epochs - sampler.epoch - 1
    return progress.step + max(sampler.steps_left + whole_epochs * sampler.steps_per_epoch, 0)
