"""What a run tells while it trains: metrics.jsonl, which examples were used, the progress display.

`interval_line` is the place of the fields of a `train` line; docs/training lists what they mean.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_unpad.data.objective import Objective
from bert_unpad.pretrain.feed.steps import Step
from bert_unpad.pretrain.gradients.clipping import GradientReport
from bert_unpad.pretrain.losses import averages
from bert_unpad.pretrain.output.display import Display
from bert_unpad.pretrain.output.energy import EnergyMeter, joules_per_sequence
from bert_unpad.pretrain.output.matmul_peak import measure_matmul_peak
from bert_unpad.pretrain.output.metrics import JsonLines, Stopwatch, Window, examples_path
from bert_unpad.pretrain.run import Run

logger = logging.getLogger(__name__)


def interval_line(
    sums: dict[str, float],
    seconds: float,
    ranks: int,
    peak_flops: float,
    objective: Objective = "mlm_nsp",
) -> dict[str, Any]:
    """The fields of a `train` line that follow from one interval's sums.

    Args:
        sums: over the interval and all ranks, as `Window.close` returns them.
        seconds: that the interval took.
        ranks: processes of the run.
        peak_flops: matrix-product rate of all ranks together, 1/s.
        objective: whose losses and accuracies to report.
    """
    steps = sums["steps"]
    line = {
        **averages(sums, objective),
        "clipped_share": sums["clipped"] / sums["clippable"] if sums["clippable"] else None,
        "skipped_steps": int(sums["skipped"]),
        "masked_share": sums["masked"] / sums["tokens"],
        "tokens_per_second": sums["tokens"] / seconds,
        "sequences_per_second": sums["sequences"] / seconds,
        "fill": sums["tokens"] / sums["slots"],
        "straggler_efficiency": sums["straggler_efficiency"] / steps,
        "measured_efficiency": (
            sums["measured_efficiency"] / steps if "measured_efficiency" in sums else None
        ),
        "work_variation": max(steps * sums["squared_work"] / sums["work"] ** 2 - 1, 0.0) ** 0.5,
        "mfu": sums["flops"] / seconds / peak_flops,
        "data_wait": sums["data_wait"] / steps / ranks,
    }
    if "exchange_bytes" in sums:
        line["exchange_seconds"] = sums["exchange_seconds"] / (steps * ranks)
        line["exchange_bytes"] = sums["exchange_bytes"] / steps
    return line


class TrainingLog:
    """The record of one run. All ranks make the same calls; rank 0 writes.

    Args:
        run: its progress says which lines of an earlier start stay.
        total_steps: updates of the whole run.
    """

    def __init__(self, run: Run, total_steps: int) -> None:
        config, ranks, progress = run.config, run.ranks, run.progress
        self._run = run
        self._total_steps = total_steps
        peak = measure_matmul_peak(run.device, run.dtype)
        logger.info("peak of one process: %s", peak)
        rate = torch.tensor(peak.flops_per_second, dtype=torch.float64, device=run.device)
        self._peak_flops = float(ranks.sum(rate))
        self.watch = Stopwatch(progress.seconds)
        self.window = Window(ranks, progress.window)
        self._norm: Tensor | None = None
        self._metrics = self._open(run.dir / "metrics.jsonl") if ranks.is_first else None
        self._examples = None
        if config.logging.examples:
            self._examples = self._open(examples_path(run.dir, ranks.rank))
        self._display = Display(
            *(config.logging, run.dir, progress.step, total_steps),
            silent=not ranks.is_first,
            settings=dataclasses.asdict(config),
        )
        # Last of all: its readers have to be closed.
        self._energy = EnergyMeter(ranks, progress.joules if progress.step else None)
        self.write(
            "start",
            {
                "ranks": ranks.world_size,
                "device": _device_name(run.device),
                "precision": config.precision,
                "threads": torch.get_num_threads(),
                "peak": str(peak),
                "peak_flops": self._peak_flops,
                "energy_missing": self._energy.missing,
            },
        )

    def write(self, kind: str, values: dict[str, Any]) -> dict[str, Any]:
        """Writes a line about the current step; returns it."""
        line = {"kind": kind, "step": self._run.progress.step, **values}
        if self._metrics is not None:
            self._metrics.write(line)
        return line

    def add_gradient(self, gradient: GradientReport) -> None:
        """Notes what an update's gradient was like; the host does not wait."""
        self._norm = gradient.norm
        self.window.add_gradient(gradient)

    def add_step(self, step: Step, straggler_efficiency: float | None) -> None:
        """Counts an update."""
        self.window.add_counts({"steps": 1})
        if straggler_efficiency is not None:
            self.window.add_counts({"straggler_efficiency": straggler_efficiency})
        if self._examples is not None:
            self._examples.write(
                {
                    "step": self._run.progress.step,
                    "epoch": step.epoch,
                    "examples": step.indices.tolist(),
                }
            )

    def note_costs(self) -> None:
        """Notes in the run's progress the seconds and joules that it has taken so far."""
        self._run.progress.seconds = self.watch.seconds
        self._run.progress.joules = self._energy.joules()

    def close_interval(self) -> tuple[dict[str, float], float]:
        """Ends an interval; its sums over all ranks, and its seconds."""
        progress = self._run.progress
        sums = self.window.close()
        self.note_costs()
        elapsed = progress.seconds - progress.window_seconds
        progress.window_seconds = progress.seconds
        return sums, elapsed

    def show_interval(self, sums: dict[str, float], elapsed: float, state: dict[str, Any]) -> None:
        """Writes and shows the `train` line of an interval.

        Args:
            sums: of the interval, from `close_interval`.
            elapsed: seconds of the interval.
            state: further fields, of the trainer's state.
        """
        run = self._run
        if not run.ranks.is_first:
            return
        progress = run.progress
        line = self.write(
            "train",
            {
                "epoch": progress.epoch,
                "gradient_norm": None if self._norm is None else float(self._norm),
                "tokens": progress.tokens,
                "sequences": progress.sequences,
                "flops": progress.flops,
                "seconds": progress.window_seconds,
                **interval_line(
                    *(sums, elapsed, run.ranks.world_size, self._peak_flops),
                    run.config.data.objective,
                ),
                **{f"{source}_joules": joules for source, joules in progress.joules.items()},
                "joules_per_sequence": joules_per_sequence(progress.joules, progress.sequences),
                **state,
            },
        )
        left = (self._total_steps - progress.step) * elapsed / sums["steps"]
        self._display.update(line, remaining_seconds=left)

    def show_evaluation(self, result: dict[str, float | None]) -> None:
        """Writes and shows what an evaluation has found."""
        self._display.evaluated(self.write("evaluation", result))

    def close(self) -> None:
        """Closes the files and the display."""
        self._display.close()
        self._energy.close()
        for file in (self._metrics, self._examples):
            if file is not None:
                file.close()

    def _open(self, path: Path) -> JsonLines:
        return JsonLines(path, self._run.progress.step)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
