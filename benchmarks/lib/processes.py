"""Starts the ranks of a distributed benchmark: the same command once per rank, with torchrun's
variables, on one host or on those of `network`.

Not torchrun itself: ranks started here may join and leave a process group several times, and run in
network namespaces.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.lib.network import Hosts, loopback

__all__ = ["RankPool", "next_port", "run_ranks", "serve"]


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
        hosts: that ranks run on, those of a host one after the other; by default all on this one.
        timeout: seconds that all of it may take.

    Raises:
        SystemExit: a process has failed; all are ended then.
    """
    processes = _start(command, world_size, hosts or loopback())
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit("a process has failed; its message is above")
    return outputs[0]


def _start(
    command: Sequence[str], world_size: int, hosts: Hosts, **pipes: int
) -> list[subprocess.Popen[str]]:
    """Starts a process of one thread for each rank, whose output can be read."""
    port = str(_free_port())
    places = [rank * len(hosts.prefixes) // world_size for rank in range(world_size)]
    processes = []
    for rank in range(world_size):
        here = places[rank]
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(places[:rank].count(here)),
            "LOCAL_WORLD_SIZE": str(places.count(here)),
            "MASTER_ADDR": hosts.address,
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": hosts.interfaces[here],
            "OMP_NUM_THREADS": "1",
        }
        full = [*hosts.prefixes[here], *command]
        processes.append(
            subprocess.Popen(full, env=environment, stdout=subprocess.PIPE, text=True, **pipes)
        )
    return processes


class RankPool:
    """Ranks that stay, for many short jobs: starting them takes longer than a job.

    Args:
        command: program and arguments of each rank, which calls `serve`.
        world_size: how many ranks.
        hosts: as in `run_ranks`.
    """

    def __init__(self, command: Sequence[str], world_size: int, hosts: Hosts | None = None) -> None:
        self._ranks = _start(command, world_size, hosts or loopback(), stdin=subprocess.PIPE)

    def run(self, job: Any) -> Any:
        """What rank 0 has answered to a job (JSON), once all ranks are done with it.

        Raises:
            SystemExit: a process has ended; its message is above.
        """
        for rank in self._ranks:
            rank.stdin.write(json.dumps(job) + "\n")
            rank.stdin.flush()
        answers = [rank.stdout.readline() for rank in self._ranks]
        if not all(answers):
            self.close()
            raise SystemExit("a process has failed; its message is above")
        return json.loads(answers[0])

    def close(self) -> None:
        """Ends the processes."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def serve(work: Callable[[Any], Any]) -> None:
    """Answers the jobs of a `RankPool` on one rank; what the work prints is dropped."""
    with os.fdopen(os.dup(1), "w") as answers, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        for line in sys.stdin:
            answer = work(json.loads(line))
            next_port()
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def next_port() -> None:
    """Gives the ranks another port to meet at; all of them call it before they join once more.

    At the same port a rank may still find the store of the group before, which lives on while
    anything refers to it, and then waits there.
    """
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
