"""The benchmark of the collator and of opening data, at a small size: files, report and table."""

import numpy as np
import pytest

from benchmarks import feed
from benchmarks.lib import data_tables, harness
from bert_unpad.data import DamagedDataError, DataConfig, prepare

pytest.importorskip("h5py")
from benchmarks.lib import sparse_shards
from benchmarks.lib.feed_files import write_all
from tests.support.seeds import derived


def test_all_formats_hold_the_same_examples(tmp_path):
    opened = write_all(tmp_path, 20, 37)
    indices = np.random.default_rng(derived(0)).permutation(37)[:9]
    expected = opened["shards"].batch(indices)
    assert len(opened) == 4
    for name, dataset in opened.items():
        found = dataset.batch(indices)
        np.testing.assert_array_equal(found.true_tokens(), expected.tokens)
        np.testing.assert_array_equal(found.second_starts, expected.second_starts)
        np.testing.assert_array_equal(found.next_sentence_labels, expected.next_sentence_labels)
        assert (found.masks is None) == (name == "shards")


def test_a_small_run_gives_a_whole_report(monkeypatch, capsys):
    monkeypatch.setattr(feed, "SPIN_SECONDS", 0.01)
    rows = feed.measure(length=16, tokens=1000, batch_tokens=200, rounds=2)
    masks = [(row["source"], row["masks"]) for row in rows]
    assert masks[:3] == [("shards", unit) for unit in ("token", "word", "span")]
    assert [unit for _, unit in masks[3:]] == ["given"] * 3
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
    assert text.count("| 16 |") == 6
    assert "% (shards)" in text


def test_the_first_rank_looks_at_all_files(monkeypatch, tmp_path):
    monkeypatch.setattr(sparse_shards, "FILE_TOKENS", 1280)
    sparse_shards.write_sparse(tmp_path, 20_000)
    (tmp_path / "train" / "tokens-000003.bin").write_bytes(b"")
    config = DataConfig(f"shards:{tmp_path}")
    with pytest.raises(DamagedDataError, match=r"tokens-000003\.bin has 0 bytes; expected"):
        prepare(config, progress=False)
    assert len(prepare(config, progress=False, check=False).train) == 78
