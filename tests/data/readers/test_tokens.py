"""Sequences of ids to examples, whatever the format: cutting, special tokens, many files."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from bert_unpad.data import BalancedSampler, DamagedDataError, PackedCollator, WordPieceTokenizer
from bert_unpad.data.readers import megatron, open_split
from bert_unpad.data.readers.ranges import FileRanges
from tests.support.masked_examples import CLS, LONGEST, SEP, VOCAB
from tests.support.seeds import derived
from tests.support.token_files import examples_of, random_sequences, setting, write_megatron

ADDED = {"none": ([], []), "cls": ([CLS], []), "sep": ([], [SEP]), "cls,sep": ([CLS], [SEP])}


def open_sequences(tmp_path, sequences, **options):
    write_megatron(tmp_path / "data", sequences)
    return megatron.open_split(tmp_path, setting(tmp_path, **options))


@pytest.mark.parametrize("add", ADDED)
@pytest.mark.parametrize("long", ["cut", "split"])
def test_examples_are_pieces_with_the_special_tokens_asked_for(tmp_path, add, long):
    first, last = ADDED[add]
    room = LONGEST - len(first) - len(last)
    sequences = random_sequences(40, 5 * LONGEST, special=False)
    sequences += [[], [7] * room, [8] * (room + 1), [9] * (2 * room), [], [10]]
    wanted = []
    for ids in sequences:
        pieces = [ids[begin : begin + room] for begin in range(0, len(ids), room)]
        wanted += pieces[:1] if long == "cut" else pieces
    dataset = open_sequences(tmp_path, sequences, add=add, long=long)
    wanted = [[*first, *piece, *last] for piece in wanted]
    assert dataset.lengths.dtype == np.uint16
    assert dataset.lengths.tolist() == [len(ids) for ids in wanted]
    order = np.random.default_rng(derived(1)).permutation(len(wanted)).tolist()
    assert examples_of(dataset, order) == [wanted[i] for i in order]
    assert examples_of(dataset, [3, 3]) == [wanted[3], wanted[3]]
    assert len(dataset.batch(np.empty(0, np.int64))) == 0
    counts = np.bincount([t for ids in wanted for t in ids], minlength=len(VOCAB))
    counts[[0, CLS, SEP, 4]] = 0
    assert dataset.target_counts().tolist() == counts.tolist()


def test_long_sequences_are_an_error_unless_an_option_says_more(tmp_path):
    sequences = [[CLS, *[7] * 30, SEP]]
    message = r"max_seq_length: expected at least {}, for the longest sequence of .*data\.bin{}, or"
    with pytest.raises(ValueError, match=message.format(32, "")):
        open_sequences(tmp_path, sequences)
    with pytest.raises(ValueError, match=message.format(34, " and 2 special tokens")):
        open_sequences(tmp_path, sequences, add="cls,sep")
    with pytest.raises(ValueError, match=r"expected the option add=.* with long=split"):
        open_sequences(tmp_path, sequences, long="split")


def write_parquet(path, sequences):
    pa, pq = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    pq.write_table(pa.table({"input_ids": pa.array(sequences, pa.list_(pa.int32()))}), path)


@pytest.mark.parametrize("kind", ["megatron", "parquet"])
def test_more_files_than_a_process_may_open(tmp_path, kind):
    write = {"megatron": write_megatron, "parquet": write_parquet}[kind]
    data, sequences = tmp_path / "data", random_sequences(150)
    data.mkdir()
    for number, ids in enumerate(sequences):
        write(data / f"{number:03}.{kind}", [ids])
    before = len(os.listdir("/proc/self/fd"))
    dataset = open_split(kind, data, setting(tmp_path))
    assert len(os.listdir("/proc/self/fd")) <= before
    order = np.random.default_rng(derived(2)).permutation(150).tolist()
    assert examples_of(dataset, order) == [sequences[i] for i in order]
    assert len(os.listdir("/proc/self/fd")) <= before + 64


def test_many_readers_share_the_files_that_may_be_open(tmp_path):
    paths = [tmp_path / str(number) for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]))
    before, ones = len(os.listdir("/proc/self/fd")), np.ones(20, np.int64)
    readers = [FileRanges(paths) for _ in range(20)]
    for reader in readers:
        found = reader.read(np.arange(20), 0 * ones, ones)
        assert b"".join(found) == bytes(range(20))
    assert before + 20 <= len(os.listdir("/proc/self/fd")) <= before + 256


def test_sequences_without_special_tokens_are_noticed(tmp_path):
    sequences = [[CLS, 8, SEP], [9, 10]]
    dataset = open_sequences(tmp_path, sequences)
    assert examples_of(dataset, [0]) == [sequences[0]]
    with pytest.raises(
        DamagedDataError, match=r"data\.bin: expected .* \[CLS\] \(2\), got 9; .*add="
    ):
        dataset.batch(np.array([0, 1]))
    assert examples_of(open_sequences(tmp_path, sequences, add="none"), [1]) == [[9, 10]]


def test_ids_outside_the_vocabulary_name_the_file(tmp_path):
    for number, token in enumerate((7, 99, 100)):
        write_megatron(tmp_path / f"part{number}", [[CLS, 5], [CLS, token, 6]], code=4)
    dataset = megatron.open_split(tmp_path, setting(tmp_path))
    assert examples_of(dataset, [3, 1]) == [[CLS, 99, 6], [CLS, 7, 6]]
    with pytest.raises(DamagedDataError, match=r"part2\.bin: expected ids of 0 to 99 .* got 100"):
        dataset.batch(np.array([1, 5, 3]))


@pytest.mark.parametrize("add", ["none", "cls,sep"])
def test_padded_sequences_are_noticed(tmp_path, add):
    dataset = open_sequences(tmp_path, [[CLS, 8, 0, 9], [CLS, 8, SEP, 0, 0]], add=add)
    dataset.batch(np.array([0]))
    with pytest.raises(DamagedDataError, match=r"data\.bin: expected sequences without padding"):
        dataset.batch(np.array([0, 1]))


def test_many_files_few_of_them_open(tmp_path, monkeypatch):
    sequences = random_sequences(60)
    for number in range(0, 60, 3):
        name = tmp_path / "data" / f"{number:03}"
        write_megatron(name, sequences[number : number + 3], code=8 if number % 2 else 5)
    write_megatron(tmp_path / "data" / "empty", [])
    dataset = megatron.open_split(tmp_path / "data", setting(tmp_path))
    dataset._ranges._max_open = 4
    order = np.random.default_rng(derived(2)).permutation(60).tolist()
    assert examples_of(dataset, order) == [sequences[i] for i in order]
    assert len(dataset._ranges._open) == 4
    copy = pickle.loads(pickle.dumps(dataset))
    dataset._ranges.close()
    assert examples_of(copy, order) == examples_of(dataset, order)


def test_a_file_that_becomes_shorter_is_named(tmp_path):
    dataset = open_sequences(tmp_path, random_sequences(9))
    path = tmp_path / "data.bin"
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(DamagedDataError, match=r"data\.bin has become shorter: expected \d+ bytes"):
        dataset.batch(np.arange(9))
    path.unlink()
    ranges = FileRanges([path])
    with pytest.raises(DamagedDataError, match=r"data\.bin cannot be read"):
        ranges.read(*(np.zeros(1, np.int64) for _ in range(3)))


def test_masks_are_drawn_and_steps_balanced_as_for_shards(tmp_path):
    dataset = open_sequences(tmp_path, random_sequences(64))
    tokenizer = WordPieceTokenizer(VOCAB)
    collator = PackedCollator(dataset, tokenizer, seed=3)
    sampler = BalancedSampler(dataset.lengths, 2, 1, 4, seed=1)
    steps = list(sampler)
    assert sorted(i for step in steps for i in step.tolist()) == sorted({*np.concatenate(steps)})
    first, again, other = (collator(steps[0], epoch) for epoch in (0, 0, 1))
    assert first.masked_positions.equal(again.masked_positions)
    assert not first.masked_positions.equal(other.masked_positions)
    assert first.token_type_ids.sum() == 0
    assert (first.next_sentence_labels == -100).all()
