"""The log of MLPerf Training's benchmark BERT, by the benchmark's own library, mlperf-logging.

Keys, their metadata and their order are those that the library's compliance checker asks of BERT
(mlcommons/logging, compliance_checker/training_5.0.0: the last rules with BERT). Its checker of
reference convergence points reads the samples until convergence from `epoch_num` of the last
`eval_accuracy`, or from `train_samples`; both are the samples trained on here. The clock, run_start
to run_stop, includes all that touches the data, as the training rules ask (mlcommons/
training_policies, "Run Results").
"""

import logging
import os
import re
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from bert_unpad.pretrain.config import ConfigError, PretrainConfig
from bert_unpad.pretrain.config.mlperf import submission
from bert_unpad.pretrain.ranks import Ranks
from bert_unpad.pretrain.update.arguments import class_arguments
from bert_unpad.pretrain.update.kinds import find_kind
from bert_unpad.pretrain.update.schedule import warmup_updates

_ROOT = str(Path(__file__).resolve().parents[3])  # which file names in the log leave out
_LAMB = ("opt_lamb_beta_1", "opt_lamb_beta_2", "opt_lamb_epsilon", "opt_lamb_weight_decay_rate")


class MlperfLog:
    """Writes the file that `logging.mlperf` names, on rank 0; without that option it does nothing.

    All ranks make the same calls. The constructor is the begin of the initialization. Lines wait in
    memory until `open_file`.

    Raises:
        ConfigError: mlperf-logging is not installed.
    """

    def __init__(self, config: PretrainConfig, ranks: Ranks) -> None:
        self._config, self._ranks = config, ranks
        self._is_on = config.logging.mlperf is not None
        self._mllogger: Any = None
        self._in_block = False
        if config.logging.mlperf is not None:
            self._path = Path(config.logging.mlperf)
            ranks.on_first(self._make)
            self._log("start", "init_start")

    def check_is_new(self, checkpoint: Path | None) -> None:
        """Checks that run and file begin now, since the rules measure one contiguous time.

        Raises:
            ConfigError: (on all ranks) there is a checkpoint to continue from, or the file is there
                already and `resume: never` does not set it aside with the run's folder.
        """
        if not self._is_on:
            return
        self._ranks.on_first(self._check_file)
        if checkpoint is not None:
            raise ConfigError(
                "resume",
                "expected never, or another run_dir, with logging.mlperf, whose runs are timed as "
                f"a whole, got {checkpoint} to continue from",
            )

    def start_run(self) -> None:
        """Logs the settings, the end of the initialization, and the start of the clock."""
        for key, value in self._settings().items() if self._is_on else ():
            self._log("event", key, value)
        self._log("end", "init_stop")
        self._log("start", "run_start")

    def open_file(self) -> None:
        """Writes what has been logged so far; from now on every line is written at once.

        Raises:
            ConfigError: (on all ranks) the file is there already, or cannot be made.
        """
        if self._is_on:
            self._ranks.on_first(self._open)

    def start_training(self, eval_samples: int) -> None:
        """Logs the begin of the first block of updates.

        Args:
            eval_samples: examples of an evaluation.
        """
        self._log("event", "eval_samples", eval_samples)
        self._start_block(0)

    def start_evaluation(self, samples: int) -> None:
        """Logs the end of a block, after training on so many samples, and of its evaluation."""
        self._stop_block(samples)
        self._log("start", "eval_start", epoch_num=samples, samples_count=samples)

    def stop_evaluation(self, samples: int, accuracy: float | None, target_reached: bool) -> None:
        """Logs an evaluation's result; stops the clock if it has reached the target."""
        count = {"epoch_num": samples, "samples_count": samples}
        self._log("event", "eval_accuracy", accuracy, **count)
        self._log("end", "eval_stop", **count)
        if target_reached:
            self._stop_run(samples, "success")

    def continue_training(self, samples: int) -> None:
        """Logs the begin of the next block of updates."""
        self._start_block(samples)

    def abort(self, samples: int) -> None:
        """Logs that the run has ended before its target."""
        self._stop_block(samples)
        self._stop_run(samples, "aborted")

    def _make(self) -> None:
        try:
            from mlperf_logging.mllog.mllog import MLLogger
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "mlperf_logging":
                raise
            raise ConfigError(
                "logging.mlperf",
                "expected the package mlperf-logging, got none: pip install 'bert_unpad[mlperf]'",
            ) from error
        # Of its own: the library's shared logger writes to stdout too, for all runs of a process.
        logger = logging.Logger("bert_unpad.mlperf", logging.INFO)
        self._lines = MemoryHandler(sys.maxsize, flushLevel=sys.maxsize)
        logger.addHandler(self._lines)
        self._mllogger = MLLogger(logger, default_stack_offset=2, root_dir=re.escape(_ROOT))

    def _check_file(self) -> None:
        run_dir = Path(self._config.run_dir).resolve()
        if self._config.resume == "never" and self._path.resolve().is_relative_to(run_dir):
            return
        if os.path.lexists(self._path):
            raise ConfigError(
                "logging.mlperf", f"expected a new file, got {str(self._path)!r}, which is there"
            )

    def _open(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = logging.FileHandler(self._path, mode="x", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                "logging.mlperf", f"expected a new file, got {str(self._path)!r}: {error}"
            ) from error
        self._lines.setTarget(file)
        self._lines.flush()
        self._lines.capacity = 1

    def _settings(self) -> dict[str, Any]:
        config, schedule = self._config, self._config.schedule
        arguments = class_arguments(find_kind(config.optimizer.name), config.optimizer)
        warmup = warmup_updates(schedule, schedule.total_steps or 0)  # which it asks for
        world_size = self._ranks.world_size
        settings = {
            "submission_benchmark": "bert",
            **submission(config),
            "seed": config.seed,
            "global_batch_size": config.batching.per_rank(world_size) * world_size,
            "gradient_accumulation_steps": config.batching.accumulation,
            "max_sequence_length": config.data.max_seq_length,
            "max_predictions_per_seq": config.data.max_predictions_per_seq,
            "opt_name": config.optimizer.name,
            "opt_base_learning_rate": config.optimizer.lr,
            "opt_end_learning_rate": config.optimizer.lr * schedule.end_lr_share,
            "opt_learning_rate_training_steps": schedule.total_steps,
            "opt_learning_rate_warmup_steps": warmup,
            "num_warmup_steps": warmup,
            "start_warmup_step": schedule.start_warmup_step,
        }
        if config.clip.mode != "none":
            settings["opt_gradient_clip_norm"] = config.clip.max_norm
        if config.optimizer.name == "lamb":
            values = (*arguments["betas"], arguments["eps"], arguments["weight_decay"])
            settings |= dict(zip(_LAMB, values, strict=True))
            power = schedule.power if schedule.name == "polynomial" else 1.0
            settings["opt_lamb_learning_rate_decay_poly_power"] = power
        return settings

    def _start_block(self, samples: int) -> None:
        self._log("start", "block_start", samples_count=samples)
        self._in_block = True

    def _stop_block(self, samples: int) -> None:
        if self._in_block:
            self._log("end", "block_stop", samples_count=samples)
        self._in_block = False

    def _stop_run(self, samples: int, status: str) -> None:
        self._log("event", "train_samples", samples)
        self._log("end", "run_stop", status=status)

    def _log(self, kind: str, key: str, value: Any = None, **metadata: Any) -> None:
        """Logs a start, an end or an event."""
        if self._mllogger is not None:
            getattr(self._mllogger, kind)(key, value, metadata=metadata)
