"""Benchmarks of the collator, of opening data and of imports, at a small size, with tables."""

import pytest

from benchmarks import feed, import_formats
from benchmarks.lib import data_tables, harness, sparse_shards
from bert_unpad.data import DamagedDataError, DataConfig, prepare


def test_a_small_run_gives_a_whole_report(monkeypatch, capsys):
    monkeypatch.setattr(feed, "SPIN_SECONDS", 0.01)
    rows = feed.measure(length=16, tokens=1000, batch_tokens=200, rounds=2)
    assert [row["masks"] for row in rows] == ["token", "word", "span"]
    assert all(row["sequences_per_second"] > 0 and len(row["rounds"]) == 2 for row in rows)
    assert "others keep" in capsys.readouterr().out
    monkeypatch.setattr(sparse_shards, "FILE_TOKENS", 1280)
    opened = feed.measure_opening(2e-5, 2)
    assert "2e-05 GB, first rank, cold:" in capsys.readouterr().out
    assert [len(values) for values in opened["seconds"].values()] == [2, 2, 2, 1]
    report = {"command": "x", "date": "y", "machine": harness.machine(), "batch_tokens": 200}
    report |= {"results": rows, "open": opened, "targets": feed.TARGETS}
    monkeypatch.setattr(data_tables, "read", lambda name: report)
    text = data_tables.feed()
    assert "are to reach 20,000 of 128 tokens and 6,000 of 512 tokens" in text
    assert "Opening 2e-05 GB" in text
    assert text.count("| 16 |") == 3
    assert "% of its speed" in text


def test_imports_of_all_formats_are_timed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("h5py")
    pytest.importorskip("pyarrow")
    rows = import_formats.measure(tmp_path, 30_000, 2)
    assert all(len(row["rounds"]) == 2 and row["tokens"] > 1000 for row in rows)
    assert capsys.readouterr().out.count("MB/s a core") == len(rows) == 6
    report = {"command": "x", "date": "y", "machine": harness.machine(), "results": rows}
    monkeypatch.setattr(data_tables, "read", lambda name: report)
    text = data_tables.importing()
    assert "median and range of 2 rounds" in text
    assert "| HDF5, variable length | " in text


def test_the_first_rank_looks_at_all_files(monkeypatch, tmp_path):
    monkeypatch.setattr(sparse_shards, "FILE_TOKENS", 1280)
    sparse_shards.write_sparse(tmp_path, 20_000)
    (tmp_path / "train" / "tokens-000003.bin").write_bytes(b"")
    config = DataConfig(f"shards:{tmp_path}")
    with pytest.raises(DamagedDataError, match=r"tokens-000003\.bin has 0 bytes; expected"):
        prepare(config, progress=False)
    assert len(prepare(config, progress=False, check=False).train) == 78
