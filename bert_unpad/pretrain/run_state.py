"""What is saved of a run: tensors, JSON, and what is one rank's own."""

import dataclasses
import logging
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException

from bert_unpad.data import PreparedData
from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.growth import Growth
from bert_unpad.pretrain.output.checkpoint import Checkpointer
from bert_unpad.pretrain.run import Progress, Run
from bert_unpad.pretrain.stages import Stages
from bert_unpad.pretrain.update.kinds import find_kind

logger = logging.getLogger(__name__)


class RunState:
    """Saves a run in one call, and restores all of it in another; every rank makes the same.

    Args:
        run: its model has all layers, on its device.
        checkpointer: writes and reads the files.
    """

    def __init__(self, run: Run, checkpointer: Checkpointer) -> None:
        self._run = run
        self._checkpointer = checkpointer

    def save(self, stages: Stages) -> None:
        """Starts to save the run as the last update leaves it; training may go on at once."""
        run, way = self._run, stages.way
        rest = dataclasses.asdict(run.progress) | stages.state_dict()
        way.synchronise(with_state=True)
        local = stages.local_state()
        self._checkpointer.save(run.progress.step, run.model, way.optimizer, rest, local)

    def wait(self) -> None:
        """Waits until what is being saved is complete on disk; see `Checkpointer.wait`."""
        self._checkpointer.wait()

    def restore(self, path: Path, growth: Growth, data: PreparedData) -> Stages:
        """Sets the run's progress and weights to those of a checkpoint.

        Args:
            path: the checkpoint.
            growth: the stages of the run.
            data: with examples of `data.max_seq_length`.

        Returns:
            What trains from then on, for `begin`.

        Raises:
            ConfigError: the checkpoint does not fit the configuration, the model or the data.
        """
        run, optimizer = self._run, self._run.config.optimizer.name
        rest, local = self._checkpointer.read(path)
        counts = {field.name: rest[field.name] for field in dataclasses.fields(Progress)}
        run.progress = Progress(**counts)
        stages = Stages(run, growth, data)
        if rest["optimizer"] != find_kind(optimizer).layout:
            raise ConfigError(
                "optimizer.name",
                f"expected one whose state is that of {path}, {rest['optimizer']} (or another "
                f"run_dir), got {optimizer}",
            )
        if rest["layers"] != stages.stage.layers:
            raise ConfigError(
                "growth",
                f"expected the growth that the run began with (or another run_dir), got a stage of "
                f"{stages.stage.layers} layers for {path}, which has {rest['layers']}",
            )
        try:
            self._checkpointer.load(path, run.model, stages.way.optimizer)
            stages.load_state_dict(rest, local)
        except ConfigError:
            raise
        except (CheckpointException, ValueError) as error:
            raise ConfigError(
                "resume",
                f"expected a checkpoint of this model and these data (or another run_dir, or "
                f"resume never), got {path}: {error}",
            ) from error
        logger.info("continuing from %s", path)
        return stages
