"""The Hugging Face source with the real `datasets` on local files: streamed or not, and resumed."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from bert_unpad.data.text import corpus
from bert_unpad.data.text.corpus import Spool
from bert_unpad.data.text.sources import HuggingFaceSource

datasets = pytest.importorskip("datasets")

ROWS = 3300


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    texts = [None if i % 50 == 7 else f"Row {i % 3000}. And w{i % 3} more." for i in range(ROWS)]
    lines = (json.dumps({"n": i, "text": text}) for i, text in enumerate(texts))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "rows.jsonl"


@pytest.fixture(autouse=True)
def own_cache(path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", path.parent / "cache")


def source(path, options="streaming=true"):
    return HuggingFaceSource(f"json?data_files={path}&{options}")


def test_streamed_or_not_the_documents_are_the_same(path):
    streamed = list(source(path).documents())
    assert len(streamed) == ROWS - ROWS // 50
    assert streamed[:2] == ["Row 0. And w0 more.", "Row 1. And w1 more."]
    whole = source(path, "streaming=false")
    assert list(whole.documents()) == streamed
    assert whole.position is None
    assert whole.fingerprint() != source(path).fingerprint()
    with pytest.raises(ValueError, match="no column 'body'; expected one of n, text"):
        list(source(path, "streaming=true&column=body").documents())


def test_a_stream_goes_on_from_a_position(path):
    every = list(source(path, "streaming=true&limit=3100").documents())
    first = source(path, "streaming=true&limit=3100")
    taken = list(itertools.islice(first.documents(), 1500))
    assert taken == every[:1500]
    position = json.loads(json.dumps(first.position))  # after the first 1000 rows
    rest = list(source(path, "streaming=true&limit=3100").documents(position))
    assert rest == every[980:]


class Interrupted(HuggingFaceSource):
    """Ends with an error after some documents; counts them."""

    def __init__(self, specification, last):
        super().__init__(specification)
        self.left = last
        self.read = 0

    def documents(self, position=None):
        for text in super().documents(position):
            if not self.left:
                raise ConnectionError("the stream has ended early")
            self.left -= 1
            self.read += 1
            yield text


def test_reading_a_stream_is_resumed(path, tmp_path, monkeypatch):
    specification = f"json?data_files={path}&streaming=true"
    expected = Spool(tmp_path / "whole.txt", HuggingFaceSource(specification))
    monkeypatch.setattr(corpus, "_SAVE_EVERY", 500)
    for last in (100, 2600, 700):
        with pytest.raises(ConnectionError):
            Spool(tmp_path / "parts.txt", Interrupted(specification, last))
    final = Interrupted(specification, ROWS)
    found = Spool(tmp_path / "parts.txt", final)
    assert final.read < ROWS // 2
    assert (tmp_path / "parts.txt").read_bytes() == (tmp_path / "whole.txt").read_bytes()
    assert (found.documents, found.duplicates) == (expected.documents, expected.duplicates)
    assert found.duplicates > 0
    np.testing.assert_array_equal(found.hashes, expected.hashes)
    np.testing.assert_array_equal(found.sentences, expected.sentences)
