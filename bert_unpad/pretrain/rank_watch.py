"""Ranks watch each other, so that a run that one rank holds up can say which.

Each rank keeps a record in the store that all of them see: host, process, step, and a count that a
background thread raises. Where a collective fails or times out, the ranks that are left read the
records of all: a rank whose count stands still has been stopped or killed, one whose count moves
while its step does not hangs. NCCL ends a process without an exception, so the thread also says by
itself who is behind before that happens. Training only ever sets an attribute.

A rank that fails says so before it closes any connection, and waits until the threads of all that
live have heard it. So whoever then finds a connection closed knows why, even if the store is gone.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from bert_unpad.data import ExchangeError
from bert_unpad.pretrain.config import ConfigError

logger = logging.getLogger(__name__)

Record = dict[str, Any]
T = TypeVar("T")

_LONGEST_PERIOD = 1.0  # seconds between two beats
_GRACE_SECONDS = 5.0  # for other ranks to say that they have lost some rank as well
_STORE_SECONDS = 15.0  # for the store to answer, and for other ranks to hear that this one failed
_MAX_TEXT = 2000  # characters of an error that other ranks are told
_LOOKS = (0.5, 0.8)  # shares of the time limit when the thread looks at the others by itself


class RankError(RuntimeError):
    """Other ranks do not come along, or have not joined.

    Attributes:
        ranks: which; none if that is not known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


def open_store(rank: int, timeout: float) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT: torchrun keeps it, or else rank 0.

    Raises:
        ConfigError: the variables are not set.
        RankError: no process has opened a store there within `timeout` seconds.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigError(
            "MASTER_ADDR",
            "expected the host of rank 0, and its port in MASTER_PORT, as torchrun sets them; got "
            f"{host!r} and {port!r}",
        )
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(
            *(host, int(port)),
            is_master=rank == 0 and not kept,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        if rank == 0:
            raise
        raise RankError(
            f"rank {rank}: rank 0 has not joined within {timeout:g} s (rank_timeout): nothing "
            f"answers at {host}:{port}",
            [0],
        ) from error


def error_chain(error: BaseException) -> list[BaseException]:
    """An error, its cause or the error that it came of, and so on."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    return chain


class RankWatch:
    """This rank's record, and its view of those of others. Every rank makes one.

    Args:
        store: that all ranks see.
        rank, world_size: of this process, and of all.
        timeout: seconds that ranks wait for one.

    Attributes:
        hosts: the name of each rank's host.

    Raises:
        RankError: not all ranks have joined within that time.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: float) -> None:
        # A connection of its own: whoever waits for a key holds up all others on the same one.
        self._store = dist.PrefixStore("bert_unpad", store.clone())  # type: ignore[attr-defined]
        self._rank, self._timeout = rank, timeout
        self._keys = [str(number) for number in range(world_size)]
        self._period = min(_LONGEST_PERIOD, timeout / 20)
        self._meetings = 0
        self._moved = time.monotonic()
        host, pid = socket.gethostname(), os.getpid()
        self._record: Record = {"host": host, "pid": pid, "step": 0, "beat": 0, "ended": ""}
        self._record["heard"] = 0  # how many ranks had ended early when this one last looked
        self._publishing = threading.Lock()
        self._known: list[Record] = []  # all records at that look
        self._join()
        records = self._read()
        self.hosts = [record["host"] for record in records]
        self._keeper = records[0]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bert_unpad-watch", daemon=True)
        self._thread.start()

    def at(self, step: int) -> None:
        """Notes that this rank begins an update, numbered from 1."""
        self._record["step"] = step
        self._moved = time.monotonic()

    def meet(self) -> None:
        """Waits until all ranks have come here, for as long as those that have not are alive.

        For work that may take one rank much longer than others.

        Raises:
            RankError: one has failed, or shows no sign of life within the time limit.
        """
        self._meetings += 1
        key = f"meeting/{self._meetings}"
        self._store.add(key, 1)
        before, since = self._read(), time.monotonic()
        while self._store.add(key, 0) < len(self._keys):
            time.sleep(self._period)
            failed = self._store.add("failed", 0) > 0
            if failed or time.monotonic() - since > self._timeout:
                now = self._read()
                if failed or _silent(before, now):
                    raise self._error(self._behind(before, now), "waited for all ranks in vain")
                before, since = now, time.monotonic()

    def note(self, error: BaseException) -> None:
        """Tells the other ranks that this one ends by an error, before it closes any connection.

        Waits until all that live know it. Only the first call counts.
        """
        if self._record["ended"]:
            return
        lost = self._is_lost(error)
        number = self._end("lost" if lost else f"{type(error).__name__}: {error}"[:_MAX_TEXT])
        if number is not None and not lost:
            within(2 * _STORE_SECONDS, lambda: self._wait_until_heard(number))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Context that says which ranks are to blame for an error inside, and ends the watch.

        Raises:
            RankError: in place of an error of a collective.
        """
        try:
            yield
        except RankError:
            self._end("lost")
            raise
        except BaseException as error:
            self.note(error)
            if not self._is_lost(error):
                raise
            raise self._explain(str(error)) from error
        else:
            self._end("done")
        finally:
            self._closed.set()
            self._thread.join(_STORE_SECONDS)

    def _join(self) -> None:
        self._publish()
        try:
            self._store.wait(self._keys, timedelta(seconds=self._timeout))
        except dist.DistError as error:
            here = within(_STORE_SECONDS, self._here)
            if here is None:
                message = "rank 0 has ended while ranks were joining; see its output"
                raise RankError(f"rank {self._rank}: {message}", [0]) from error
            missing = [rank for rank in range(len(self._keys)) if rank not in here]
            raise RankError(
                f"rank {self._rank}: ranks {missing} of {len(self._keys)} have not joined within "
                f"{self._timeout:g} s (rank_timeout); here are {', '.join(here.values())}",
                missing,
            ) from error

    def _here(self) -> dict[int, str]:
        """The ranks that have joined."""
        found = [rank for rank, key in enumerate(self._keys) if self._store.check([key])]
        return {rank: _name(rank, json.loads(self._store.get(str(rank)))) for rank in found}

    def _publish(self) -> None:
        with self._publishing:  # or the thread's older record could come last
            self._record["beat"] += 1
            self._store.set(str(self._rank), json.dumps(self._record))

    def _read(self) -> list[Record]:
        """All ranks' records."""
        return [json.loads(text) for text in self._store.multi_get(self._keys)]

    def _run(self) -> None:
        """The thread. Ends with the store, which rank 0 may have taken along."""
        looks: list[list[Record]] = []
        with contextlib.suppress(RuntimeError):
            while not self._closed.wait(self._period):
                self._publish()
                self._keeper = json.loads(self._store.get("0"))
                self._hear()
                waited = time.monotonic() - self._moved
                if waited < _LOOKS[0] * self._timeout:
                    looks.clear()
                elif len(looks) < 2 and waited > _LOOKS[len(looks)] * self._timeout:
                    looks.append(self._read())
                    if len(looks) == 2 and (found := self._behind(*looks)):
                        logger.error(
                            "rank %d has made no step for %.0f s of %g (rank_timeout): %s",
                            *(self._rank, waited, self._timeout, "; ".join(found.values())),
                        )

    def _hear(self) -> None:
        """Reads who has ended early, if some rank has since the last look, and says so."""
        ended = self._store.add("failed", 0)
        if ended > self._record["heard"]:
            self._known, self._record["heard"] = self._read(), ended
            self._publish()

    def _end(self, how: str) -> int | None:
        """Tells the other ranks that this one ends, and how.

        Returns:
            How many have ended early with it; None if the store does not answer.
        """
        self._record["ended"] = how

        def tell() -> int:
            self._publish()
            return self._store.add("failed", int(how != "done"))

        return within(_STORE_SECONDS, tell)

    def _is_lost(self, error: BaseException) -> bool:
        """Whether an error says that other ranks are to blame. gloo has no type for it."""
        return any(
            isinstance(x, dist.DistError)
            or "/gloo/" in str(x)
            or (isinstance(x, ExchangeError) and x.ranks and self._rank not in x.ranks)
            for x in error_chain(error)
        )

    def _wait_until_heard(self, number: int) -> None:
        """Waits until the ranks that run have read why this one ends, the `number`-th to do so."""
        until = time.monotonic() + _STORE_SECONDS
        while time.monotonic() < until:
            others = (record for rank, record in enumerate(self._read()) if rank != self._rank)
            if all(record["ended"] or record["heard"] >= number for record in others):
                return
            time.sleep(self._period)

    def _explain(self, text: str) -> RankError:
        """Who is to blame for a collective that has failed here."""

        def look() -> tuple[list[Record], list[Record]]:
            until = time.monotonic() + _GRACE_SECONDS
            before = now = self._read()
            while not all(record["ended"] for record in now) and time.monotonic() < until:
                time.sleep(self._period)
                now = self._read()
            return before, now

        looks = within(_GRACE_SECONDS + _STORE_SECONDS, look)
        if looks is not None:
            return self._error(self._behind(*looks), text)
        keeper = (
            f"{_name(0, self._keeper)}, which keeps the run's store, has ended or does not answer"
        )
        return self._error(_failed(self._known) or {0: f"{keeper}; see its output"}, text)

    def _error(self, found: dict[int, str], text: str) -> RankError:
        blamed = "; ".join(found.values()) or "no rank is behind"
        return RankError(
            f"rank {self._rank}, at step {self._record['step']}: {blamed} ({text})", list(found)
        )

    def _behind(self, before: list[Record], now: list[Record]) -> dict[int, str]:
        """The ranks that hold the others up, by the clearest sign there is, and what is known."""
        names = [_name(rank, record) for rank, record in enumerate(now)]
        newest = max(record["step"] for record in now)
        silent = {rank: f"{names[rank]} does not answer" for rank in _silent(before, now)}
        running = [rank for rank, record in enumerate(now) if not record["ended"]]
        late = [rank for rank in running if now[rank]["step"] < newest]
        if not late and self._record["ended"]:  # as those have that wait for it
            late = running
        return (
            _failed(now)
            or silent
            or {rank: f"{names[rank]} runs, but does not come along" for rank in late}
        )


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """What a function that talks to other ranks returns; None if it fails or takes longer."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(function())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _failed(records: list[Record]) -> dict[int, str]:
    """The ranks that have said why they end early, and what they said."""
    return {
        rank: f"{_name(rank, record)} has failed: {record['ended']}"
        for rank, record in enumerate(records)
        if record["ended"] not in ("", "done", "lost")
    }


def _silent(before: list[Record], now: list[Record]) -> list[int]:
    """The ranks that run, as far as anyone knows, and show no sign of life between two looks."""
    return [
        rank
        for rank, (old, new) in enumerate(zip(before, now, strict=True))
        if not new["ended"] and old["beat"] == new["beat"]
    ]


def _name(rank: int, record: Record) -> str:
    seen = f"last seen at step {record['step']}" if record["step"] else "seen before its first step"
    return f"rank {rank} (host {record['host']}, process {record['pid']}, {seen})"
