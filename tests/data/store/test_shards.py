"""Shards: what is written is read back, appears whole or not at all, and damage is named."""

import hashlib
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bert_unpad.data import DamagedDataError, ShardDataset, ShardWriter
from bert_unpad.data.store.example_batch import Masks
from bert_unpad.data.store.mapped import map_file
from tests.support.paths import ROOT
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived


def write(path, vocab_size=1000, count=50, seed=0, shortest=1):
    """A shard of random examples, appended in two blocks; returns (tokens, lengths, seconds)."""
    rng = np.random.default_rng(derived(seed))
    lengths = rng.integers(shortest, 40, count)
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
    with pytest.raises(IndexError, match="index"):
        dataset[50]
    with pytest.raises(ValueError, match="read-only"):
        dataset.tokens[0] = 1


def test_empty_shard(tmp_path):
    with ShardWriter(tmp_path / "s", vocab_size=9, unmaskable_ids=(), max_seq_length=8):
        pass
    dataset = ShardDataset(tmp_path / "s")
    assert len(dataset) == len(dataset.tokens) == 0


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
    "name",
    ["tokens.bin", "lengths.bin", "offsets.bin", "second_starts.bin", "next_sentence_labels.bin"],
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


def test_a_file_of_tokens_may_be_looked_at_when_it_is_read(tmp_path):
    write(tmp_path / "shard")
    file = tmp_path / "shard" / "tokens.bin"
    file.write_bytes(file.read_bytes()[:-2])
    dataset = ShardDataset(tmp_path / "shard", verify=False, sizes=False)
    assert len(dataset) == 50
    with pytest.raises(DamagedDataError, match=r"tokens\.bin has .* bytes; expected"):
        dataset.batch(np.arange(2))
    with pytest.raises(DamagedDataError, match=r"tokens\.bin has .* bytes; expected"):
        ShardDataset(tmp_path / "shard", verify=False)


def split_tokens(folder, *examples):
    """Puts the tokens from each of these examples on into another file."""
    offsets = np.fromfile(folder / "offsets.bin", np.int64)
    tokens = np.fromfile(folder / "tokens.bin", np.uint16)
    manifest = json.loads((folder / "manifest.json").read_text())
    names = [f"tokens-{number}.bin" for number in range(len(examples) + 1)]
    parts = dict(zip(names, np.split(tokens, offsets[list(examples)]), strict=True))
    for name, part in parts.items():
        part.tofile(folder / name)
        digest = hashlib.sha256(part.tobytes()).hexdigest()
        manifest["files"][name] = {"dtype": "uint16", "count": len(part), "sha256": digest}
    manifest["tokens"] = names
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("at", [0, 1, 23, 50])
def test_tokens_in_several_files(tmp_path, at):
    tokens, *_ = write(tmp_path / "shard")
    whole = ShardDataset(tmp_path / "shard")
    indices = np.random.default_rng(derived(0)).permutation(50)
    expected, counts = whole.batch(indices), whole.target_counts()
    split_tokens(tmp_path / "shard", at)
    parts = ShardDataset(tmp_path / "shard")
    np.testing.assert_array_equal(parts.tokens, tokens)
    np.testing.assert_array_equal(parts.batch(indices).tokens, expected.tokens)
    np.testing.assert_array_equal(parts.target_counts(), counts)
    assert parts.num_tokens == len(tokens)


def test_opening_without_sizes_looks_at_examples_when_they_are_read(tmp_path):
    write(tmp_path / "shard")
    file = tmp_path / "shard" / "lengths.bin"
    intact = np.fromfile(file, np.uint16)
    for place, value in ((3, 0), (3, 65_535), (0, intact[0] + 1)):
        lengths = intact.copy()
        lengths[place] = value
        lengths.tofile(file)
        dataset = ShardDataset(tmp_path / "shard", verify=False, sizes=False)
        with pytest.raises(DamagedDataError, match=r"offsets\.bin is damaged"):
            dataset.batch(np.array([1, place]))
        assert len(dataset.batch(np.array([5]))) == 1
    lengths[0] = 0
    lengths.tofile(file)
    with pytest.raises(DamagedDataError, match=r"lengths\.bin is damaged: expected 1 to"):
        ShardDataset(tmp_path / "shard", verify=False)


FEW_FILES = """
import os, resource, sys
import numpy as np
from bert_unpad.data import ShardDataset
limit = len(os.listdir("/proc/self/fd")) + 20
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
dataset = ShardDataset(sys.argv[1])
print(int(dataset.batch(np.arange(200)).tokens.sum(dtype=np.int64)), len(dataset._token_paths))
"""


def test_more_files_of_tokens_than_a_process_may_open(tmp_path):
    tokens, *_ = write(tmp_path / "shard", count=200)
    split_tokens(tmp_path / "shard", *range(1, 200))
    command = [sys.executable, "-c", FEW_FILES, str(tmp_path / "shard")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout.split() == [str(tokens.sum()), "200"], done.stderr


def test_a_file_is_unmapped_when_nothing_shows_it(tmp_path):
    def is_mapped():
        return str(path) in Path("/proc/self/maps").read_text()

    path = tmp_path / "numbers.bin"
    np.arange(5000, dtype=np.int32).tofile(path)
    part = map_file(path, np.dtype(np.int32), 5000)[1000:1010]
    assert part.tolist() == list(range(1000, 1010))
    assert is_mapped()
    del part
    assert not is_mapped()
    assert map_file(path, np.dtype(np.int32), 0).tolist() == []
    with pytest.raises(FileNotFoundError, match="missing"):
        map_file(tmp_path / "missing", np.dtype(np.int32), 1)
    with pytest.raises(OSError, match=re.escape(f"'{tmp_path}'")):
        map_file(tmp_path, np.dtype(np.int32), 1)


def test_wrong_ids_are_named_with_their_file(tmp_path):
    write(tmp_path / "shard")
    split_tokens(tmp_path / "shard", 20, 30)
    forge(tmp_path / "shard", "tokens-1.bin", 3, 1000)
    dataset = ShardDataset(tmp_path / "shard")
    for read in (lambda: dataset.batch(np.arange(50)), dataset.target_counts):
        with pytest.raises(DamagedDataError, match=r"tokens-1\.bin is damaged: expected ids of 0 "):
            read()


def test_examples_that_reach_beyond_a_file_are_refused(tmp_path):
    write(tmp_path / "shard", shortest=2)
    split_tokens(tmp_path / "shard", 20)
    offsets, lengths = (
        np.fromfile(tmp_path / "shard" / f"{name}.bin", dtype)
        for name, dtype in (("offsets", np.int64), ("lengths", np.uint16))
    )
    offsets[20] -= 1  # the example before it ends earlier, the next one begins in the file before
    lengths[19:21] += np.array([65_535, 1], np.uint16)
    offsets.tofile(tmp_path / "shard" / "offsets.bin")
    lengths.tofile(tmp_path / "shard" / "lengths.bin")
    dataset = ShardDataset(tmp_path / "shard", verify=False)
    with pytest.raises(DamagedDataError, match="expected examples within a file"):
        dataset.batch(np.array([20]))


def test_damaged_manifests_are_named(tmp_path):
    write(tmp_path / "shard")
    file = tmp_path / "shard" / "manifest.json"
    manifest = json.loads(file.read_text())
    for text, message in (
        ("{", "expected JSON"),
        ("[]", "expected a JSON object, got list"),
        ("[" * 100_000, "expected JSON"),
        (json.dumps({**manifest, "format": "other"}), "expected format .*found 'other'"),
        (json.dumps({**manifest, "files": {}}), "expected an entry for 'tokens.bin'"),
    ):
        file.write_text(text)
        with pytest.raises(DamagedDataError, match=rf"manifest\.json.*{message}"):
            ShardDataset(tmp_path / "shard")
    file.unlink()
    with pytest.raises(DamagedDataError, match=r"manifest\.json is missing"):
        ShardDataset(tmp_path / "shard")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", float("inf")),
        ("vocab_size", 2**40),
        ("vocab_size", "1000"),
        ("max_seq_length", 10**9),
        ("unmaskable_ids", [-1]),
        ("unmaskable_ids", [1000]),
        ("unmaskable_ids", ["0"]),
        ("unmaskable_ids", 5),
        ("tokens", []),
        ("tokens", 5),
        ("tokens", ["../tokens.bin"]),
        ("tokens", ["other.bin"]),
        ("statistics", {"documents": -1}),
        ("files", []),
        ("files", 5),
        ("count", -4),
        ("count", float("nan")),
        ("count", 10**30),
        ("dtype", "object"),
        ("dtype", "float64"),
        ("dtype", ["int64"]),
    ],
)
def test_forged_manifests_are_named(tmp_path, key, value):
    write(tmp_path / "shard")
    file = tmp_path / "shard" / "manifest.json"
    manifest = json.loads(file.read_text())
    (manifest if key in manifest else manifest["files"]["offsets.bin"])[key] = value
    file.write_text(json.dumps(manifest))
    with pytest.raises(DamagedDataError, match=r"manifest\.json is damaged; expected an entry for"):
        ShardDataset(tmp_path / "shard", verify=False)


def forge(folder, name, place, value):
    """Changes a number of a shard's array, and the digest in the manifest with it."""
    file, about = folder / name, folder / "manifest.json"
    manifest = json.loads(about.read_text())
    array = np.fromfile(file, manifest["files"][name]["dtype"])
    array[place] = value
    array.tofile(file)
    manifest["files"][name]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    about.write_text(json.dumps(manifest))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("tokens.bin", 7, 1000, r"tokens\.bin is damaged: expected ids of 0 to 999"),
        ("offsets.bin", 1, -1, r"offsets\.bin is damaged"),
        ("offsets.bin", 1, 2**63 - 1, r"offsets\.bin is damaged"),
        ("lengths.bin", 3, 10, r"offsets\.bin is damaged"),
        ("lengths.bin", 3, 41, r"lengths\.bin is damaged"),
        ("lengths.bin", 3, 0, r"lengths\.bin is damaged"),
        ("second_starts.bin", 0, 65_535, r"second_starts\.bin is damaged"),
        ("next_sentence_labels.bin", 0, 2, r"next_sentence_labels\.bin is damaged"),
        ("masked_offsets.bin", slice(1, 3), [2**63 - 1, -2], r"masked_offsets\.bin is damaged"),
        ("masked_positions.bin", 0, 65_535, "shard is damaged: masked positions"),
        ("masked_labels.bin", 0, 1000, "damaged: masked labels|damaged: expected ids"),
    ],
)
def test_forged_values_are_refused(tmp_path, name, place, value, message, verify):
    shard = tmp_path / "shard"
    about = {"vocab_size": 1000, "unmaskable_ids": (0, 2), "max_seq_length": 40}
    lengths = np.full(50, 9)
    masks = Masks(np.full(50, 2), np.tile([1, 3], 50), np.arange(100))
    with ShardWriter(shard, has_masks=True, **about) as writer:
        writer.append(np.arange(450), lengths, lengths // 2, lengths % 2, masks)
    ShardDataset(shard, verify).batch(np.arange(50))
    forge(shard, name, place, value)
    with pytest.raises(DamagedDataError, match=message):
        ShardDataset(shard, verify).batch(np.arange(50))
    if name in ("tokens.bin", "masked_labels.bin"):
        read = {"tokens.bin": lambda data: data[0], "masked_labels.bin": ShardDataset.target_counts}
        with pytest.raises(DamagedDataError, match=message):
            read[name](ShardDataset(shard, verify))
