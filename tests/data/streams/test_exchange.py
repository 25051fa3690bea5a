"""Examples read by some ranks and trained on by others: each once, equally shared, or an error."""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from bert_unpad.data.sampling.balanced_sampler import WorkModel
from bert_unpad.data.sampling.histogram import sample_lengths
from bert_unpad.data.store.example_batch import ExampleBatch, Masks
from bert_unpad.data.store.shard_writer import ShardWriter
from bert_unpad.data.store.shards import Example, ShardDataset
from bert_unpad.data.streams.exchange import ExampleExchange, ExchangeError
from bert_unpad.data.streams.stream import IterableStream, ShardStream
from tests.support.processes import SLOWNESS, TIMEOUT, run_ranks
from tests.support.seeds import derived

pytestmark = pytest.mark.slow

VOCABULARY = 1000
WORK = WorkModel(1.0, 0.001)


def _examples(count: int, rank: int, epoch: int) -> Iterator[Example]:
    """Made-up examples, other ones in each epoch; their first token tells the rank."""
    rng = np.random.default_rng([derived(rank), epoch])
    for length in sample_lengths(count, seed=rank) if count else ():
        tokens = rng.integers(0, VOCABULARY, length)
        tokens[0] = rank
        yield Example(tokens, int(rng.integers(1, length + 1)), int(rng.choice([0, 1, -100])))


class _Masked(IterableStream):
    """Examples that bring masks: one of each that is a single token, two of others."""

    has_masks = True

    def batches(self, epoch: int, start: int, batch_size: int) -> Iterator[ExampleBatch]:
        for batch in super().batches(epoch, start, batch_size):
            spans = [sorted({0, int(length) - 1}) for length in batch.lengths]
            counts = np.array([len(span) for span in spans])
            labels = np.repeat(batch.ids * 7 % VOCABULARY, counts)
            yield replace(batch, masks=Masks(counts, np.concatenate(spans), labels))


def _stream(
    rank: int, world_size: int, counts: list[int], kind: type[IterableStream] = IterableStream
) -> IterableStream:
    return kind(
        lambda epoch: _examples(counts[rank], rank, epoch), rank, world_size, vocab_size=VOCABULARY
    )


def _content(examples: ExampleBatch) -> list[tuple]:
    """What must not change on the way, by example."""
    found = []
    for place in range(len(examples)):
        one = examples[place : place + 1]
        columns = (one.ids, one.second_starts, one.next_sentence_labels)
        masks = () if one.masks is None else (one.masks.positions, one.masks.labels)
        tokens = one.tokens.astype(np.uint16).tobytes()
        found.append((*(int(x[0]) for x in columns), tokens, *(tuple(x.tolist()) for x in masks)))
    return found


def _read_by_all(counts: list[int], epoch: int, kind: type[IterableStream]) -> Counter:
    everything: Counter = Counter()
    for rank, count in enumerate(counts):
        stream = _stream(rank, len(counts), counts, kind)
        for batch in stream.batches(epoch, 0, max(count, 1)):
            everything.update(_content(batch))
    return everything


def _two_epochs(
    rank: int,
    world_size: int,
    scope: str,
    node_size: int,
    counts: list[int],
    kind: type[IterableStream],
):
    """What each step has, and what a run that is cut in the middle has after it goes on."""
    setup = {
        "batch_size": 6,
        "scope": scope,
        "dealing": "lpt",
        "work": WORK,
        "node_size": node_size,
        "depth": 2,
    }
    steps = []
    with ExampleExchange(_stream(rank, world_size, counts, kind), **setup) as whole:
        for step in whole:
            if step.epoch == 2:
                break
            steps.append(
                (step.epoch, _content(step.examples), step.straggler_efficiency, step.state)
            )
    cut = next(i for i, step in enumerate(steps) if step[0] == 1) + 2
    state = steps[cut - 1][3]
    stream = _stream(rank, world_size, counts, kind)
    with ExampleExchange(stream, state=state, **setup) as rest:
        again = [next(rest) for _ in range(len(steps) - cut)]
    assert [(s.epoch, _content(s.examples), s.state) for s in again] == [
        (epoch, content, state) for epoch, content, _, state in steps[cut:]
    ]
    return steps


# Scope, ranks of a node, examples of each rank in an epoch, kind of stream.
SCOPES = [
    ("world", 4, [40, 25, 31, 26], IterableStream),
    ("two_level", 2, [30, 30, 0, 43], _Masked),
    ("node", 2, [30, 21, 33, 30], IterableStream),
    ("none", 1, [20, 9, 13, 16], _Masked),
]


def _all_scopes(rank: int, world_size: int):
    return [_two_epochs(rank, world_size, *scope) for scope in SCOPES]


@pytest.fixture(scope="module")
def by_scope() -> dict[str, list]:
    ranks = run_ranks(_all_scopes, 4)
    return {
        scope: [results[number] for results in ranks] for number, (scope, *_) in enumerate(SCOPES)
    }


@pytest.mark.parametrize(("scope", "node_size", "counts", "kind"), SCOPES)
def test_each_example_once_an_epoch(by_scope, scope, node_size, counts, kind):
    ranks, world_size = by_scope[scope], 4
    assert len({len(steps) for steps in ranks}) == 1
    for epoch in (0, 1):
        used = Counter(
            content for steps in ranks for at, step, *_ in steps if at == epoch for content in step
        )
        assert used == _read_by_all(counts, epoch, kind)
    for step in zip(*ranks, strict=True):
        assert len({repr(part[3]) for part in step}) == 1  # the same state everywhere
        numbers = [len(part[1]) for part in step]
        group = node_size if scope == "node" else 1 if scope == "none" else world_size
        for first in range(0, world_size, group):
            assert max(numbers[first : first + group]) - min(numbers[first : first + group]) <= 1
        work = np.array([_work(part[1]) for part in step])
        assert step[0][2] == pytest.approx(work.mean() / work.max())
    travelled = any(
        content[0] % world_size != rank
        for rank, steps in enumerate(ranks)
        for step in steps
        for content in step[1]
    )
    assert travelled == (scope != "none")


def _work(contents: list[tuple]) -> float:
    return sum(WORK(float(len(content[3]) // 2)) for content in contents)


def _shard_epoch(rank: int, world_size: int, path: str, state: dict | None, steps: int | None):
    """Ids that this rank gets in the rest of an epoch, or in its next steps; the state after."""
    stream = ShardStream(ShardDataset(path), rank, world_size, seed=5, shuffle_buffer=16)
    ids, epoch = [], 0 if state is None else state["epoch"]
    with ExampleExchange(stream, batch_size=4, state=state) as exchange:
        for step in exchange:
            if step.epoch != epoch:
                break
            ids += step.examples.ids.tolist()
            state = step.state
            if steps is not None and (steps := steps - 1) == 0:
                break
    return ids, state


def test_a_shard_goes_on_with_other_ranks(tmp_path):
    rng = np.random.default_rng(derived(0))
    lengths = rng.integers(5, 30, 150)
    about = {"vocab_size": VOCABULARY, "unmaskable_ids": (), "max_seq_length": 30}
    with ShardWriter(tmp_path / "shard", **about) as writer:
        tokens = rng.integers(0, VOCABULARY, lengths.sum())
        writer.append(tokens, lengths, lengths // 2, np.zeros(150, np.int64))
    path = str(tmp_path / "shard")
    used, state = [], None
    for world_size, steps in ((3, 5), (1, 3), (1, 2), (2, None)):
        if world_size == 1:
            ranks = [_shard_epoch(0, 1, path, state, steps)]
        else:
            ranks = run_ranks(_shard_epoch, world_size, path, state, steps)
        used += [index for ids, _ in ranks for index in ids]
        state = ranks[0][1]
        assert all(theirs == state for _, theirs in ranks)
    assert sorted(used) == list(range(150))
    assert used[:40] != sorted(used[:40])
    stream = ShardStream(ShardDataset(path), 0, 2, seed=6)
    with pytest.raises(ValueError, match="state: saved with another stream"):
        ExampleExchange(stream, batch_size=4, state=state)


class _Faulty(IterableStream):
    """Fails, or falls asleep, on one rank in its fourth step."""

    def __init__(self, rank: int, world_size: int, how: str) -> None:
        super().__init__(
            lambda epoch: _examples(100, rank, epoch), rank, world_size, vocab_size=VOCABULARY
        )
        self.how = how if rank == 1 else "works"

    def batches(self, epoch: int, start: int, batch_size: int) -> Iterator[ExampleBatch]:
        for number, batch in enumerate(super().batches(epoch, start, batch_size)):
            if number == 3:
                if self.how == "fails":
                    raise OSError("disk on fire")
                if self.how == "times out":
                    raise TimeoutError("server gone")
                if self.how == "sleeps":
                    threading.Event().wait()  # for good: who waits for it never ends
            yield batch


LATE = 6.0 * SLOWNESS  # seconds, many times what a reader needs that works


def _faulty(rank: int, world_size: int, how: str):
    stream = _Faulty(rank, world_size, how)
    with ExampleExchange(stream, batch_size=4, reader_timeout=LATE) as exchange:
        for _ in range(3):
            next(exchange)
        with pytest.raises(ExchangeError) as caught:
            next(exchange)
    return str(caught.value), caught.value.ranks, type(caught.value.__cause__).__name__


FAULTS = [
    ("fails", "rank 1: its reader failed: OSError: disk on fire", "OSError"),
    ("times out", "rank 1: its reader failed: TimeoutError: server gone", "TimeoutError"),
    ("sleeps", f"rank 1: its reader gave no examples for {LATE:g} s", "TimeoutError"),
]


def _all_troubles(rank: int, world_size: int):
    faults = [_faulty(rank, world_size, how) for how, *_ in FAULTS]
    left = _one_leaves(rank, world_size), _one_cannot_wait(rank, world_size)
    return faults, *left, _differing(rank, world_size)


@pytest.fixture(scope="module")
def troubles() -> list:
    return run_ranks(_all_troubles, 3)


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[how for how, *_ in FAULTS])
def test_a_faulty_reader_is_named_on_all_ranks(troubles, number):
    _, message, cause = FAULTS[number]
    ranks = [faults[number] for faults, *_ in troubles]
    for rank, (text, faulty, found) in enumerate(ranks):
        assert text.startswith(message)
        assert faulty == [1]
        assert found == (cause if rank == 1 else "NoneType")


def _one_leaves(rank: int, world_size: int):
    exchange = ExampleExchange(_stream(rank, world_size, [1000] * 3), batch_size=4)
    next(exchange)
    if rank == 0:
        exchange.close(TIMEOUT)
        exchange.close()
        with pytest.raises(StopIteration):
            next(exchange)
        return "left"
    with pytest.raises(ExchangeError, match=r"ranks \[0\] have stopped exchanging") as caught:
        for _ in exchange:
            pass
    exchange.close()
    return caught.value.ranks


def _one_cannot_wait(rank: int, world_size: int) -> list[str]:
    """Rank 0 gives up while others have no reason to join in another round; what it logs."""
    exchange = ExampleExchange(_stream(rank, world_size, [1000] * 3), batch_size=4)
    next(exchange)
    while exchange._ready.empty():  # the last round that the others have room for
        time.sleep(0.005)
    if rank == 0:
        logged = []
        handler = logging.Handler()
        handler.emit = lambda record: logged.append(record.getMessage())
        logging.getLogger("bert_unpad").addHandler(handler)
        exchange.close(0.5)
        dist.barrier()
        return logged
    dist.barrier()
    with pytest.raises(ExchangeError):  # told so, or cut off in the middle of a round
        for _ in exchange:
            pass
    exchange.close()
    return []


def test_a_rank_that_cannot_wait_for_the_others(troubles):
    text = "rank 0: some rank has not stopped exchanging examples within 0.5 s"
    assert [logged for _, _, logged, _ in troubles] == [[text], [], []]


def test_a_rank_that_leaves_tells_the_others(troubles):
    assert [leaving for _, leaving, *_ in troubles] == ["left", [0], [0]]


def _one_dies(rank: int, world_size: int, report: Path):
    with ExampleExchange(_stream(rank, world_size, [100_000] * 2), batch_size=4) as exchange:
        for _ in range(3):
            next(exchange)
        if rank == 1:
            os._exit(1)
        with pytest.raises(ExchangeError, match="the exchange of examples broke down") as caught:
            for _ in exchange:
                pass
        report.write_text(str(caught.value))


def test_a_rank_that_dies_ends_the_others(tmp_path):
    with pytest.raises(RuntimeError, match="rank 1 of 2 died"):
        run_ranks(_one_dies, 2, tmp_path / "report")
    assert (tmp_path / "report").read_text().startswith("rank 0: ")


def _differing(rank: int, world_size: int):
    stream = _stream(rank, world_size, [8] * 3)
    with pytest.raises(ValueError) as caught:
        ExampleExchange(stream, batch_size=4, dealing=["lpt", "snake", "lpt"][rank])
    return str(caught.value)


def test_settings_must_agree(troubles):
    for *_, text in troubles:
        assert text.startswith("dealing: expected the same on all ranks")


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 0},
        {"scope": "everyone"},
        {"dealing": "fair"},
        {"node_size": 2},
        {"reader_timeout": 0.0},
        {"depth": 0},
        {"state": {}},
        {"state": {"version": 9, "epoch": 0, "positions": [0], "past": [], "stream": {}}},
    ],
)
def test_a_bad_argument_is_named(change):
    with pytest.raises(ValueError, match=f"^{next(iter(change))}: "):
        ExampleExchange(_stream(0, 1, [8]), **({"batch_size": 4} | change))


def test_an_iterable_of_examples_is_checked():
    bad = [
        Example(np.arange(0), 0, 0),
        Example(np.array([VOCABULARY]), 0, 0),
        Example(np.array([1, 2]), 3, 0),
        Example(np.array([1, 2]), 1, 2),
        Example(np.array([0.5]), 1, 0),
    ]
    for example in bad:
        stream = IterableStream(
            lambda _, example=example: [Example(np.array([1]), 1, 0), example],
            0,
            1,
            vocab_size=VOCABULARY,
        )
        with (
            ExampleExchange(stream, batch_size=1) as exchange,
            pytest.raises(ExchangeError, match="example 1 of rank 0: expected"),
        ):
            list(exchange)
    with pytest.raises(ValueError, match=r"expected 3 ranks, .* in the middle of epoch 2"):
        _stream(0, 2, [5, 5]).continue_after(2, [[1, 0, 1]])


def test_streams_without_examples_are_refused():
    with (
        ExampleExchange(_stream(0, 1, [0]), batch_size=4) as exchange,
        pytest.raises(ExchangeError, match="no rank's stream gave an example in epoch 0"),
    ):
        next(exchange)
