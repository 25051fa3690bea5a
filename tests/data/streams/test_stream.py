"""One rank's part of a data set: every example once an epoch, from everywhere at any time."""

import zlib

import numpy as np
import pytest

from bert_unpad.data.store.example_batch import ExampleBatch
from bert_unpad.data.streams.stream import ShardStream


class Numbered:
    """Examples of one token each, known by their ids."""

    vocab_size, unmaskable_ids, max_seq_length, has_masks = 9, (), 1, False

    def __init__(self, count):
        self.lengths = np.ones(count, np.uint16)

    def __len__(self):
        return len(self.lengths)

    def batch(self, indices):
        ones = np.ones(len(indices), np.int64)
        return ExampleBatch(indices, ones, ones, -100 * ones, ones)


def streams(count, ranks, **options):
    options = {"seed": 5, "shuffle_buffer": 64, **options}
    return [ShardStream(Numbered(count), rank, ranks, **options) for rank in range(ranks)]


def ids(stream, epoch=0, start=0, batch_size=7):
    parts = [batch.ids for batch in stream.batches(epoch, start, batch_size)]
    assert all(len(part) == batch_size for part in parts[:-1])
    return np.concatenate([np.empty(0, np.int64), *parts])


def test_the_beginning_of_an_epoch_comes_from_everywhere():
    count, share = 40_000, 1 / 8
    used = {}
    for seed in (1, 2):
        parts = [ids(stream)[: int(count * share) // 4] for stream in streams(count, 4, seed=seed)]
        used[seed] = set(np.concatenate(parts).tolist())
        assert len(used[seed]) == count * share
        # Each of 40 files of 1,000 examples gives about its share.
        found = np.bincount(np.array(sorted(used[seed])) // 1000, minlength=40)
        assert 0 < found.min() <= found.max() < 4 * share * 1000
        for part in parts:
            assert len(np.unique(part // 1000)) == 40
    # Two seeds have in common what chance gives: 5,000 / 8 in chunks of 4.
    assert len(used[1] & used[2]) == pytest.approx(share * share * count, rel=0.5)
    again = ids(streams(count, 4, seed=1)[0], epoch=1)[: int(count * share) // 4]
    assert len(used[1] & set(again.tolist())) < 2 * share * len(again)


@pytest.mark.parametrize("count", [0, 1, 15, 64, 1000, 1003])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("buffer", [1, 5, 64, 4096])
def test_every_example_once(count, ranks, buffer):
    some = streams(count, ranks, shuffle_buffer=buffer)
    for epoch in (0, 3):
        parts = [ids(stream, epoch) for stream in some]
        assert sorted(np.concatenate(parts).tolist()) == list(range(count))
        assert [len(part) for part in parts] == some[0].part_sizes(epoch)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if buffer == 1:
        assert np.concatenate(parts).tolist() == list(range(count))
    elif count >= 1000:
        assert np.concatenate(parts).tolist() != list(range(count))


def test_going_on_is_exact():
    stream = streams(1003, 2)[1]
    whole = ids(stream)
    for start in (0, 1, 63, 64, 130, 501, 502, 600):
        assert ids(stream, start=start, batch_size=11).tolist() == whole[start:].tolist()


def test_other_numbers_of_ranks_share_what_is_left():
    past, used, some = [], [], streams(1003, 3)
    for taken in ((100, 0, 130), (50,), (90, 64), None):
        some = streams(1003, len(taken or "abcd"))
        for stream in some:
            stream.continue_after(2, past)
        parts = [ids(stream, 2) for stream in some]
        assert [len(part) for part in parts] == some[0].part_sizes(2)
        for part, count in zip(parts, taken or map(len, parts), strict=True):
            used += part[:count].tolist()
        past.append(taken)
    assert sorted(used) == list(range(1003))
    assert sorted(np.concatenate([ids(stream, 3) for stream in some])) == list(range(1003))


def test_another_order_needs_another_version():
    """A saved position is one in this order, so a change of it has to change the identity."""
    stream = streams(1003, 2)[0]
    assert stream.identity()["version"] == 2
    assert zlib.crc32(ids(stream, 1).astype("<i8").tobytes()) == 2_620_926_334
