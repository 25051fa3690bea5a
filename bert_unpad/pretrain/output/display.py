"""Shows a run while it goes on: a progress bar or log lines on rank 0, and a tracker."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bert_unpad.pretrain.config import LoggingConfig
from bert_unpad.pretrain.output.trackers import TRACKERS

logger = logging.getLogger(__name__)


class Display:
    """Shows progress on rank 0: a bar, lines, or nothing; and to a tracker if there is one.

    Args:
        config: says which.
        run_dir: the run's folder.
        step: updates made already.
        total: updates of the run.
        silent: show nothing, as all ranks but the first do.
        settings: of the run, for the tracker.

    Raises:
        ConfigError: the package of the tracker is not installed.
    """

    def __init__(
        self,
        config: LoggingConfig,
        run_dir: Path,
        step: int,
        total: int,
        silent: bool,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        kind = config.progress
        if kind == "auto":
            kind = "bar" if sys.stderr.isatty() else "lines"
        self._kind = "none" if silent else kind
        self._total = total
        self._bar = None
        if self._kind == "bar":
            self._bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True)
        self._tracker = None
        if not silent and config.tracker != "none":
            self._tracker = TRACKERS[config.tracker](run_dir, step, settings or {})

    def update(self, line: Mapping[str, Any], remaining_seconds: float) -> None:
        """Shows a line of the log, and when training will have ended at this pace."""
        self._track("train", line)
        shown = {
            "loss": f"{line['loss']:.3f}",
            "lr": f"{line['lr']:.2e}",
            "mlm acc": _number(line["mlm_accuracy"]),
            "tokens/s": f"{line['tokens_per_second']:,.0f}",
            "fill": f"{line['fill']:.2f}",
            "balance": f"{line['straggler_efficiency']:.4f}",
            "mfu": f"{line['mfu']:.2f}",
        }
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(line["step"] - self._bar.n)
        elif self._kind == "lines":
            text = "  ".join(f"{name} {value}" for name, value in shown.items())
            minutes, seconds = divmod(round(remaining_seconds), 60)
            logger.info(
                "step %d/%d  %s  ETA %d:%02d", line["step"], self._total, text, minutes, seconds
            )

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """Shows the result of an evaluation."""
        self._track("evaluation", line)
        accuracies = "  ".join(
            f"{name.removesuffix('_accuracy')} acc {_number(value)}"
            for name, value in line.items()
            if name.endswith("_accuracy")
        )
        text = f"step {line['step']}/{self._total}  held out: loss {line['loss']:.3f}  {accuracies}"
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self._kind == "lines":
            logger.info("%s", text)

    def close(self) -> None:
        """Ends the bar and closes the tracker."""
        if self._bar is not None:
            self._bar.close()
        if self._tracker is not None:
            self._tracker.close()

    def _track(self, kind: str, line: Mapping[str, Any]) -> None:
        figures = {
            f"{kind}/{name}": value
            for name, value in line.items()
            if isinstance(value, int | float) and name != "step"
        }
        if self._tracker is not None:
            self._tracker.add(figures, line["step"])


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
