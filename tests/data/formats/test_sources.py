"""Corpora: what each source yields, what its fingerprint follows, what it says on failure."""

import hashlib
import json
import sys
import types

import pytest

from bert_unpad.data.formats.hugging_face import HuggingFaceSource
from bert_unpad.data.formats.sources import open_files, open_source
from bert_unpad.data.formats.stdlib import StdlibSource
from bert_unpad.data.text.sentences import split_sentences


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "lib"
    (root / "pydoc_data").mkdir(parents=True)
    (root / "test").mkdir()
    (root / "shapes.py").write_text(
        '"""Shapes in the plane."""\n\n'
        'class Circle:\n    """A round one."""\n\n    def area(self):\n        """Its area."""\n'
        "def untold(): pass\nraise SystemExit('importing this would end the process')\n"
    )
    (root / "pydoc_data" / "topics.py").write_text(
        "topics = {'if': 'The \"if\" statement', 'for': 'The loop'}"
    )
    (root / "test" / "test_shapes.py").write_text('"""A test."""')
    (root / "broken.py").write_text("def (")
    return root


def test_stdlib_yields_docstrings_and_topics_without_importing(library, tmp_path):
    source = StdlibSource(tmp_path / "cache", library)
    expected = ['The "if" statement', "The loop", "Shapes in the plane.", "A round one."]
    assert list(source.documents()) == [*expected, "Its area."]


def test_stdlib_documents_are_cached_until_a_file_changes(library, tmp_path, monkeypatch):
    first = StdlibSource(tmp_path / "cache", library)
    documents = list(first.documents())
    with monkeypatch.context() as patch:
        patch.setattr("ast.parse", lambda *_, **__: pytest.fail("parsed although cached"))
        assert list(StdlibSource(tmp_path / "cache", library).documents()) == documents

    (library / "shapes.py").write_text('"""Other shapes."""')
    changed = StdlibSource(tmp_path / "cache", library)
    assert changed.fingerprint() != first.fingerprint()
    assert "Other shapes." in list(changed.documents())


def test_damaged_stdlib_cache_is_collected_again(library, tmp_path, caplog):
    source = StdlibSource(tmp_path / "cache", library)
    documents = list(source.documents())
    (cached,) = (tmp_path / "cache").iterdir()
    digest = hashlib.sha256(json.dumps({"a": 1}).encode()).hexdigest()
    for damaged in (
        cached.read_text().replace("round", "square"),
        "[" * 100_000,
        "[]",
        json.dumps({"documents": {"a": 1}, "sha256": digest}),
    ):
        cached.write_text(damaged)
        caplog.clear()
        assert list(StdlibSource(tmp_path / "cache", library).documents()) == documents
        assert str(cached) in caplog.text


def test_stdlib_without_sources_names_the_folder(tmp_path):
    (tmp_path / "lib").mkdir()
    with pytest.raises(ValueError, match=r"source='stdlib'.*lib"):
        list(StdlibSource(tmp_path / "cache", tmp_path / "lib").documents())


def test_text_documents_end_at_blank_lines_or_files(tmp_path):
    (tmp_path / "b.txt").write_text("One.\nTwo.\n\n \nThree.", "utf-8-sig")
    (tmp_path / "a.md").write_text("Zero.\n\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "wiki_00").write_text("Four.\n")
    (tmp_path / ".hidden.txt").write_text("No.")
    (tmp_path / "picture.png").write_bytes(b"\xff\x00")
    split = open_files(tmp_path)
    assert list(split.documents()) == ["Zero.\n", "One.\nTwo.\n", "Three.", "Four.\n"]
    whole = open_files(tmp_path, file_per_document=True)
    assert list(whole.documents()) == ["Zero.\n\n", "One.\nTwo.\n\n \nThree.", "Four.\n"]
    assert whole.fingerprint() != split.fingerprint()
    named = open_source(f"{tmp_path}?file_per_document=true", cache_dir=tmp_path)
    assert named.fingerprint() == whole.fingerprint()
    assert list(named.documents()) == list(whole.documents())
    named = open_source(f"{tmp_path}?file_per_document=false", cache_dir=tmp_path)
    assert named.fingerprint() == split.fingerprint()

    before = split.fingerprint()
    assert open_files(tmp_path).fingerprint() == before
    (tmp_path / "a.md").write_text("Zer0.\n\n")
    assert open_files(tmp_path).fingerprint() != before


def test_a_name_with_a_question_mark_is_a_path(tmp_path):
    (tmp_path / "why?.txt").write_text("Because.\n")
    source = open_source(str(tmp_path / "why?.txt"), cache_dir=tmp_path)
    assert list(source.documents()) == ["Because.\n"]


@pytest.mark.parametrize("options", ["file_per_document=yes", "file=true", "x"])
def test_options_of_a_path_are_checked(options, tmp_path):
    with pytest.raises(ValueError, match=r"source: expected PATH or PATH\?file_per_document=true"):
        open_source(f"{tmp_path}?{options}", cache_dir=tmp_path)


def test_text_errors_name_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"source: .*nowhere does not exist; expected"):
        open_source(str(tmp_path / "nowhere"), cache_dir=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"source: no text file below .*empty"):
        open_source(str(tmp_path / "empty"), cache_dir=tmp_path)
    with pytest.raises(ValueError, match="source: expected"):
        open_source("", cache_dir=tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        list(open_files(tmp_path / "latin.txt").documents())


class FakeDataset:
    """The part of a `datasets` data set that the source relies on."""

    def __init__(self, rows, streaming):
        self.rows = rows
        self.column_names = None if streaming else ["title", "text"]
        self._fingerprint = f"fingerprint of {len(rows)} rows"
        self.info = types.SimpleNamespace(version="1.0.0")

    def iter(self, batch_size):
        for begin in range(0, len(self.rows), batch_size):
            rows = self.rows[begin : begin + batch_size]
            yield {"title": [f"title {row}" for row in rows], "text": rows}


@pytest.fixture
def calls(monkeypatch):
    """Install a fake `datasets`; return the calls of its load_dataset."""
    calls = []

    def load_dataset(path, name, *, split, revision, data_files, streaming):
        calls.append((path, name, split, revision, data_files, streaming))
        rows = [f"Row {i}." if i != 1 else None for i in range(2500)]
        return FakeDataset(rows, streaming)

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_hf_options_reach_datasets(calls):
    text = "hf:org/name?config=raw&split=dev&revision=abc&data_files=x.parquet&streaming=true"
    source = open_source(text, cache_dir=None)
    documents = list(source.documents())
    assert calls == [("org/name", "raw", "dev", "abc", "x.parquet", True)]
    assert documents[:2] == ["Row 0.", "Row 2."]  # a row without text is no document
    assert len(documents) == 2499


def test_hf_limit_and_column(calls):
    source = HuggingFaceSource("name?limit=1200&column=title")
    documents = list(source.documents())
    assert len(documents) == 1200
    assert documents[-1] == "title Row 1199."
    assert calls == [("name", None, "train", None, None, False)]


def test_hf_fingerprint_follows_content_and_options(calls):
    first = HuggingFaceSource("name").fingerprint()
    assert HuggingFaceSource("name").fingerprint() == first
    assert HuggingFaceSource("name?limit=5").fingerprint() != first
    other = HuggingFaceSource("name")
    other.load()._fingerprint = "changed"
    assert other.fingerprint() != first


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_hf_unknown_column_lists_the_columns(calls, streaming):
    source = HuggingFaceSource(f"name?column=body&streaming={streaming}")
    with pytest.raises(ValueError, match="no column 'body'; expected one of title, text"):
        list(source.documents())


@pytest.mark.parametrize("query", ["colunm=x", "streaming=maybe", "limit=0", "limit=-3"])
def test_hf_bad_options_are_named(query):
    with pytest.raises(ValueError, match=query.partition("=")[0]):
        HuggingFaceSource(f"name?{query}")


def test_hf_without_datasets_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'bert_unpad\[datasets\]'"):
        list(HuggingFaceSource("name").documents())


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One here. Two there! Three?", ["One here.", "Two there!", "Three?"]),
        ("Wrapped\nline. Next\n\nTitle\n \nEnd", ["Wrapped line.", "Next", "Title", "End"]),
        ('He said "Stop." Then left.', ['He said "Stop."', "Then left."]),
        (
            "See Dr. Who, e.g. Tom. Fig. 3 by J. Doe.",
            ["See Dr. Who, e.g. Tom.", "Fig. 3 by J. Doe."],
        ),
        ("So do I. Yes.", ["So do I.", "Yes."]),
        ("Version 3.11 is out. 2 more.", ["Version 3.11 is out.", "2 more."]),
        ("not a start. lower case", ["not a start. lower case"]),
        ("一。二！", ["一。", "二！"]),  # noqa: RUF001
        (" \n\n ", []),
    ],
)
def test_split_sentences(text, sentences):
    assert split_sentences(text) == sentences
