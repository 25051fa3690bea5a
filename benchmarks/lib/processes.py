"""Starts the ranks of a distributed benchmark: the same command once per rank, with torchrun's
variables, on one host or on the two of `network`.

Not torchrun itself: ranks started here may join and leave a process group several times, and run in
network namespaces.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence

from benchmarks.lib.network import Hosts, loopback

__all__ = ["next_port", "run_ranks"]


def _free_port() -> int:
    """Free here; a fresh namespace has all ports free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(
    command: Sequence[str],
    world_size: int,
    hosts: Hosts | None = None,
    timeout: float | None = None,
) -> str:
    """Runs `command` in processes of one thread that can meet; returns what rank 0 has printed.

    Args:
        command: program and arguments, the same for all ranks.
        world_size: how many ranks.
        hosts: one rank on each, if there are two; by default all on this host.
        timeout: seconds that all of it may take.

    Raises:
        SystemExit: a process has failed; all are ended then.
    """
    hosts = hosts or loopback()
    port = str(_free_port())
    processes = []
    for rank in range(world_size):
        here = rank % len(hosts.prefixes)
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": hosts.address,
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": hosts.interfaces[here],
            "OMP_NUM_THREADS": "1",
        }
        full = [*hosts.prefixes[here], *command]
        processes.append(subprocess.Popen(full, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit("a process has failed; its message is above")
    return outputs[0]


def next_port() -> None:
    """Gives the ranks another port to meet at; all of them call it before they join once more.

    At the same port a rank may still find the store of the group before, which lives on while
    anything refers to it, and then waits there.
    """
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
