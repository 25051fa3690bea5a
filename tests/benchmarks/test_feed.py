"""The benchmark of the collator, at a small size: its files, its report and its table."""

import numpy as np
import pytest

from benchmarks import feed
from benchmarks.lib import data_tables, harness

pytest.importorskip("h5py")
from benchmarks.lib.feed_files import write_all


def test_all_formats_hold_the_same_examples(tmp_path):
    opened = write_all(tmp_path, 20, 37)
    indices = np.random.default_rng().permutation(37)[:9]
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
    report = {"command": "x", "date": "y", "machine": harness.machine(), "batch_tokens": 200}
    monkeypatch.setattr(data_tables, "read", lambda name: report | {"results": rows})
    text = data_tables.feed()
    assert text.count("| 16 |") == 6
    assert "% (shards)" in text
