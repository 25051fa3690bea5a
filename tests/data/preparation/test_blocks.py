"""Blocks: every document is in exactly one, wherever the cuts are."""

import gzip
import itertools
import json
import os
import random

import pytest

from bert_unpad.data.formats.hugging_face import HuggingFaceSource
from bert_unpad.data.formats.sources import open_files, open_source
from bert_unpad.data.formats.stdlib import StdlibSource
from bert_unpad.data.preparation import blocks
from bert_unpad.data.preparation.blocks import block_bytes, cut, documents_in_blocks, identity
from tests.support.prepared_text import write_corpus
from tests.support.seeds import derived
from tests.support.sentences import split_sentences


def documents_of(parts):
    found = []
    for part in parts:
        ends = part.ends.tolist()
        lines = [part.text[a:b].decode() for a, b in itertools.pairwise([0, *ends])]
        found += [line.split("\n")[:-1] for line in lines]
    return found


def read(source, first):
    return [documents_of(block.read()) for block in cut(source, first)]


def test_blocks_have_all_documents_once_in_order(tmp_path):
    rng = random.Random(derived(0))
    texts = write_corpus(tmp_path / "text", rng)
    expected = [split_sentences(text) for text in texts]
    for first in (100, 333, 3000, 1 << 20):
        found = read(open_files(tmp_path / "text"), first)
        assert [document for block in found for document in block] == expected
        in_order = documents_in_blocks(texts, first, 0)
        assert [d for parts in in_order for d in documents_of(parts)] == expected
        if first == 3000:
            assert len(found) > 20


def test_rows_of_a_data_set_are_those_that_are_read_in_order(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(blocks, "_ROWS", 7)
    rng = random.Random(derived(0))
    texts = [
        rng.choice(["", None, "One. Two.", "\u4e00 " * rng.randint(1, 50)]) for _ in range(300)
    ]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "rows.jsonl").write_text(rows)
    for options in ("", "&limit=123"):
        source = HuggingFaceSource(f"json?data_files={tmp_path}/rows.jsonl{options}")
        for first in (1, 500, 10**6):
            in_order = documents_in_blocks(source.documents(), first, 0)
            assert read(source, first) == [documents_of(parts) for parts in in_order]
    streaming = HuggingFaceSource(f"json?data_files={tmp_path}/rows.jsonl&streaming=true")
    assert cut(streaming, 500) is None


@pytest.mark.parametrize("last", ["", "\n", "\r\n", "\n \n\n"])
def test_lines_of_json_are_in_one_block_each(tmp_path, last):
    rng = random.Random(derived(0))
    folder = tmp_path / "lines"
    folder.mkdir()
    for number in range(4):
        texts = [f"N{n}. " + "Ä " * rng.choice([0, 1, 5, 300]) for n in range(rng.randint(0, 40))]
        rows = [json.dumps({"text": text}, ensure_ascii=rng.random() < 0.5) for text in texts]
        rows += rng.choice([[], ["", " "], [json.dumps({"text": None})]])
        rng.shuffle(rows)
        end = rng.choice(["\n", "\r\n", "\n\n"])
        (folder / f"{number}.jsonl").write_bytes((end.join(rows) + last).encode())
    (folder / "9.jsonl").write_bytes(b"")
    source = open_source(str(folder), cache_dir=tmp_path)
    expected = [split_sentences(text) for text in source.documents()]
    for first in (1, 2, 3, 7, 50, 333, 10**6):
        found = read(source, first)
        assert [document for block in found for document in block] == expected
    (tmp_path / "other.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    assert cut(open_source(str(tmp_path), cache_dir=tmp_path), 50) is None


def test_bad_lines_of_json_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    good = b'{"text": "One."}\n'
    for bad in (b'{"text": 5}\n', b"[]\n", b'{"text": "Tw', b"{}\n", b'{"text": "\xff"}\n'):
        path.write_bytes(3 * good + bad)
        with pytest.raises(
            ValueError, match=r"source: .*a\.jsonl: byte 51: expected a JSON object"
        ):
            read(open_source(str(path), cache_dir=tmp_path), 20)
    path.write_bytes(9 * good)
    *_, block = cut(open_source(str(path), cache_dir=tmp_path), 20)
    for size in (150, 100, 0):
        os.truncate(path, size)
        with pytest.raises(
            ValueError, match=r"(expected 153 bytes in .*a\.jsonl|byte \d+: expected)"
        ):
            list(block.read())


def test_line_ends_marks_and_odd_files(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffOne\r\ntwo.\r\n\r\nThree.".encode())
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"\n\n \n\t\n")
    (tmp_path / "d.txt").write_bytes(b"Four.\r\rFive.")
    expected = [["One two."], ["Three."], ["Four."], ["Five."]]
    for first in (1, 5, 1000):
        found = read(open_files(tmp_path), first)
        assert [document for block in found for document in block] == expected
    whole = [d for block in read(open_files(tmp_path, True), 5) for d in block]
    assert whole == [["One two.", "Three."], ["Four.", "Five."]]


def test_a_document_without_end_is_cut_at_lines_words_or_letters(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "_WINDOW", 64)
    path = tmp_path / "long.txt"
    for text in ("word " * 500, "a line of text\n" * 200, "\u4e00\u4e8c" * 500):
        path.write_text(text)
        for first in (100, 333):
            found = [d for block in read(open_files(path), first) for d in block]
            words = " ".join(s for d in found for s in d)
            assert words.replace(" ", "") == "".join(text.split())
            assert len(found) > 5
            if " " in text:
                assert words.split() == text.split()


def test_large_files_are_cut_even_if_they_are_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "LONGEST_FILE", 1000)
    (tmp_path / "a.txt").write_text("A line here.\n" * 300)
    (tmp_path / "b.txt").write_text("Short one.")
    found = [d for block in read(open_files(tmp_path, True), 10**6) for d in block]
    assert sum(len(document) for document in found) == 301
    assert len(found) == 5


def test_blocks_grow():
    sizes = [block_bytes(number, 8) for number in (0, 511, 512, 1024, 10**6)]
    assert sizes == [8, 8, 16, 32, 128]


def test_identity_follows_files(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "One."}\n')
    (before,) = {identity(open_source(str(path), cache_dir=tmp_path)) for _ in range(2)}
    for options in ("column=title", "format=text", "file_per_document=true"):
        source = open_source(f"{path}?{options}", cache_dir=tmp_path)
        assert identity(source) not in (before, None)
    assert identity(StdlibSource(tmp_path)) is None
    assert cut(StdlibSource(tmp_path), 8) is None
    path.write_text('{"text": "Three."}\n')
    assert identity(open_source(str(path), cache_dir=tmp_path)) not in (before, None)


def test_bad_files_are_named(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"Good.\n\n\xff\xfe")
    with pytest.raises(ValueError, match=r"source: .*bad\.txt is not UTF-8 text, after byte 0: "):
        read(open_files(path), 1000)
    source = open_files(path)
    (block,) = cut(source, 1000)
    path.write_text("Short")
    with pytest.raises(ValueError, match=r"source: expected 9 bytes in .*bad\.txt, which has chan"):
        list(block.read())
