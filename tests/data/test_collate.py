"""The collator's packed batches, and the thread that makes them ahead of time."""

import gc
import pickle
import threading
import time

import numpy as np
import pytest
import torch

from bert_unpad.data import (
    PackedCollator,
    Prefetcher,
    ShardDataset,
    ShardWriter,
    WordPieceTokenizer,
)
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived


@pytest.fixture(scope="module")
def tokenizer():
    return WordPieceTokenizer([*SPECIAL_TOKENS, *(f"w{i}" for i in range(195))])


@pytest.fixture(scope="module")
def dataset(tokenizer, tmp_path_factory):
    rng = np.random.default_rng(derived(0))
    lengths = rng.integers(5, 33, 200)
    seconds = rng.integers(3, lengths - 1)
    labels = rng.integers(0, 2, 200)
    tokens = rng.integers(5, 200, lengths.sum())
    ends = np.cumsum(lengths)
    tokens[ends - lengths] = tokenizer.cls_id
    tokens[ends - 1] = tokens[ends - lengths + seconds - 1] = tokenizer.sep_id
    path = tmp_path_factory.mktemp("data") / "shard"
    about = {"vocab_size": 200, "unmaskable_ids": tokenizer.unmaskable_ids, "max_seq_length": 32}
    with ShardWriter(path, **about) as writer:
        writer.append(tokens, lengths, seconds, labels)
    return ShardDataset(path)


def test_batch_is_the_examples_longest_first(dataset, tokenizer):
    indices = np.random.default_rng(derived(1)).choice(200, 24, replace=False)
    inputs = PackedCollator(dataset, tokenizer, seed=3)(indices, epoch=1)
    order = indices[np.argsort(-dataset.lengths[indices].astype(int), kind="stable")]
    examples = [dataset[i] for i in order]
    assert inputs.batch.lengths.tolist() == [len(e.input_ids) for e in examples]
    restored = inputs.input_ids.clone()
    restored[inputs.masked_positions] = inputs.masked_labels
    assert restored.tolist() == [t for e in examples for t in e.input_ids.tolist()]
    assert inputs.token_type_ids.tolist() == [
        int(place >= e.second_start) for e in examples for place in range(len(e.input_ids))
    ]
    assert inputs.batch.position_ids.tolist() == [
        place for e in examples for place in range(len(e.input_ids))
    ]
    assert inputs.next_sentence_labels.tolist() == [e.next_sentence_label for e in examples]
    quota = [max(1, round(0.15 * len(e.input_ids))) for e in examples]
    assert len(inputs.masked_positions) == sum(quota)
    assert bool((inputs.masked_positions.diff() > 0).all())
    for tensor in (
        inputs.input_ids,
        inputs.token_type_ids,
        inputs.masked_positions,
        inputs.masked_labels,
        inputs.next_sentence_labels,
    ):
        assert tensor.dtype == torch.int64


def test_ranks_together_see_what_one_rank_sees(dataset, tokenizer):
    collator = PackedCollator(dataset, tokenizer, seed=3)
    indices = np.random.default_rng(derived(2)).permutation(200)[:40]

    def sequences(parts, epoch):
        rows = []
        for part in parts:
            inputs = collator(part, epoch)
            split = inputs.input_ids.split(inputs.batch.lengths.tolist())
            rows += [tuple(row.tolist()) for row in split]
        return sorted(rows)

    one = sequences([indices], 0)
    assert sequences([indices[0::3], indices[1::3], indices[2::3]], 0) == one
    assert sequences([indices], 1) != one


def test_batches_are_the_same_in_other_processes_and_threads(dataset, tokenizer):
    collator = PackedCollator(dataset, tokenizer, mask_unit="span", seed=3)
    batches = np.random.default_rng(derived(2)).permutation(200).reshape(10, 20)
    expected = [collator(indices, 4) for indices in batches]
    sent = pickle.loads(pickle.dumps(collator))  # as a loader sends it to a worker
    threads = [Prefetcher(each, batches, epoch=4) for each in (collator, sent, collator)]
    for found in zip(*threads, expected, strict=True):
        for name in ("input_ids", "token_type_ids", "masked_positions", "masked_labels"):
            first, *rest = (getattr(inputs, name) for inputs in found)
            assert all(torch.equal(first, other) for other in rest)


def test_no_indices_give_an_empty_batch(dataset, tokenizer):
    inputs = PackedCollator(dataset, tokenizer)(np.empty(0, np.int64), 0)
    assert (inputs.batch.batch_size, inputs.batch.total) == (0, 0)
    assert inputs.input_ids.shape == inputs.masked_positions.shape == (0,)
    assert inputs.next_sentence_labels.shape == (0,)


def test_bad_indices_and_tokenizers_are_named(dataset, tokenizer):
    collator = PackedCollator(dataset, tokenizer)
    for bad in ([200], [-1, 3]):
        with pytest.raises(IndexError, match="indices: expected 0 to 199"):
            collator(np.array(bad), 0)
    with pytest.raises(ValueError, match="tokenizer: expected"):
        PackedCollator(dataset, WordPieceTokenizer([*SPECIAL_TOKENS, "a"]))


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "bert_unpad-prefetch"]


def wait_until(condition):
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, f"waited {TIMEOUT} s"
        time.sleep(0.005)


def test_prefetcher_gives_the_same_batches_in_order(dataset, tokenizer):
    collator = PackedCollator(dataset, tokenizer)
    batches = [np.arange(i, i + 4) for i in range(0, 40, 4)] + [np.empty(0, np.int64)]
    prefetcher = Prefetcher(collator, batches, epoch=2, depth=3)
    found = list(prefetcher)
    assert len(found) == len(batches)
    for inputs, indices in zip(found, batches, strict=True):
        assert torch.equal(inputs.input_ids, collator(indices, 2).input_ids)
    assert not prefetch_threads()
    assert list(prefetcher) == []


def test_prefetcher_works_ahead_by_its_depth_and_no_further():
    calls = []
    with Prefetcher(lambda indices, epoch: calls.append(indices), range(100), depth=3) as batches:
        wait_until(lambda: len(calls) == 3)
        time.sleep(0.05)
        assert len(calls) == 3
    assert not prefetch_threads()
    assert next(batches, "closed") == "closed"


@pytest.mark.parametrize("where", ["collator", "sampler"])
def test_prefetcher_raises_errors_in_the_consumer_in_turn(where):
    def batches():
        for i in range(10):
            if i == 3 and where == "sampler":
                raise OSError("batch 3")
            yield i

    def collator(indices, epoch):
        if indices == 3 and where == "collator":
            raise OSError("batch 3")
        return indices * 10 + epoch

    prefetcher = Prefetcher(collator, batches(), epoch=1, depth=8)
    assert [next(prefetcher) for _ in range(3)] == [1, 11, 21]
    with pytest.raises(OSError, match="batch 3"):
        next(prefetcher)
    assert not prefetch_threads()
    assert next(prefetcher, None) is None


def test_prefetcher_state_is_that_of_the_batch_handed_out():
    taken = []

    def batches():
        for i in range(6):
            taken.append(i)
            yield i

    with Prefetcher(
        lambda indices, epoch: indices, batches(), depth=4, get_state=lambda: len(taken)
    ) as prefetcher:
        wait_until(lambda: len(taken) == 4)
        assert prefetcher.state is None
        for expected in range(1, 7):
            next(prefetcher)
            assert prefetcher.state == expected


def test_abandoned_prefetcher_ends_its_thread():
    prefetcher = Prefetcher(lambda indices, epoch: indices, range(100), depth=1)
    assert next(prefetcher) == 0
    del prefetcher
    gc.collect()
    wait_until(lambda: not prefetch_threads())


def test_prefetcher_depth_is_checked():
    with pytest.raises(ValueError, match="depth: expected"):
        Prefetcher(lambda indices, epoch: indices, [], depth=0)
