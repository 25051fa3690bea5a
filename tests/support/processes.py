"""Runs a function in N processes that meet on 127.0.0.1, to test distributed code.

The processes are forked from a server that has imported the trainer once, which saves each of them
seconds of importing; they are processes of their own otherwise, and may be killed.
"""

import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = [
    "SLOWNESS",
    "TIMEOUT",
    "free_port",
    "join_ranks",
    "run_ranks",
    "run_with",
    "start_ranks",
]

_SLOWNESS = "BERT_UNPAD_TEST_SLOWNESS"  # the environment variable, which ranks read too
_QUIET_SECONDS = 0.1  # for the loop below, of a core of 2023 with nothing else to do


def _slowness() -> float:
    """How many times longer work takes on this machine now; 1 or more."""
    begun = time.perf_counter()
    sum(range(8_000_000))
    return max(round((time.perf_counter() - begun) / _QUIET_SECONDS, 1), 1.0)


if _SLOWNESS not in os.environ:
    os.environ[_SLOWNESS] = str(_slowness())
SLOWNESS = float(os.environ[_SLOWNESS])
"""For times that a test gives to what it tests, in multiples of a quiet machine's."""
TIMEOUT = 1800.0 * SLOWNESS
"""Seconds. Only there so that a hang ends: many times what any test takes."""
# Seconds that the other ranks have to answer as well, once one has failed.
_GRACE = TIMEOUT / 10

_context = multiprocessing.get_context("forkserver")
# What a rank would import in seconds: an optimizer's first step alone imports torch._dynamo.
_context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.checkpoint._fsspec_filesystem",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "bert_unpad.experimental",
        "bert_unpad.optim",
        "bert_unpad.pretrain.pretrain",
        "docstring_parser",
        "huggingface_hub.repocard",
        "jsonargparse",
        "pytest",
        "tests.support.rank_start",
        "typeshed_client",
    ]
)


# Sockets of the ports given out last.
_reserved: deque[socket.socket] = deque(maxlen=200)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses, reserved for a store of PyTorch's.

    A run may open it minutes later, while other processes ask for ports as well. So a socket stays
    bound to it: the system gives the port to nobody who asks for any, and as that socket does not
    listen, a server that says SO_REUSEADDR, as PyTorch's store does, can have the port.
    """
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _reserved.append(holder)
    return holder.getsockname()[1]


def start_ranks(
    function: Callable[..., int], world_size: int, *args: Any, log: Path
) -> list[BaseProcess]:
    """Starts `function(*args)` once per rank; what it returns is the process's exit code.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun
    sets them, OMP_NUM_THREADS is 1, and matplotlib is hidden. Output and errors of rank r go to
    `<log>.<r>`.

    Args:
        function: a function at the top level of a module; it and its arguments must pickle.
    """
    port = free_port()
    processes = []
    for rank in range(world_size):
        environment = _environment(rank, world_size, port)
        process = _context.Process(
            target=_exit_with, args=(environment, f"{log}.{rank}", function, args), daemon=True
        )
        process.start()
        processes.append(process)
    return processes


def join_ranks(processes: list[BaseProcess], timeout: float = TIMEOUT) -> list[int]:
    """Waits until the processes have ended; once one has failed, the others have a minute left.

    Returns:
        Those that had to be killed, by rank.
    """
    deadline = time.monotonic() + timeout
    failed = False
    while running := [process for process in processes if process.is_alive()]:
        if not failed and any(process.exitcode for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
        left = deadline - time.monotonic()
        if left <= 0:
            break
        wait([process.sentinel for process in running], left)
    for process in running:
        process.kill()
        process.join()
    return [rank for rank, process in enumerate(processes) if process in running]


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = TIMEOUT
) -> list[Any]:
    """Calls `function(rank, world_size, *args)` in new processes of one thread, joined by gloo.

    On a busy machine gloo's ranks may fail to connect. That is tried once more; `function` has not
    been called then.

    Args:
        function: a function at the top level of a module; it and its result must pickle.
        timeout: seconds that the ranks have.

    Returns:
        The results, by rank.

    Raises:
        TimeoutError: a process has not answered in time. All are killed then.
        RuntimeError: a process has failed; the traceback of the first one is the message.
    """
    try:
        return _run_ranks(function, world_size, args, timeout)
    except RuntimeError as error:
        if "connectFullMesh failed" not in str(error):
            raise
    return _run_ranks(function, world_size, args, timeout)


def _run_ranks(
    function: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float
) -> list[Any]:
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_answer, args=(theirs, rank, world_size, port, function, args), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _answers(pipes, timeout)
    finally:
        for process in processes:
            process.join(timeout=5 * SLOWNESS)
            if process.is_alive():
                process.kill()


def run_with(
    environments: Sequence[dict[str, str]], function: Callable[..., Any], *args: Any
) -> list[Any]:
    """Calls `function(*args)` once with each of some environments, each in a new process.

    The variables are set before the package is imported, which reads some only then. Ranks have
    imported it before.

    Args:
        environments: variables and their values.
        function: a function at the top level of a module; it and its result must pickle.

    Raises:
        RuntimeError: a process has failed; the traceback of the first one is the message.
    """
    call = pickle.dumps((function, args))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_fork_with, environments, call).result()


def _fork_with(environments: Sequence[dict[str, str]], call: bytes) -> list[Any]:
    import torch  # noqa: F401 # takes seconds, so once for all

    fork = multiprocessing.get_context("fork")
    pipes = []
    for environment in environments:
        ours, theirs = fork.Pipe(duplex=False)
        fork.Process(target=_call_with, args=(theirs, environment, call), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    return _answers(pipes, TIMEOUT)


def _call_with(pipe: Connection, environment: dict[str, str], call: bytes) -> None:
    os.environ |= environment
    try:
        function, args = pickle.loads(call)
        answer = (False, function(*args))
    except BaseException:
        answer = (True, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))


def _answers(pipes: list[Connection], timeout: float) -> list[Any]:
    """What each rank sends, in whatever order they do; see `run_ranks`."""
    results: dict[int, Any] = {}
    failure = ""
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        missing = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(missing, max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failed, results[rank] = pickle.loads(pipe.recv_bytes())
                text = f"failed:\n{results[rank]}" if failed else ""
            except EOFError:
                results[rank], text = None, "died"
            if text and not failure:
                failure = f"rank {rank} of {len(pipes)} {text}"
                deadline = min(deadline, time.monotonic() + _GRACE)
    if failure:
        raise RuntimeError(failure)
    if len(results) < len(pipes):
        late = [rank for rank in range(len(pipes)) if rank not in results]
        raise TimeoutError(f"ranks {late} of {len(pipes)} gave no result in {timeout} s")
    return [results[rank] for rank in range(len(pipes))]


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _exit_with(
    environment: dict[str, str], log: str, function: Callable[..., int], args: tuple[Any, ...]
) -> None:
    os.environ |= environment
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.modules["matplotlib"] = None  # as if not installed: importing and drawing take a second
    sys.exit(function(*args))


def _answer(
    pipe: Connection,
    rank: int,
    world_size: int,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ |= _environment(rank, world_size, port)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if world_size > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
        answer = (False, function(rank, world_size, *args))
    except BaseException:
        answer = (True, traceback.format_exc())
    try:
        # By value: Connection.send would share tensors, which end with the process that made them.
        pipe.send_bytes(pickle.dumps(answer))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
