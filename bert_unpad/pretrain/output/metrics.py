"""What a run measures while it trains: sums on the device, JSON lines on disk.

Losses are added up on the device and read once per logging interval, so a step never makes the host
wait. `metrics.jsonl` is the record: one line per interval or evaluation, flushed at once; a resumed
run first drops the lines past its checkpoint, so that every step is there once.
"""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bert_unpad._files import read_regular, set_aside, write_text
from bert_unpad._full_disk import named_if_full
from bert_unpad.data.sampling.balanced_sampler import efficiency
from bert_unpad.pretrain.gradients.clipping import GradientReport
from bert_unpad.pretrain.gradients.compute_clock import Spans, span_seconds
from bert_unpad.pretrain.losses import SUMS
from bert_unpad.pretrain.ranks import Ranks

logger = logging.getLogger(__name__)


class JsonLines:
    """A file of JSON objects, one a line, each with a `step`.

    Args:
        path: the file.
        step: the step a run continues from: lines of later steps, and a torn last line, are
            dropped first. 0 starts an empty file. What is otherwise damaged is kept beside it.
    """

    def __init__(self, path: Path, step: int) -> None:
        _drop_later(path, step)
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends a line and hands it to the operating system."""
        with named_if_full(self._path):
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with named_if_full(self._path):  # what could not be written before is tried again
            self._file.close()


def examples_path(run_dir: Path, rank: int) -> Path:
    """The file of which examples a rank used in each step."""
    return run_dir / f"examples.rank{rank}.jsonl"


def drop_later_examples(run_dir: Path, step: int, first_rank: int) -> None:
    """Drops the lines past `step` from the files that an earlier start with more ranks has left.

    Args:
        first_rank: the first rank that no longer writes such a file.
    """
    for path in run_dir.glob("examples.rank*.jsonl"):
        number = path.name.removeprefix("examples.rank").removesuffix(".jsonl")
        if number.isdecimal() and int(number) >= first_rank:
            _drop_later(path, step)


def _drop_later(path: Path, step: int) -> None:
    lines, damage = _read(path)
    if damage is not None:
        aside = set_aside(path, "damaged")
        logger.warning(
            "%s is damaged and now called %s (%s); the run goes on with its %d whole lines",
            *(path, aside.name, damage, len(lines)),
        )
    kept = [line for line in lines if line["step"] <= step] if step else []
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file; none if it does not exist."""
    return _read(path)[0]


def numbers(lines: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The values of a field in the lines that have a number there."""
    return [line[name] for line in lines if isinstance(line.get(name), int | float)]


def _read(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The whole lines of a file, and what is wrong with others, except a torn last one."""
    try:
        texts = read_regular(path).split(b"\n")
    except FileNotFoundError:
        return [], None
    except OSError as error:
        return [], f"it cannot be read: {error.strerror}"
    found = [_line(text) for text in texts]
    # After the last line there is nothing, or what a process that was killed has written of it.
    damaged = [number for number, line in enumerate(found[:-1], 1) if line is None]
    damage = f"line {damaged[0]} is no line of a log" if damaged else None
    return [line for line in found if line is not None], damage


def _line(text: bytes) -> dict[str, Any] | None:
    """A line of a log; None if it is damaged."""
    try:
        line = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    whole = isinstance(line, dict) and isinstance(line.get("step"), int)
    return line if whole and (isinstance(line.get("kind"), str) or "examples" in line) else None


class Stopwatch:
    """Seconds spent training; evaluation does not count."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds up to now."""
        return self._seconds + time.perf_counter() - self._started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stands still inside."""
        self._seconds = self.seconds
        try:
            yield
        finally:
            self._started = time.perf_counter()


_GRADIENT_SUMS = ("clipped", "clippable", "skipped")


class Window:
    """Sums since the last line of the log, over all ranks.

    What the model returns stays on the device until `close`; counts are global and on the host
    already. `fold` makes everything a JSON object, which a checkpoint between two lines carries.
    """

    def __init__(self, ranks: Ranks, state: Mapping[str, Any] | None = None) -> None:
        self._ranks = ranks
        self._local = torch.zeros(len(SUMS), dtype=torch.float64, device=ranks.device)
        self._gradient = torch.zeros(len(_GRADIENT_SUMS), dtype=torch.float64, device=ranks.device)
        self._global = dict(state) if state else {}
        self._spans: list[Spans] = []

    def add_losses(self, sums: Tensor) -> None:
        """Adds this rank's sums of losses and correct predictions, as `stack_outputs` has them."""
        self._local += sums

    def add_gradient(self, gradient: GradientReport) -> None:
        """Adds what was clipped on this rank, and whether all ranks left the update out."""
        self._gradient[0] += gradient.clipped
        self._gradient[1] += gradient.parts
        if self._ranks.is_first:
            self._gradient[2] += ~gradient.finite

    def add_spans(self, spans: Spans) -> None:
        """Adds when this rank computed in an update; nothing where its clock is off."""
        if spans:
            self._spans.append(spans)

    def add_counts(self, counts: Mapping[str, float]) -> None:
        """Adds host numbers that are the same on all ranks."""
        for name, value in counts.items():
            self._global[name] = self._global.get(name, 0.0) + value

    def fold(self) -> dict[str, float]:
        """All sums so far as host numbers; all ranks must call it. Waits for the device."""
        sums = self._ranks.sum(torch.cat([self._local, self._gradient])).tolist()
        self.add_counts(dict(zip(SUMS + _GRADIENT_SUMS, sums, strict=True)))
        self._local.zero_()
        self._gradient.zero_()
        if self._spans:
            seconds = torch.zeros(
                len(self._spans),
                self._ranks.world_size,
                dtype=torch.float64,
                device=self._local.device,
            )
            seconds[:, self._ranks.rank] = torch.tensor([*map(span_seconds, self._spans)])
            measured = efficiency(self._ranks.sum(seconds).cpu().numpy()).sum()
            self.add_counts({"measured_efficiency": float(measured)})
            self._spans = []
        return dict(self._global)

    def close(self) -> dict[str, float]:
        """`fold`, and start over."""
        sums = self.fold()
        self._global = {}
        return sums
