"""Several sources that are read in order, whose blocks get numbers when all have been read."""

import random
from pathlib import Path

import pytest

from bert_unpad.data.formats.sources import open_source
from bert_unpad.data.preparation.ordered_sources import OrderedSources, divide, spool_source
from bert_unpad.data.preparation.spool import SpooledBlock
from tests.support.prepared_text import contents, write_corpus
from tests.support.seeds import derived
from tests.support.sentences import split_sentences

FIRST = 4000


class Listed:
    """A source of given documents."""

    name = "listed"

    def __init__(self, texts):
        self.texts = texts

    def documents(self):
        return iter(self.texts)


class Interrupted(Exception):
    pass


def test_blocks_of_all_sources_in_order(tmp_path, monkeypatch):
    texts = write_corpus(tmp_path / "text", random.Random(derived(0)))
    parts = [texts[:150], [], texts[150:]]
    sources, spool = OrderedSources(tmp_path), tmp_path / "spool"
    spool.mkdir()
    assert sources.missing() is None
    sources.begin(3)
    for number in (2, 0, 1):
        assert number in sources.missing()
        done = spool_source(sources.of(number), Listed(parts[number]), FIRST)
        assert done["documents"] == len(parts[number])
        again = spool_source(sources.of(number), Listed(["Another."]), FIRST)
        assert again["documents"] == 0
    assert sources.missing() == []
    blocks = sum(len(list(sources.of(number).glob("*.npy"))) for number in range(3))

    rename, calls = Path.rename, [0]

    def stop(source, target):
        calls[0] += 1
        if calls[0] % 5 == 0:
            raise Interrupted
        return rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stop)
        for _ in range(3):
            with pytest.raises(Interrupted):
                sources.number_blocks(spool)
    assert sources.number_blocks(spool) == blocks
    assert sources.number_blocks(spool) == blocks
    assert len(contents(spool)) == 3 * blocks
    found = []
    for number in range(blocks):
        block = SpooledBlock(spool, number)
        found += block.read(block.records["sentences"] > 0)
    assert found == [split_sentences(text) for text in texts]


def test_another_number_of_sources_is_refused(tmp_path):
    sources = OrderedSources(tmp_path)
    sources.begin(8)
    sources.begin(8)
    with pytest.raises(ValueError, match="tasks: expected 8, as this preparation was begun, got 4"):
        sources.begin(4)


def test_files_are_divided_into_runs_of_some_size(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    sizes = [10, 20, 200, 5, 5, 300, 1, 99, 1]
    for number, size in enumerate(sizes):
        (folder / f"{number}.jsonl").write_text(f'{{"text": "{number}"}}'.ljust(size))
    sizes = [path.stat().st_size for path in sorted(folder.iterdir())]
    source = open_source(f"{folder}?column=text", cache_dir=tmp_path)
    for first in (1, 100, 1000):
        parts = divide(source, first)
        assert [file for part in parts for file in part.files] == source.files
        assert {(part.name, part.column) for part in parts} == {(source.name, "text")}
        of_parts = [[path.stat().st_size for path, _ in part.files] for part in parts]
        assert all(sum(some) >= first > sum(some[:-1]) for some in of_parts[:-1])
        documents = [text for part in parts for text in part.documents()]
        assert documents == list(source.documents())
    assert len(divide(source, 1)) == len(sizes)
    assert divide(Listed([]), 1)[0].texts == []
