"""Binds the processes of a machine to cores of their own, each within a memory node if it can be.

A process that the system moves between cores loses what is in their caches, and on a machine with
several memory nodes (sockets, mostly) reads memory of another node through a slower link. Linux
puts memory on the node of the core that first writes it, so binding a process to cores binds its
memory too.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bert_unpad.pretrain.config import ConfigError

_SYSTEM = Path("/sys/devices/system")


@contextmanager
def bound_to_cores(local_rank: int, local_world_size: int) -> Iterator[int]:
    """Binds all threads of this process to its share of the cores that it may use now.

    Give all processes of a machine the same cores: a launcher that binds them itself (mpirun,
    numactl) leaves nothing to share out. At the end this process may use all of them again.

    Args:
        local_rank: this process among those of this machine.
        local_world_size: processes on this machine.

    Yields:
        The number of cores of the share, as the system counts them (hardware threads).

    Raises:
        ConfigError: there are fewer cores than processes, or the system cannot bind processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("bind_cores", "expected false on this system, got true")
    allowed = os.sched_getaffinity(0)
    if len(allowed) < local_world_size:
        raise ConfigError(
            "bind_cores",
            f"expected false where {local_world_size} processes have {len(allowed)} cores, "
            "got true",
        )
    share = share_of_cores(cores_by_node(allowed), local_rank, local_world_size)
    _bind(share)
    try:
        yield len(share)
    finally:
        _bind(allowed)


def _bind(cores: Iterable[int]) -> None:
    """Binds all threads of this process."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def cores_by_node(allowed: set[int], system: Path = _SYSTEM) -> list[list[int]]:
    """The cores of `allowed` by memory node; hardware threads of one physical core stand together.

    Args:
        allowed: numbers of cores.
        system: where Linux describes them. What it does not describe is taken as one node.
    """
    nodes = [
        _numbers(path.read_text())
        for path in sorted(system.glob("node/node[0-9]*/cpulist"), key=_number_of)
    ]
    found = [cores for node in nodes if (cores := sorted(allowed & node))]
    rest = sorted(allowed.difference(*found))
    return [_siblings_together(cores, system) for cores in [*found, rest] if cores]


def share_of_cores(nodes: Sequence[Sequence[int]], rank: int, count: int) -> list[int]:
    """The cores of process `rank` of `count`.

    Where nodes divide the processes evenly, each process gets cores of one node; otherwise all
    cores are dealt out in the order of nodes. Shares differ by one core at most within a node.
    """
    per_node, left = divmod(count, len(nodes))
    if left == 0 and all(len(cores) >= per_node for cores in nodes):
        cores, rank, count = nodes[rank // per_node], rank % per_node, per_node
    else:
        cores = [core for node in nodes for core in node]
    return list(cores[len(cores) * rank // count : len(cores) * (rank + 1) // count])


def _siblings_together(cores: Sequence[int], system: Path) -> list[int]:
    """The same cores, hardware threads of one physical core next to each other."""

    def physical(core: int) -> int:
        path = system / f"cpu/cpu{core}/topology/thread_siblings_list"
        return min(_numbers(path.read_text())) if path.exists() else core

    return sorted(cores, key=lambda core: (physical(core), core))


def _number_of(path: Path) -> int:
    return int(path.parent.name.removeprefix("node"))


def _numbers(text: str) -> set[int]:
    """The numbers of a list such as "0-3,8"."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers
