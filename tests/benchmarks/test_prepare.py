"""The benchmark of `prepare`, at a small size: what it gathers, runs and opens."""

import pytest

from benchmarks import prepare
from benchmarks.lib import machine_text
from bert_unpad.data import DamagedDataError


def test_a_small_run_gives_a_whole_report(tmp_path, monkeypatch, capsys):
    texts = {"notes": lambda: (f"Note {n}. It has two sentences.\n\nAnd more." for n in range(500))}
    monkeypatch.setattr(machine_text, "KINDS", texts | {"none": lambda: iter(["", " \n"])})
    monkeypatch.setattr(prepare, "_VOCABULARY", 100)
    found = prepare._measure(tmp_path, 5000, [1])
    assert found["text_bytes"]["none"] == 0
    assert 2000 < found["text_bytes"]["notes"] < 2700
    (run,) = found["runs"]
    assert run["workers"] == 1
    assert min(run["library_seconds"], run["seconds"], run["peak_bytes"]) > 0
    assert run["statistics"]["documents"] > 40
    assert run["stages"].keys() == {"read", "duplicates", "vocabulary", "tokenize", "examples"}
    assert "all but the tokenizer" in capsys.readouterr().out


def test_sparse_data_is_opened(monkeypatch):
    monkeypatch.setattr(prepare, "_FILE_TOKENS", 1280)
    found = prepare.time_opening(20_000)
    assert found.keys() == {"first rank", "other ranks"}


def test_the_first_rank_looks_at_all_files(monkeypatch, tmp_path):
    monkeypatch.setattr(prepare, "_FILE_TOKENS", 1280)
    prepare.sparse_data(tmp_path, 20_000)
    (tmp_path / "train" / "tokens-000003.bin").write_bytes(b"")
    config = prepare.DataConfig(f"shards:{tmp_path}")
    with pytest.raises(DamagedDataError, match=r"tokens-000003\.bin has 0 bytes; expected"):
        prepare.prepare(config, progress=False)
    assert len(prepare.prepare(config, progress=False, check=False).train) == 78
