"""Parquet files with lists of token ids: converted once, then read at random."""

from __future__ import annotations

import numpy as np
import pytest

from bert_unpad.data import DamagedDataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from bert_unpad.data.readers import parquet
from bert_unpad.data.store.cache import note_damage
from tests.support.seeds import derived
from tests.support.token_files import examples_of, random_sequences, setting

SEQUENCES = random_sequences(70)


def write(path, rows, kind=None, column="input_ids", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.list_(pa.int32()) if kind is None else kind
    table = pa.table({column: pa.array(rows, kind), "step": np.arange(len(rows))})
    pq.write_table(table, path, **options)


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int32()),
        pa.list_(pa.uint16()),
        pa.list_(pa.int64()),
        pa.large_list(pa.int16()),
    ],
)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_files_of_pyarrow(tmp_path, kind, compression):
    data = tmp_path / "data"
    write(data / "a.parquet", SEQUENCES[:40], kind, row_group_size=7, compression=compression)
    write(data / "sub" / "b.parquet", SEQUENCES[40:], kind, compression=compression)
    dataset = parquet.open_split(data, setting(tmp_path))
    order = np.random.default_rng(derived(0)).permutation(70).tolist()
    assert examples_of(dataset, order) == [SEQUENCES[i] for i in order]


def test_rows_of_one_length_and_another_column(tmp_path):
    rows = [[2, 7, 8, 3], [2, 9, 10, 3]]
    write(tmp_path / "data" / "a.parquet", rows, pa.list_(pa.int32(), 4), "tokens")
    dataset = parquet.open_split(tmp_path / "data", setting(tmp_path, column="tokens"))
    assert examples_of(dataset, [1, 0]) == rows[::-1]


def test_a_large_vocabulary_and_empty_rows(tmp_path):
    rows = [[2, 70_000, 3], [], [2, 65_536, 3]]
    write(tmp_path / "data" / "a.parquet", rows)
    dataset = parquet.open_split(tmp_path / "data", setting(tmp_path, vocab_size=70_001))
    assert examples_of(dataset, [0, 1]) == [rows[0], rows[2]]


def test_a_copy_that_was_altered_is_made_again(tmp_path):
    write(tmp_path / "data" / "a.parquet", SEQUENCES)
    dataset = parquet.open_split(tmp_path / "data", setting(tmp_path))
    (copy,) = tmp_path.glob("parquet-1/*/ids.bin")
    copy.write_bytes(b"\xff" * copy.stat().st_size)
    for _ in range(2):  # it stays so until its folder is marked
        told = rf"a\.parquet \(its copy {copy}\): expected ids of 0 to 99 \(the vocabulary\), got 6"
        with pytest.raises(DamagedDataError, match=told) as failed:
            dataset.batch(np.arange(5))
        dataset = parquet.open_split(tmp_path / "data", setting(tmp_path))
    assert not note_damage(tmp_path / "another", failed.value)
    assert note_damage(tmp_path, failed.value)
    dataset = parquet.open_split(tmp_path / "data", setting(tmp_path))
    assert examples_of(dataset, range(70)) == SEQUENCES


def test_files_are_converted_once_until_they_change(tmp_path, monkeypatch):
    data = tmp_path / "data"
    write(data / "a.parquet", SEQUENCES[:40])
    write(data / "b.parquet", SEQUENCES[40:])
    parquet.open_split(data, setting(tmp_path))
    converted = []
    convert = parquet._convert
    monkeypatch.setattr(
        parquet, "_convert", lambda *args: converted.append(args[0]) or convert(*args)
    )
    dataset = parquet.open_split(data, setting(tmp_path))
    assert converted == []
    write(data / "b.parquet", SEQUENCES[:3])
    dataset = parquet.open_split(data, setting(tmp_path))
    assert converted == [data / "b.parquet"]
    assert examples_of(dataset, [42, 0]) == [SEQUENCES[2], SEQUENCES[0]]


@pytest.mark.parametrize("name", ["ids.bin", "begins.npy", "lengths.npy"])
def test_a_damaged_conversion_is_made_again(tmp_path, name, caplog):
    write(tmp_path / "data" / "a.parquet", SEQUENCES)
    parquet.open_split(tmp_path / "data", setting(tmp_path))
    (folder,) = (tmp_path / "parquet-1").iterdir()
    for damage in (lambda data: data[:-2], lambda data: b""):
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        dataset = parquet.open_split(tmp_path / "data", setting(tmp_path))
        assert examples_of(dataset, [69]) == [SEQUENCES[69]]
        assert f"making {folder} again, which is damaged" in caplog.text
        caplog.clear()


def test_begins_outside_of_the_ids_are_made_again(tmp_path):
    write(tmp_path / "data" / "a.parquet", SEQUENCES)
    parquet.open_split(tmp_path / "data", setting(tmp_path))
    (folder,) = (tmp_path / "parquet-1").iterdir()
    begins = np.load(folder / "begins.npy")
    begins[5] = 2**62
    np.save(folder / "begins.npy", begins)
    dataset = parquet.open_split(tmp_path / "data", setting(tmp_path))
    assert examples_of(dataset, [5]) == [SEQUENCES[5]]


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def garble(path):
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("rows", "kind", "damage", "message"),
    [
        (SEQUENCES, None, cut, "expected a complete Parquet file"),
        (SEQUENCES, None, garble, "expected a complete Parquet file"),
        (SEQUENCES, None, lambda path: path.write_bytes(b""), "expected a complete Parquet file"),
        ([[2, 100]], None, None, r"input_ids: expected ids of 0 to 99 .*, got 2 to 100"),
        ([[2, -1]], None, None, r"input_ids: expected ids of 0 to 99 .*, got -1 to 2"),
        ([[2, 2**63]], pa.list_(pa.uint64()), None, "expected ids of 0 to 99"),
        ([[2, None]], None, None, "input_ids: expected ids, got null"),
        ([[2, 3], None], None, None, "input_ids: expected ids, got null"),
        ([[2.0, 3.0]], pa.list_(pa.float32()), None, r"lists of integers .*, got list<.*float>"),
        (["text"], pa.string(), None, r"lists of integers .* there are none\), got string"),
    ],
)
def test_wrong_files_are_named(tmp_path, rows, kind, damage, message):
    path = tmp_path / "data" / "a.parquet"
    write(path, rows, kind)
    if damage is not None:
        damage(path)
    with pytest.raises(DamagedDataError, match=rf"a\.parquet: .*{message}|a\.parquet: {message}"):
        parquet.open_split(tmp_path / "data", setting(tmp_path))
    assert not list((tmp_path / "parquet-1").glob("*"))


def test_a_missing_column_lists_what_is_there(tmp_path):
    write(tmp_path / "data" / "a.parquet", SEQUENCES, column="ids")
    with pytest.raises(DamagedDataError, match=r"there are ids\), got no such column"):
        parquet.open_split(tmp_path / "data", setting(tmp_path))
