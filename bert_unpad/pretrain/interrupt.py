"""Turns SIGTERM and SIGINT into a request that the training loop meets between two steps."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from types import FrameType


class StopRequest:
    """Inside `with`, SIGTERM or SIGINT sets `signal` and does nothing else.

    Further signals change nothing: a process often gets the same one twice, from the job manager
    and from torchrun, which passes it on. SIGQUIT and SIGKILL still end a process at once.

    A run that has saved and stopped exits with `exit_code`: 143 after SIGTERM, 130 after SIGINT,
    which is what a shell reports for a process that the signal has killed.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._at_end = ExitStack()

    @property
    def exit_code(self) -> int:
        """128 + the signal's number; SIGTERM's if only another rank has got one."""
        return 128 + (self.signal or signal.SIGTERM)

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._at_end.callback(signal.signal, number, signal.signal(number, self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._at_end.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
