"""Parquet files with lists of token ids."""

import numpy as np
import pytest

from bert_unpad.data import DamagedDataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from tests.support.token_files import random_sequences, read_sequences

SEQUENCES = random_sequences(70)


def open_all(path, **options):
    return read_sequences(path, "parquet", **options)


def write(path, rows, kind=None, column="input_ids", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.list_(pa.int32()) if kind is None else kind
    table = pa.table({column: pa.array(rows, kind), "step": np.arange(len(rows))})
    pq.write_table(table, path, **options)


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int32()), pa.list_(pa.uint16()), pa.list_(pa.int64()), pa.large_list(pa.int16())],
)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_files_of_pyarrow(tmp_path, kind, compression):
    data = tmp_path / "data"
    write(data / "a.parquet", SEQUENCES[:40], kind, row_group_size=7, compression=compression)
    write(data / "sub" / "b.parquet", SEQUENCES[40:], kind, compression=compression)
    assert open_all(data) == SEQUENCES


def test_rows_of_one_length_and_another_column(tmp_path):
    rows = [[2, 7, 8, 3], [2, 9, 10, 3]]
    write(tmp_path / "data" / "a.parquet", rows, pa.list_(pa.int32(), 4), "tokens")
    assert open_all(tmp_path / "data", column="tokens") == rows


def test_a_large_vocabulary_and_empty_rows(tmp_path):
    rows = [[2, 70_000, 3], [], [2, 65_536, 3]]
    write(tmp_path / "data" / "a.parquet", rows)
    assert open_all(tmp_path / "data", vocab_size=70_001) == [rows[0], rows[2]]


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
        ([[2, 100]], None, None, r"expected ids of 0 to 99 .*, got 100"),
        ([[2, -1]], None, None, r"expected ids of 0 to 99 .*, got -1"),
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
        open_all(tmp_path / "data")


def test_a_missing_column_lists_what_is_there(tmp_path):
    write(tmp_path / "data" / "a.parquet", SEQUENCES, column="ids")
    with pytest.raises(DamagedDataError, match=r"there are ids\), got no such column"):
        open_all(tmp_path / "data")
