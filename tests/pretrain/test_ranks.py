"""Which ranks share a machine, where a launcher says so and where only hosts' names do."""

import os
import socket
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad.pretrain.config import ConfigError, read_config
from bert_unpad.pretrain.node_groups import common_node_size, node_group
from bert_unpad.pretrain.ranks import Ranks, _place, join_ranks
from tests.support.pretrain_runs import settings
from tests.support.processes import SLOWNESS, TIMEOUT, free_port, run_ranks


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


def _ask_while_saving(rank: int, _: int, config: Path, port: int) -> int:
    """Rank 0 has begun to save a checkpoint when it asks, rank 1 has not."""
    dist.barrier()  # the other rank has joined it too
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    with join_ranks(read_config(["--config", str(config)])[0]) as ranks:
        begin = partial(dist.all_reduce, torch.ones(1), group=ranks.checkpoint_group, async_op=True)
        saving = begin() if ranks.is_first else None
        size = common_node_size(ranks, "comm.hook", "hierarchical", "allreduce")
        (saving or begin()).wait()
        return size


def test_a_checkpoint_may_be_saved_meanwhile(config):
    found = run_ranks(_ask_while_saving, 2, config, free_port(), timeout=60 * SLOWNESS)
    assert found == [2, 2]


def _fail_at_work(ranks: Ranks) -> None:
    """Rank 0 fails while a sum waits for rank 1, which comes a second after it knows of that."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    if not ranks.is_first:
        while not ranks.watch._known:
            time.sleep(0.02)
        time.sleep(1)
        dist.all_reduce(torch.zeros(1))
        return
    # A sum holds the context of the last backward pass, and at last holds it alone.
    dist.all_reduce(torch.zeros(1), async_op=True)
    torch.ones((), requires_grad=True).backward()
    raise ValueError("the disk is gone")


def _joined_and_failed(rank: int, _: int, config: Path, port: int) -> str:
    import torch._dynamo  # noqa: F401 # first, or defaults of its functions would hold the group

    dist.barrier()  # the other ranks have joined it too
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    try:
        with join_ranks(read_config(["--config", str(config)])[0]) as ranks:
            _fail_at_work(ranks)
    except ValueError as error:
        return str(error)
    return "done"


@pytest.mark.slow
def test_a_rank_that_fails_while_a_sum_waits_ends(config):
    assert run_ranks(_joined_and_failed, 2, config, free_port()) == ["the disk is gone", "done"]
