"""What runs the jobs of a stage: this process, or several on this machine.

A job is a function of a module and its arguments, and leaves its result in files. So any engine
gives the same result, and a job that was killed is run again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

Job = Callable[..., dict[str, Any]]
_LEASH = str(Path(__file__).with_name("leash.py"))


def available_cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class Engine(AbstractContextManager["Engine"], Protocol):
    """Runs jobs; the result does not depend on which engine it is.

    Attributes:
        workers: number of jobs that run at once.
    """

    workers: int

    def run(self, job: Job, arguments: Sequence[tuple]) -> Iterator[dict[str, Any]]:
        """Calls `job` with each tuple of arguments, and yields results as they come."""


class InProcess:
    """Runs one job after the other, here; libraries use all cores as they like."""

    workers = 1

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, job: Job, arguments: Sequence[tuple]) -> Iterator[dict[str, Any]]:
        """See `Engine`."""
        for one in arguments:
            yield job(*one)


class Processes:
    """Runs jobs in processes of this machine, each on one core."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers: expected at least 1, got {workers}")
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, job: Job, arguments: Sequence[tuple]) -> Iterator[dict[str, Any]]:
        """See `Engine`.

        Raises:
            RuntimeError: a process was killed.
        """
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self.workers,
                # A fork would copy locks that threads of the tokenizer's library hold.
                multiprocessing.get_context("spawn"),
                initializer=begin_worker,
            )
        try:
            with _leashed():  # as this starts the processes
                jobs = [self._pool.submit(job, *one) for one in arguments]
            for done in as_completed(jobs):
                yield done.result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a worker was killed, perhaps because memory ran out; give fewer workers or less "
                "memory each, and run the same command again: what is finished is kept"
            ) from error


@contextmanager
def _leashed() -> Iterator[None]:
    """Lets new processes run `leash.py` first, and not the program that starts them.

    Jobs are functions of modules and do not need that program, and it may come from stdin or do its
    work without asking for `__name__`.
    """
    program = vars(sys.modules["__main__"])
    names = ("__file__", "__spec__")
    kept = {name: program[name] for name in names if name in program}
    program |= {"__file__": _LEASH, "__spec__": None}
    os.environ["BERT_UNPAD_PARENT"] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ["BERT_UNPAD_PARENT"]
        for name in names:
            del program[name]
        program |= kept


def begin_worker() -> None:
    """Keeps this process to one thread, and ends it when the one that started it has ended."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    parent = multiprocessing.parent_process()
    if parent is not None:

        def follow() -> None:
            wait([parent.sentinel])
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
