"""Which ranks share a machine, where a launcher says so and where only hosts' names do."""

import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from bert_unpad.pretrain.config import ConfigError, read_config
from bert_unpad.pretrain.node_groups import common_node_size, node_group
from bert_unpad.pretrain.ranks import _place, join_ranks
from tests.support.pretrain_runs import settings
from tests.support.processes import TIMEOUT, free_port, run_ranks


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    (path / "run.yaml").write_text(yaml.safe_dump(settings(path)))
    return path / "run.yaml"


@pytest.mark.parametrize(
    ("given", "places"),
    [
        ({}, [(0, 3), (1, 3), (0, 2), (2, 3), (1, 2)]),
        ({"LOCAL_RANK": "7"}, [(7, 3), (7, 3), (7, 2), (7, 3), (7, 2)]),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, [(1, 4)] * 5),
    ],
)
def test_what_a_launcher_says_comes_before_names(given, places, monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    hosts = ["a", "a", "b", "a", "b"]
    assert [_place(rank, hosts) for rank in range(5)] == places


def _join(rank: int, _: int, config: Path, port: int, hosts: str) -> tuple:
    dist.barrier()  # the other ranks have joined it too
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    socket.gethostname = lambda: hosts[rank]
    with join_ranks(read_config(["--config", str(config)])[0]) as ranks:
        found = ranks.local_rank, ranks.node_size, ranks.is_first_of_node
        try:
            size = common_node_size(ranks, "comm.hook", "hierarchical", "allreduce")
            return *found, dist.get_process_group_ranks(node_group(ranks, size))
        except ConfigError as error:
            return *found, str(error)


@pytest.mark.parametrize(
    ("hosts", "places", "told"),
    [
        ("aab", [(0, 2, True), (1, 2, False), (0, 1, True)], r"with [1, 2] processes on the mach"),
        ("aba", [(0, 2, True), (0, 1, True), (1, 2, False)], r"with [1, 2] processes on the mach"),
        ("aabb", [(0, 2, True), (1, 2, False)] * 2, ""),
        ("abab", [(0, 2, True)] * 2 + [(1, 2, False)] * 2, "ranks of a machine are not neighbours"),
    ],
)
def test_hosts_of_one_name_are_a_machine(hosts, places, told, config):
    arguments = (config, free_port(), hosts)
    found = run_ranks(_join, len(hosts), *arguments, timeout=TIMEOUT)
    assert [tuple(each[:3]) for each in found] == places
    for rank, (*_, last) in enumerate(found):
        if told:
            assert last.startswith("comm.hook: expected allreduce ")
            assert told in last
        else:
            assert last == [rank // 2 * 2, rank // 2 * 2 + 1]
