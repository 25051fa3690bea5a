"""Sequences of ids to examples, whatever the format: cutting, special tokens, checks."""

import numpy as np
import pytest

from bert_unpad.data import DamagedDataError
from bert_unpad.data.formats import tokens
from tests.support.masked_examples import CLS, LONGEST, SEP
from tests.support.token_files import random_sequences, read_sequences, write_megatron

ADDED = {"none": ([], []), "cls": ([CLS], []), "sep": ([], [SEP]), "cls,sep": ([CLS], [SEP])}


def read_back(tmp_path, sequences, **options):
    write_megatron(tmp_path / "data", sequences)
    return read_sequences(tmp_path, "megatron", **options)


@pytest.mark.parametrize("add", ADDED)
@pytest.mark.parametrize("long", ["cut", "split"])
@pytest.mark.parametrize("at_once", [1, 100, 2**20])
def test_examples_are_pieces_with_the_special_tokens_asked_for(
    tmp_path, add, long, at_once, monkeypatch
):
    monkeypatch.setattr(tokens, "_AT_ONCE", at_once)
    first, last = ADDED[add]
    room = LONGEST - len(first) - len(last)
    sequences = random_sequences(40, 5 * LONGEST, special=False)
    sequences += [[], [7] * room, [8] * (room + 1), [9] * (2 * room), [], [10]]
    wanted = []
    for ids in sequences:
        pieces = [ids[begin : begin + room] for begin in range(0, len(ids), room)]
        wanted += pieces[:1] if long == "cut" else pieces
    found = read_back(tmp_path, sequences, add=add, long=long)
    assert found == [[*first, *piece, *last] for piece in wanted]


def test_blocks_hold_whole_sequences(monkeypatch):
    monkeypatch.setattr(tokens, "_AT_ONCE", 10)
    lengths = np.array([0, 4, 6, 0, 1, 25, 0, 9, 1, 1])
    some = [lengths[block].tolist() for block in tokens.in_blocks(lengths)]
    assert some == [[0, 4, 6, 0], [1], [25], [0, 9, 1], [1]]
    assert list(tokens.in_blocks(lengths[:0])) == []


def test_long_sequences_are_an_error_unless_an_option_says_more(tmp_path):
    sequences = [[CLS, *[7] * 30, SEP]]
    message = r"max_seq_length: expected at least {}, for a sequence of .*data\.bin{}, or"
    with pytest.raises(ValueError, match=message.format(32, "")):
        read_back(tmp_path, sequences)
    with pytest.raises(ValueError, match=message.format(34, " and 2 special tokens")):
        read_back(tmp_path, sequences, add="cls,sep")
    with pytest.raises(ValueError, match=r"expected the option add=.* with long=split"):
        read_back(tmp_path, sequences, long="split")


def test_sequences_without_special_tokens_are_noticed(tmp_path):
    sequences = [[CLS, 8, SEP], [9, 10]]
    message = r"data\.bin: expected .* \[CLS\] \(2\), got 9; .*add="
    with pytest.raises(DamagedDataError, match=message):
        read_back(tmp_path, sequences)
    assert read_back(tmp_path, sequences, add="none") == sequences


@pytest.mark.parametrize(("token", "code"), [(100, 4), (-1, 4), (2**40, 5), (65_535, 8)])
def test_ids_outside_the_vocabulary_name_the_file(tmp_path, token, code):
    for number, last in enumerate((7, 99, token)):
        write_megatron(tmp_path / f"part{number}", [[CLS, 5], [CLS, last, 6]], code=code)
    message = rf"part2\.bin: expected ids of 0 to 99 .* got {token}"
    with pytest.raises(DamagedDataError, match=message):
        read_sequences(tmp_path, "megatron")


@pytest.mark.parametrize("add", ["none", "cls,sep"])
def test_padded_sequences_are_noticed(tmp_path, add):
    sequences = [[CLS, 8, 0, 9], [CLS, 8, SEP, 0, 0]]
    assert len(read_back(tmp_path, sequences[:1], add=add)) == 1
    with pytest.raises(DamagedDataError, match=r"data\.bin: expected sequences without padding"):
        read_back(tmp_path, sequences, add=add)
