"""Where else a run's figures go: TensorBoard's event files, Weights & Biases.

A tracker is a row of `TRACKERS`, and a value of the option logging.tracker.
"""

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from bert_unpad._files import write_text
from bert_unpad.pretrain.config import ConfigError


class Tracker(Protocol):
    """Takes figures while a run trains."""

    def add(self, figures: Mapping[str, float], step: int) -> None:
        """Takes figures by name, of an update."""

    def close(self) -> None:
        """Writes what is not written yet."""


class TensorBoard:
    """Event files in the run's folder.

    Args:
        run_dir: the run's folder.
        step: updates made already.
        settings: of the run.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, run_dir: Path, step: int, settings: Mapping[str, Any]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", "TensorBoard") from error
        # A resumed run writes the steps after its checkpoint again; the first ones are forgotten.
        self._writer = SummaryWriter(str(run_dir), purge_step=step + 1 if step else None)

    def add(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, which a resumed run goes on with.

    Its project is bert_unpad, or what the variable WANDB_PROJECT says; the package reads further
    variables (WANDB_MODE=offline). Figures of the steps after a checkpoint stay as they came first.
    Arguments and errors are those of `TensorBoard`.
    """

    def __init__(self, run_dir: Path, step: int, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", "Weights & Biases") from error
        name = run_dir / "wandb_run"
        if not (step and name.is_file()):
            write_text(name, secrets.token_hex(8))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "bert_unpad"),
            name=run_dir.resolve().name,
            id=name.read_text(),
            dir=str(run_dir),
            config=dict(settings),
            resume="allow",
        )

    def add(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, Callable[[Path, int, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}
"""The trackers, by the values of logging.tracker."""


def _missing(value: str, name: str) -> ConfigError:
    return ConfigError(
        "logging.tracker",
        f"expected none without {name} (it comes with bert_unpad[{value}]), got {value}",
    )
