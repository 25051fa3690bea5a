"""Documents in compressed text, JSON Lines and dumps of MediaWiki."""

import bz2
import gzip
import json
import lzma

import pytest

from bert_unpad.data import DamagedDataError
from bert_unpad.data.formats import jsonl
from bert_unpad.data.formats import text as plain_text
from bert_unpad.data.formats.sources import open_source
from bert_unpad.data.preparation import blocks

TEXT = "One.\nTwo ü.\n\n \nThree."
DOCUMENTS = ["One.\nTwo ü.\n", "Three."]
ROWS = [{"id": 1, "text": "Zero."}, {"text": "Häuser\nOne."}, {"text": None}, {"text": ""}]


def zstd_compress(data):
    try:
        from compression import zstd
    except ModuleNotFoundError:
        zstd = pytest.importorskip("backports.zstd")
    return zstd.compress(data)


PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd_compress,
    ".zstd": zstd_compress,
}


def lines(rows, **options):
    return "\n".join(json.dumps(row, **options) for row in rows)


def read(source, tmp_path):
    return list(open_source(str(source), cache_dir=tmp_path).documents())


@pytest.mark.parametrize("ending", PACK)
def test_compressed_files_read_as_their_content(tmp_path, ending):
    (tmp_path / f"a.txt{ending}").write_bytes(PACK[ending](b"\xef\xbb\xbf" + TEXT.encode()))
    assert read(tmp_path / f"a.txt{ending}", tmp_path) == DOCUMENTS
    whole = f"{tmp_path / f'a.txt{ending}'}?file_per_document=true"
    assert read(whole, tmp_path) == [TEXT]
    (tmp_path / f"b.jsonl{ending}").write_bytes(PACK[ending](lines(ROWS).encode()))
    assert read(tmp_path / f"b.jsonl{ending}", tmp_path) == ["Zero.", "Häuser\nOne."]


@pytest.mark.parametrize("ending", PACK)
def test_files_of_several_compressed_parts(tmp_path, ending):
    pieces = [TEXT[:7].encode(), TEXT[7:].encode()]
    (tmp_path / f"a.txt{ending}").write_bytes(b"".join(map(PACK[ending], pieces)))
    assert read(tmp_path / f"a.txt{ending}", tmp_path) == DOCUMENTS


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("damage", [lambda data: data[:-6], lambda data: b"x" * 99])
def test_damaged_compressed_files_are_named(tmp_path, ending, damage):
    data = PACK[ending](b" ".join(b"%d." % i for i in range(99_999)))
    (tmp_path / f"a.txt{ending}").write_bytes(damage(data))
    message = rf"a\.txt\{ending}: expected a complete \{ending} file"
    with pytest.raises(DamagedDataError, match=message):
        read(tmp_path / f"a.txt{ending}", tmp_path)


def test_a_folder_of_all_kinds_is_read_in_the_order_of_paths(tmp_path):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "b.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    (data / "a.ndjson").write_text(lines(ROWS[:1]) + "\n\n")
    (data / "c.json.gz").write_bytes(gzip.compress(lines([{"text": "C4."}]).encode()))
    (data / "config.json").write_text("{}")  # about the data
    (data / "sub" / "wiki_00").write_text("Four.")
    (data / ".hidden.jsonl").write_text("{")
    (data / "picture.png.gz").write_bytes(b"\xff")
    source = open_source(str(data), cache_dir=tmp_path)
    assert list(source.documents()) == ["Zero.", *DOCUMENTS, "C4.", "Four."]
    assert [path.name for path in source.paths] == ["a.ndjson", "b.txt.gz", "c.json.gz", "wiki_00"]
    assert read(f"{data}?format=text", tmp_path) == [*DOCUMENTS, "Four."]
    before = source.fingerprint()
    assert open_source(str(data), cache_dir=tmp_path).fingerprint() == before
    (data / "a.ndjson").write_text(lines(ROWS[1:2]))
    assert open_source(str(data), cache_dir=tmp_path).fingerprint() != before


def test_plain_text_stays_a_source_that_can_be_cut(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text(lines(ROWS))
    assert blocks.cut(open_source(str(tmp_path / "a.txt"), cache_dir=tmp_path), 9) is not None
    assert blocks.cut(open_source(f"{tmp_path}?format=text", cache_dir=tmp_path), 9) is not None
    assert blocks.cut(open_source(str(tmp_path), cache_dir=tmp_path), 9) is None


def test_columns_and_formats_are_options(tmp_path):
    (tmp_path / "rows.json").write_text(lines([{"body": "One."}, {"body": "Two."}]))
    path = tmp_path / "rows.json"
    first = open_source(f"{path}?column=body", cache_dir=tmp_path)
    assert list(first.documents()) == ["One.", "Two."]
    path.rename(tmp_path / "rows")
    named = open_source(f"{tmp_path / 'rows'}?column=body&format=jsonl", cache_dir=tmp_path)
    assert list(named.documents()) == ["One.", "Two."]
    other = open_source(f"{tmp_path / 'rows'}?column=text&format=jsonl", cache_dir=tmp_path)
    assert other.fingerprint() != named.fingerprint()
    with pytest.raises(ValueError, match=r"expected JSON Lines at .* with the option column"):
        open_source(f"{tmp_path / 'rows'}?column=body", cache_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="expected files of format mediawiki below"):
        open_source(f"{tmp_path}?format=mediawiki", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 5}', "got int"),
        ('{"body": "x"}', r"got KeyError\('text'\)"),
        ('["text"]', "got list"),
        ("null", "got NoneType"),
        ('"text"', "got str"),
        ('{"text": "x"', "got JSONDecodeError"),
        ("[" * 100_000, "got RecursionError"),
        (b'{"text": "caf\xe9"}', "got UnicodeDecodeError"),
    ],
)
def test_lines_without_text_are_named(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line)
    wanted = rf"a\.jsonl: line 3: expected a JSON object with text as its entry 'text' .*{message}"
    with pytest.raises(ValueError, match=wanted):
        read(tmp_path / "a.jsonl", tmp_path)


def test_text_without_blank_lines_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_text, "LONGEST_DOCUMENT", 100)
    monkeypatch.setattr(plain_text, "LONGEST_FILE", 1000)
    text = "".join(f"Line {i} of \u00fc text.\n" for i in range(300))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    for source, most in (("a.txt.gz", 100), ("a.txt.gz?file_per_document=true", 1000)):
        documents = read(tmp_path / source, tmp_path)
        assert "".join(documents) == text
        assert all(document.endswith("\n") for document in documents)
        assert all(most <= len(document) < most + 30 for document in documents[:-1])
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"x" * 950))
    assert [len(document) for document in read(tmp_path / "b.txt.gz", tmp_path)] == [100] * 9 + [50]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_lines_of_any_length_do_not_fill_the_memory(tmp_path, monkeypatch, ending):
    for module in (blocks, jsonl):
        monkeypatch.setattr(module, "LONGEST_FILE", 1000)
    path = tmp_path / f"a.jsonl{ending}"
    rows = lines([{"text": "Short."}, {"text": "long " * 1000}]).encode()
    path.write_bytes(gzip.compress(rows) if ending else rows)
    with pytest.raises(
        ValueError, match=r"a\.jsonl.*: line 2: expected .* got 1,000 bytes or more"
    ):
        read(path, tmp_path)
    if not ending:
        (block,) = blocks.cut(open_source(str(path), cache_dir=tmp_path), 1 << 20)
        with pytest.raises(ValueError, match=r"a\.jsonl: byte 19: expected .* got 1,000 bytes or "):
            list(block.read())


def test_compressed_text_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"caf\xe9"))
    with pytest.raises(ValueError, match=r"a\.txt\.gz is not UTF-8"):
        read(tmp_path / "a.txt.gz", tmp_path)
