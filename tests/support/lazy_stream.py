"""A CPU as a GPU whose second stream does everything as late as it may."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LazyStream"]


class _Launch(TorchDispatchMode):
    """Puts off operators that write to their arguments; others run at once."""

    def __init__(self, launched: list[Callable[[], Any] | int]) -> None:
        super().__init__()
        self._launched = launched

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not function._schema.is_mutable:
            return function(*args, **kwargs)
        self._launched.append(partial(function, *args, **kwargs))
        return args[0] if function._schema.returns else None


class LazyStream:
    """In the place of `SideStream`, with the same methods.

    What work writes is not written before something waits for an event that was recorded after it.
    So who reads it too early finds old values, and who writes too early what work reads, changes
    its results.

    Args:
        ignored: events for which nothing waits, to make mistakes that a test must find.
    """

    def __init__(self, *sizes: Any, ignored: tuple[int, ...] = ()) -> None:
        self._ignored = ignored
        self._launched: list[Callable[[], Any] | int] = []
        self.waits: list[int] = []
        """The events that were waited for, one after another."""

    @property
    def idle(self) -> bool:
        """Whether all work is done."""
        return not self._launched

    def run(self, work: Callable[[], None]) -> None:
        with _Launch(self._launched):
            work()

    def record(self, number: int) -> None:
        self._launched.append(number)

    @torch.no_grad()
    def wait(self, number: int) -> None:
        self.waits.append(number)
        if number in self._ignored or number not in self._launched:
            return
        end = len(self._launched) - self._launched[::-1].index(number)
        now, self._launched[:end] = self._launched[:end], []
        with torch.autocast("cpu", enabled=False):
            for entry in now:
                if callable(entry):
                    entry()
