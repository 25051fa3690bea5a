"""A rank that hangs, dies, fails or never joins is named by the others."""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bert_unpad.distributed import HierarchicalAllreduce
from bert_unpad.pretrain import main
from bert_unpad.pretrain.config import ConfigError, PretrainConfig, read_config
from bert_unpad.pretrain.loop import Trainer
from bert_unpad.pretrain.node_groups import node_group
from bert_unpad.pretrain.rank_watch import RankError, RankWatch, open_store
from bert_unpad.pretrain.ranks import Ranks, join_ranks
from tests.support.pretrain_runs import make_folder
from tests.support.processes import SLOWNESS, TIMEOUT, free_port, run_ranks, start_ranks

pytestmark = pytest.mark.slow

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("watch")
    make_folder(path)
    return path


def _run(command: list[str], trouble: str) -> int:
    """A rank; in that with number 1 something goes wrong when update 4 begins."""
    update = Trainer._update

    def troubled(self, step, counts):
        if self.progress.step == 3:
            _wait(lambda: self.ranks.watch._read()[1]["step"] == 4)  # the others can know it
            if trouble == "hang":
                threading.Event().wait()
            if trouble.startswith("fail"):
                raise ValueError("the disk is gone")
            os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[trouble])
        return update(self, step, counts)

    if os.environ["RANK"] == "1":
        Trainer._update = troubled
    return main(command)


@pytest.mark.parametrize(
    ("trouble", "timeout", "told"),
    [
        ("stop", 10, "does not answer"),
        ("hang", 10, "runs, but does not come along"),
        ("kill", 100, "does not answer"),
        ("fail", 100, "has failed: ValueError: the disk is gone"),
        ("fail-exchange", 100, "has failed: ValueError: the disk is gone"),
    ],
)
def test_the_rank_in_trouble_is_named(trouble, timeout, told, folder):
    command = ["--config", str(folder / "run.yaml"), "--run_dir", str(folder / trouble)]
    command += ["--rank_timeout", str(timeout * SLOWNESS)]
    if trouble == "fail-exchange":
        command += ["--batching.strategy", "exchange"]
    log = folder / f"{trouble}.log"
    processes = start_ranks(_run, 3, command, trouble, log=log)
    try:
        for process in (processes[0], processes[2]):
            process.join(timeout=2 * TIMEOUT)
            assert process.exitcode == 1, Path(f"{log}.0").read_text()
    finally:
        for process in processes:
            process.kill()
    culprit = f"rank 1 (host {HOST}, process {processes[1].pid}, last seen at step 4) {told}"
    outputs = [Path(f"{log}.{rank}").read_text() for rank in (0, 2)]
    assert f"pretrain: error: rank 0, at step 4: {culprit} (" in outputs[0], outputs
    # Without torchrun the store ends with rank 0: too early, it may be, to see who is silent.
    rest = f"rank 0 (host {HOST}, process {processes[0].pid}, last seen at step 4), which keeps"
    assert culprit in outputs[1] or (rest in outputs[1] and not trouble.startswith("fail")), outputs


def _join(rank: int, _: int, arguments: list[str], absent: int, port: int) -> str:
    dist.barrier()  # the other ranks have joined it too
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    if rank == absent:
        return ""
    with pytest.raises(RankError) as failed, join_ranks(read_config(arguments)[0]):
        pass
    assert failed.value.ranks == [absent]
    return str(failed.value)


@pytest.mark.parametrize(
    ("absent", "told"),
    [
        (
            1,
            r"rank 0: ranks \[1\] of 2 have not joined within 3 s \(rank_timeout\); here are rank",
        ),
        (0, r"rank 1: rank 0 has not joined within 3 s \(rank_timeout\): nothing answers at 127"),
    ],
)
def test_a_rank_that_never_joins_is_named(absent, told, folder):
    arguments = ["--config", str(folder / "run.yaml"), "--rank_timeout", "3"]
    found = run_ranks(_join, 2, arguments, absent, free_port(), timeout=TIMEOUT)
    with pytest.raises(RankError, match=told):
        raise RankError(found[1 - absent])


def test_the_store_has_an_address(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR: expected the host of rank 0"):
        open_store(1, 3.0)


def _timeouts(rank: int, _: int, arguments: list[str], port: int) -> set[timedelta]:
    dist.barrier()  # the other ranks have joined it too
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    with join_ranks(read_config(arguments)[0]) as ranks:
        groups = [dist.group.WORLD, ranks.checkpoint_group, node_group(ranks, 2)]
        both = HierarchicalAllreduce(1, ranks.timeout)
        groups += [both._node, both._leaders]
        device = torch.device("cpu")
        return {group._get_backend(device).options._timeout for group in groups}


def test_all_groups_have_the_time_limit(folder):
    arguments = ["--config", str(folder / "run.yaml"), "--rank_timeout", "123"]
    found = run_ranks(_timeouts, 2, arguments, free_port(), timeout=TIMEOUT)
    assert found == [{timedelta(seconds=123)}] * 2


def _together(
    count: int, timeout: float, stores: Sequence[dist.Store] | None = None
) -> list[RankWatch]:
    """The watches of several ranks in this process."""
    stores = stores or [dist.HashStore()] * count
    watches = [None] * count

    def make(rank: int) -> None:
        watches[rank] = RankWatch(stores[rank], rank, count, timeout)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return watches


def _wait(enough: Callable[[], bool]) -> None:
    until = time.monotonic() + TIMEOUT
    while not enough():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("silent", [False, True])
def test_who_is_behind_is_logged_before_time_is_up(silent, caplog):
    """As NCCL ends a process without an error that anybody could catch."""
    watches = _together(3, timeout=2.0 * SLOWNESS)
    for rank, watch in enumerate(watches):
        watch.at(7 if silent or rank != 1 else 6)
    if silent:
        _wait(lambda: watches[1]._read()[1]["step"] == 7)
        watches[1]._closed.set()
    with caplog.at_level(logging.ERROR):
        _wait(lambda: any(record.args[0] == 0 for record in caplog.records))
    told = "does not answer" if silent else "runs, but does not come along"
    step = 7 if silent else 6
    lines = [record.getMessage() for record in caplog.records]
    culprit = f"rank 1 (host {HOST}, process {os.getpid()}, last seen at step {step}) {told}"
    assert any("rank 0 has made no step for" in line and culprit in line for line in lines), lines
    for watch in watches:
        watch._closed.set()


def test_waiting_for_slow_ranks_has_no_limit_while_they_live():
    watches = _together(2, timeout=0.5 * SLOWNESS)
    met = threading.Thread(target=watches[0].meet)
    met.start()
    time.sleep(2 * SLOWNESS)
    assert met.is_alive()
    watches[1].meet()
    met.join(TIMEOUT)
    assert not met.is_alive()
    with pytest.raises(ValueError, match="no data"), watches[1].explained():
        raise ValueError("no data")
    with pytest.raises(RankError, match=r"rank 1 .* has failed: ValueError: no data") as failed:
        watches[0].meet()
    assert failed.value.ranks == [1]
    watches[0]._closed.set()


def test_a_rank_that_waits_for_a_key_shows_that_it_lives():
    """As one that makes a group of ranks while another one is late."""
    port, stores = free_port(), []
    for first in (True, False):
        stores.append(dist.TCPStore("127.0.0.1", port, is_master=first, wait_for_workers=False))
    watches = _together(2, SLOWNESS, stores)

    def wait() -> None:
        with contextlib.suppress(dist.DistError):
            stores[1].wait(["never"], timedelta(seconds=2 * SLOWNESS))

    waiting, beats = threading.Thread(target=wait), set()
    waiting.start()
    while waiting.is_alive():
        beats.add(watches[0]._read()[1]["beat"])
        time.sleep(0.02)
    assert len(beats) > 4
    for watch in watches:
        watch._closed.set()


class _Gone:
    """A store whose keeper has ended."""

    def __getattr__(self, name: str):
        raise dist.DistError("the connection is closed")


def test_why_a_rank_fails_is_known_before_it_closes_anything():
    watches = _together(3, timeout=TIMEOUT)
    with pytest.raises(ValueError, match="no data"), watches[1].explained():
        raise ValueError("no data")
    for watch in (watches[0], watches[2]):
        watch._store = _Gone()
        blamed = pytest.raises(RankError, match=r"rank 1 .* has failed: ValueError: no data")
        with blamed, watch.explained():
            raise dist.DistError("the connection is closed")


def test_waiting_for_a_dead_rank_ends():
    watches = _together(2, timeout=2.0 * SLOWNESS)
    watches[1]._closed.set()
    with pytest.raises(RankError, match=r"rank 1 .* does not answer"):
        watches[0].meet()
    watches[0]._closed.set()


def test_one_process_needs_no_store(folder):
    with join_ranks(read_config(["--config", str(folder / "run.yaml")])[0]) as ranks:
        ranks.at_step(1)
        ranks.meet()
        assert isinstance(ranks, Ranks)
        assert ranks.timeout == timedelta(seconds=PretrainConfig.rank_timeout)
