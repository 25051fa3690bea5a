"""Which cores the processes of a machine are bound to."""

import os
from pathlib import Path

import pytest

from bert_unpad.pretrain.config import ConfigError
from bert_unpad.pretrain.cores import bound_to_cores, cores_by_node, share_of_cores
from tests.support.processes import run_ranks


def describe(folder: Path, nodes: list[str], siblings: dict[int, str]) -> Path:
    """Writes what Linux says of a machine."""
    for number, cores in enumerate(nodes):
        (folder / f"node/node{number}").mkdir(parents=True)
        (folder / f"node/node{number}/cpulist").write_text(f"{cores}\n")
    for core, threads in siblings.items():
        (folder / f"cpu/cpu{core}/topology").mkdir(parents=True)
        (folder / f"cpu/cpu{core}/topology/thread_siblings_list").write_text(f"{threads}\n")
    return folder


def test_hardware_threads_of_a_core_stand_together(tmp_path):
    siblings = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}
    system = describe(tmp_path, ["0-1,4-5", "2-3,6-7", ""], siblings)
    assert cores_by_node(set(range(8)), system) == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert cores_by_node({1, 2, 5, 9}, system) == [[1, 5], [2], [9]]


def test_a_machine_that_is_not_described_is_one_node(tmp_path):
    assert cores_by_node({3, 1, 2}, tmp_path) == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("count", "shares"),
    [
        (1, [[0, 4, 1, 5, 2, 6, 3, 7]]),
        (2, [[0, 4, 1, 5], [2, 6, 3, 7]]),
        (3, [[0, 4], [1, 5, 2], [6, 3, 7]]),
        (4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (8, [[0], [4], [1], [5], [2], [6], [3], [7]]),
    ],
)
def test_shares_keep_to_nodes_where_they_can(count, shares):
    nodes = [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert [share_of_cores(nodes, rank, count) for rank in range(count)] == shares


def test_unequal_nodes_leave_no_process_without_cores():
    nodes = [[0], [1, 2, 3]]
    assert [share_of_cores(nodes, rank, 4) for rank in range(4)] == [[0], [1], [2], [3]]


def bound(rank: int, world_size: int) -> tuple[int, list[set[int]]]:
    before = os.sched_getaffinity(0)
    with bound_to_cores(rank, world_size) as count:
        threads = [os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")]
    assert os.sched_getaffinity(0) == before
    return count, threads


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs 2 cores"
)
def test_processes_share_out_the_cores_with_all_their_threads():
    before = os.sched_getaffinity(0)
    first, second = run_ranks(bound, 2)
    for count, threads in (first, second):
        assert all(len(cores) == count for cores in threads)
        assert len({frozenset(cores) for cores in threads}) == 1
    assert first[1][0] | second[1][0] == before
    assert not first[1][0] & second[1][0]


def test_more_processes_than_cores_are_refused():
    message = "bind_cores: expected false where 100000 processes"
    with pytest.raises(ConfigError, match=message), bound_to_cores(0, 100_000):
        pass
