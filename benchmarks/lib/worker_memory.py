"""The memory that workers of a preparation take; imports nothing large, as they import it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bert_unpad.data.preparation.engines import Engine


class Measured:
    """Runs jobs in an engine, and notes the largest memory of a process that ran one.

    Attributes:
        peak_bytes: largest resident size so far.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.workers, self.peak_bytes = engine, engine.workers, 0

    def run(self, job: Callable[..., Any], arguments: Sequence[tuple]) -> Iterator[dict[str, Any]]:
        """See `Engine`."""
        for done in self._engine.run(_measured, [(job, one) for one in arguments]):
            self.peak_bytes = max(self.peak_bytes, done.pop("peak_bytes"))
            yield done


def _measured(job: Callable[..., dict[str, Any]], arguments: tuple) -> dict[str, Any]:
    return {**job(*arguments), "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """The largest resident size of this process (Linux)."""
    # Not ru_maxrss, which begins with that of the process that started this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise KeyError("VmHWM")
