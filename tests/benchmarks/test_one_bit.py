"""The benchmark of compression to signs, on few values."""

import json

import pytest

from benchmarks.lib import sign_rates


def test_a_whole_report(capsys) -> None:
    report = sign_rates.run("cpu", 1001, ranks=3, rounds=2, warmup=1)
    assert json.loads(json.dumps(report)) == report
    rows = {row["operator"]: row for row in report["results"]}
    assert rows["copy"]["copy_share"] == pytest.approx(1)
    assert [row["bytes"] for row in rows.values()] == [
        8008,
        8008,
        12 * 1001 + 126,
        8 * 8 * 42 + 126,
        4 * 1001 + 126,
    ]
    for row in rows.values():
        assert len(row["rounds"]) == 2
        rate = row["bytes"] / row["seconds"]
        assert row["gb_per_s"] == pytest.approx(rate / 1e9)
        assert row["copy_share"] == pytest.approx(rate / report["copy_bytes_per_second"])
    assert "of copy" in capsys.readouterr().out
