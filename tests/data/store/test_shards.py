"""Shards: what is written is read back, appears whole or not at all, and damage is named."""

import json
import pickle

import numpy as np
import pytest

from bert_unpad.data import DamagedDataError, ShardDataset, ShardWriter


def write(path, vocab_size=1000, count=50, seed=0):
    """A shard of random examples, appended in two blocks; returns (tokens, lengths, seconds)."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, count)
    tokens = rng.integers(0, vocab_size, lengths.sum())
    seconds, labels = lengths // 2, rng.integers(0, 2, count)
    half = count // 2
    cut = lengths[:half].sum()
    with ShardWriter(
        path, vocab_size=vocab_size, unmaskable_ids=(0, 2), max_seq_length=40
    ) as writer:
        writer.append(tokens[:cut], lengths[:half], seconds[:half], labels[:half])
        writer.append(tokens[cut:], lengths[half:], seconds[half:], labels[half:])
    return tokens, lengths, seconds, labels


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_round_trip(tmp_path, vocab_size, dtype):
    tokens, lengths, seconds, labels = write(tmp_path / "shard", vocab_size)
    dataset = ShardDataset(tmp_path / "shard")
    assert dataset.tokens.dtype == dtype
    assert dataset.lengths.dtype == np.uint16
    assert (dataset.vocab_size, dataset.unmaskable_ids) == (vocab_size, (0, 2))
    np.testing.assert_array_equal(dataset.tokens, tokens)
    np.testing.assert_array_equal(dataset.lengths, lengths)
    for index, expected in enumerate(np.split(tokens, np.cumsum(lengths)[:-1])):
        example = dataset[index]
        np.testing.assert_array_equal(example.input_ids, expected)
        assert example.input_ids.dtype == np.int64
        assert example.second_start == seconds[index]
        assert example.next_sentence_label == labels[index]
    np.testing.assert_array_equal(dataset[-1].input_ids, dataset[49].input_ids)
    assert dataset.fill == pytest.approx(lengths.sum() / (50 * 40))
    with pytest.raises(IndexError, match="index"):
        dataset[50]
    with pytest.raises(ValueError, match="read-only"):
        dataset.tokens[0] = 1


def test_empty_shard(tmp_path):
    with ShardWriter(tmp_path / "s", vocab_size=9, unmaskable_ids=(), max_seq_length=8):
        pass
    dataset = ShardDataset(tmp_path / "s")
    assert len(dataset) == len(dataset.tokens) == 0
    assert dataset.fill == 0


def test_pickled_by_path(tmp_path):
    tokens, *_ = write(tmp_path / "shard", count=2000)
    data = pickle.dumps(ShardDataset(tmp_path / "shard"))
    assert len(data) < 1000
    np.testing.assert_array_equal(pickle.loads(data).tokens, tokens)


def test_nothing_is_left_of_a_failed_write(tmp_path):
    about = {"vocab_size": 9, "unmaskable_ids": (), "max_seq_length": 4}
    one = np.ones(1, np.int64)

    def interrupted():
        with ShardWriter(tmp_path / "shard", **about) as writer:
            writer.append(one, one, one, one)
            assert not (tmp_path / "shard").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_writer_refuses_what_does_not_fit(tmp_path):
    about = {"vocab_size": 9, "unmaskable_ids": (), "max_seq_length": 4}
    ok = [np.array([1, 2, 3]), np.array([3]), np.array([1]), np.array([0])]
    for place, bad, message in (
        (0, np.array([1, 2]), "tokens: expected 3"),
        (0, np.array([1, 9, 3]), "tokens: expected ids of 0 to 8"),
        (0, np.array([1, -1, 3]), "tokens: expected ids of 0 to 8"),
        (2, np.array([1, 1]), "expected equal sizes"),
    ):
        arguments = [*ok[:place], bad, *ok[place + 1 :]]
        with (
            pytest.raises(ValueError, match=message),
            ShardWriter(tmp_path / "s", **about) as writer,
        ):
            writer.append(*arguments)
    with (
        pytest.raises(ValueError, match="lengths: expected 1 to 4, got 5 to 5"),
        ShardWriter(tmp_path / "s", **about) as writer,
    ):
        writer.append(np.ones(5, np.int64), np.array([5]), *ok[2:])
    with pytest.raises(ValueError, match="max_seq_length: expected 1 to 65,535"):
        ShardWriter(tmp_path / "s", **{**about, "max_seq_length": 65_536})
    write(tmp_path / "taken")
    with pytest.raises(FileExistsError, match="path"):
        ShardWriter(tmp_path / "taken", **about)


@pytest.mark.parametrize(
    "name", ["tokens.bin", "offsets.bin", "second_starts.bin", "next_sentence_labels.bin"]
)
def test_damage_is_named_with_what_was_expected(tmp_path, name):
    write(tmp_path / "shard")
    file = tmp_path / "shard" / name
    intact = file.read_bytes()

    file.write_bytes(intact[:-1])
    for verify in (True, False):
        with pytest.raises(DamagedDataError, match=rf"{name} has .*expected {len(intact):,} bytes"):
            ShardDataset(tmp_path / "shard", verify)

    altered = bytearray(intact)
    altered[10] ^= 1
    file.write_bytes(altered)
    with pytest.raises(DamagedDataError, match=rf"{name} was altered: expected SHA-256"):
        ShardDataset(tmp_path / "shard")

    file.unlink()
    with pytest.raises(DamagedDataError, match=rf"{name} is missing; expected"):
        ShardDataset(tmp_path / "shard")


def test_unverified_offsets_must_still_fit_the_tokens(tmp_path):
    write(tmp_path / "shard")
    file = tmp_path / "shard" / "offsets.bin"
    offsets = np.fromfile(file, np.int64)
    offsets[3] = offsets[2] - 5
    offsets.tofile(file)
    with pytest.raises(DamagedDataError, match=r"offsets\.bin is damaged: expected offsets"):
        ShardDataset(tmp_path / "shard", verify=False)


def test_damaged_manifests_are_named(tmp_path):
    write(tmp_path / "shard")
    file = tmp_path / "shard" / "manifest.json"
    manifest = json.loads(file.read_text())
    for text, message in (
        ("{", "expected JSON"),
        ("[]", "expected format"),
        (json.dumps({**manifest, "format": "other"}), "expected format .*found 'other'"),
        (json.dumps({**manifest, "files": {}}), "expected an entry for 'tokens.bin'"),
    ):
        file.write_text(text)
        with pytest.raises(DamagedDataError, match=rf"manifest\.json.*{message}"):
            ShardDataset(tmp_path / "shard")
    file.unlink()
    with pytest.raises(DamagedDataError, match=r"manifest\.json is missing"):
        ShardDataset(tmp_path / "shard")
