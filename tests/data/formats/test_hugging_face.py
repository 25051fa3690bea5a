"""The Hugging Face source with the real `datasets` on local files: streamed or not, and resumed."""

import itertools
import json

import pytest

from bert_unpad.data.formats.hugging_face import HuggingFaceSource
from bert_unpad.data.preparation.spool import spool_in_order

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


def spool(folder, source):
    """Spools a data set; returns its files, and how many blocks this call has written."""
    written = []
    folder.mkdir(exist_ok=True)
    blocks = spool_in_order(folder, source, 5_000, written.append)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    del files["position.json"]
    assert len(files) == 3 * blocks
    return files, len(written)


def test_reading_a_stream_is_resumed(path, tmp_path):
    specification = f"json?data_files={path}&streaming=true"
    expected, blocks = spool(tmp_path / "whole", HuggingFaceSource(specification))
    assert blocks > 3
    for last in (100, 2600, 700):
        with pytest.raises(ConnectionError):
            spool(tmp_path / "parts", Interrupted(specification, last))
    final = Interrupted(specification, ROWS)
    found, written = spool(tmp_path / "parts", final)
    assert final.read < ROWS // 2
    assert written < blocks
    assert found == expected


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, '{"blocks": "1"}', '{"blocks": -1, "documents": 0}']
)
def test_a_damaged_position_is_left_out(path, tmp_path, text, caplog):
    expected, _ = spool(tmp_path / "spool", source(path))
    (tmp_path / "spool" / "position.json").write_text(text)
    assert spool(tmp_path / "spool", source(path))[0] == expected
    assert "position.json is damaged" in caplog.text
