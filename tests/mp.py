"""Runs a function in N processes that meet on 127.0.0.1, to test distributed code.

The processes are forked from a server that has imported the trainer once, which saves each of them
seconds of importing; they are processes of their own otherwise, and may be killed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["free_port", "run_ranks", "start_ranks"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "bert_unpad.pretrain"])


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses right now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_ranks(
    function: Callable[..., int], world_size: int, *args: Any, log: Path
) -> list[BaseProcess]:
    """Starts `function(*args)` once per rank; what it returns is the process's exit code.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun
    sets them, OMP_NUM_THREADS is 1. Standard output and error of rank r go to `<log>.<r>`.

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


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60
) -> list[Any]:
    """Calls `function(rank, world_size, *args)` in new processes of one thread, joined by gloo.

    Args:
        function: a function at the top level of a module; it and its result must pickle.
        timeout: seconds that each rank has.

    Returns:
        The results, by rank.

    Raises:
        TimeoutError: a process has not answered in time. All are killed then.
        RuntimeError: a process has failed; its traceback is the message.
    """
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
        results = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(timeout):
                raise TimeoutError(f"rank {rank} of {world_size} gave no result in {timeout} s")
            try:
                failed, result = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} of {world_size} died") from None
            if failed:
                raise RuntimeError(f"rank {rank} of {world_size} failed:\n{result}")
            results.append(result)
        return results
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


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
            dist.init_process_group("gloo")
        answer = (False, function(rank, world_size, *args))
    except BaseException:
        answer = (True, traceback.format_exc())
    try:
        # By value: Connection.send would share tensors, which end with the process that made them.
        pipe.send_bytes(pickle.dumps(answer))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
