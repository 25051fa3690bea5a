"""The benchmark of `prepare`, at a small size: what it gathers, runs and reports."""

import contextlib
import io
import json
import sys

import pytest

from benchmarks import prepare
from benchmarks.lib import data_tables, harness, machine_text
from bert_unpad.data.preparation.engines import InProcess


def notes():
    return (f"Note {n}. It has two sentences.\n\nAnd more." for n in range(500))


def output_here(code, *arguments, environment=None):
    """Runs the code of another process in this one."""
    said, before = io.StringIO(), sys.argv
    sys.argv = ["-c", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(said):
            exec(code, {})
    finally:
        sys.argv = before
    return said.getvalue().splitlines()[-1]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(machine_text, "KINDS", {"notes": notes, "none": lambda: iter(["", " \n"])})
    monkeypatch.setattr(prepare, "_VOCABULARY", 100)
    monkeypatch.setattr(prepare, "Processes", lambda workers: InProcess())
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def test_a_small_run_gives_a_whole_report(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "_output", output_here)
    found = json.loads(json.dumps(prepare.measure(tmp_path, 5000, [1, 2], ray=0)))
    assert found["text_bytes"]["none"] == 0
    assert 2000 < found["text_bytes"]["notes"] < 2700
    assert [run["workers"] for run in found["runs"]] == [1, 2]
    for run in found["runs"]:
        assert min(run["library_seconds"], run["seconds"], run["worker_bytes"]) > 0
        assert run["statistics"]["documents"] > 40
        assert run["stages"].keys() == {"read", "duplicates", "vocabulary", "tokenize", "examples"}
    half, large = found["memory"]
    assert half["text_bytes"] == pytest.approx(found["text_bytes"]["notes"] / 2, rel=0.1)
    assert large["block_bytes"] == 128 * 2**20
    assert large["statistics"] == found["runs"][0]["statistics"]
    assert "all but tokenize" in capsys.readouterr().out
    report = {"command": "x", "date": "y", "machine": harness.machine()} | found
    monkeypatch.setattr(data_tables, "read", lambda name: report)
    text = data_tables.preparing()
    for words in ("notes 0 MB", "| processes | 2 |", "| 1 TB |", "| 128 MiB |"):
        assert words in text


def test_runs_with_different_results_end_it(small, tmp_path, monkeypatch):
    outputs = iter(range(10))
    monkeypatch.setattr(prepare, "library_seconds", lambda *_: 1.0)
    monkeypatch.setattr(
        prepare,
        "prepare_apart",
        lambda *_, **__: {
            **{"engine": "processes", "workers": 1, "seconds": 1.0, "worker_bytes": 1},
            **{"stages": dict.fromkeys(("read", "duplicates", "examples"), 1.0)},
            "checksum": next(outputs),
        },
    )
    with pytest.raises(SystemExit, match="the runs have given different bytes"):
        prepare.measure(tmp_path, 5000, [1, 2], ray=0)


def test_a_run_in_a_process_of_its_own(small, tmp_path):
    machine_text.gather(tmp_path / "text", 5000)
    vocabulary, _ = prepare.train_vocabulary(tmp_path / "text", tmp_path / "vocabulary")
    run = prepare.prepare_apart(tmp_path / "text", tmp_path / "out", vocabulary, 1)
    assert 0 < run["start_seconds"] < run["seconds"]
    assert run["worker_bytes"] == pytest.approx(run["main_bytes"], rel=0.5)
    assert not (tmp_path / "out").exists()


def test_text_of_comments_pages_and_strings(tmp_path, monkeypatch):
    files = {
        "a.h": "/* One.\n * Two. */\nint x;  // no\n  /// Three.\n//! Four.\nint y;\n",
        "b.py": '"""A module."""\nVALUE = """\nno\n"""\ndef f():\n    r"""It does."""\n',
        "man1/c.1": ".TH C 1\n.SH NAME\n.B bold\nis \\fIthe\\fR word\\&, with \\-\\-help.\n",
        "d.html": "<html><style>no</style><p>A <b>bold</b> page.</p>",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    for name in ("_INCLUDE", "_DOC", "_WHEELS", "_MAN"):
        monkeypatch.setattr(machine_text, name, tmp_path)
    monkeypatch.setattr(machine_text.sysconfig, "get_path", lambda name: str(tmp_path / "none"))

    def words(kind):
        return " ".join(next(iter(filter(str.strip, machine_text.KINDS[kind]())))).split()

    assert "".join(words("comments in headers")) == "One.Two.Three.Four."
    assert "".join(words("docstrings")) == "Amodule.Itdoes."
    assert "".join(words("documentation")) == "Aboldpage."
    with monkeypatch.context() as patch:
        patch.setattr(machine_text, "_files", lambda root, pattern: iter([tmp_path / "man1/c.1"]))
        assert "".join(words("manual pages")) == "boldistheword,with--help."
