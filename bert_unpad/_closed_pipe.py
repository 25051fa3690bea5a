"""Ends commands whose output nobody reads any more, as after `| head -1`, as other tools end then.

Python ignores SIGPIPE, whose default ends a tool silently: writing raises a BrokenPipeError, and
the last write, at exit, another that nothing can catch. The signal's default would be wrong here,
since it ends a process for the lost connection to another rank or worker too.
"""

import gc
import os
import select
import sys
from collections.abc import Callable
from typing import NoReturn, TextIO

STATUS = 128 + 13
"""The exit status of a process that SIGPIPE has ended, as shells show it."""


def run_main(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the status that `main` returns, or with `STATUS` if nobody reads."""
    gc.freeze()  # the garbage collector need not walk the modules, neither now nor at the end
    status: int | str | None = 0
    try:
        try:
            status = main()
        except SystemExit as end:  # after --help, and errors in the arguments
            status = end.code
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        if not nobody_reads():
            raise  # of another pipe
        status = status or STATUS
        for stream in _unread():  # Python writes once more what is left
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)


def nobody_reads() -> bool:
    """Whether stdout or stderr is a pipe that nobody can read from."""
    return bool(_unread())


def _unread() -> list[TextIO]:
    found = []
    for stream in (sys.stdout, sys.stderr):
        try:
            poll = select.poll()
            poll.register(stream.fileno(), 0)
        except (AttributeError, OSError, ValueError):  # no file
            continue
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            found.append(stream)
    return found
