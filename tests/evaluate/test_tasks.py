"""Rows of GLUE and SQuAD from local files."""

import json
import sys

import pytest

from bert_unpad.evaluate.tasks import read_rows
from tests.support.task_files import single, squad, write


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("rte", None, "rte: expected one of train.jsonl, train.json, train.csv"),
        (
            "rte",
            [{"sentence1": "a", "label": 1}],
            "expected rows with sentence1, .* got one without sentence2",
        ),
        ("sst2", [{"sentence": "a", "label": 2}], "label: expected 0 to 1, got 2"),
        ("sst2", [], "train.jsonl: expected one row or more, got none"),
        ("sst2", [{"sentence": 7, "label": 1}], "train.jsonl: sentence: expected a text, got 7"),
        ("sst2", [["a", 1]], "train.jsonl: expected rows with sentence, label, got one without"),
        ("sst2", [{"sentence": "a", "label": 10**400}], "label: expected 0 to 1, got 1000"),
    ],
)
def test_wrong_files_are_named(task, rows, message, tmp_path):
    if rows is not None:
        write(tmp_path / task / "train.jsonl", rows)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        read_rows(task, "train", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sentence,label\nkalo,one\n", "label: expected 0 to 1, got 'one'"),
        ("sentence,label\nkalo,0.5\n", "label: expected 0 to 1, got '0.5'"),
        ("sentence,label\nkalo\n", "label: expected 0 to 1, got None"),
        ("label,sentence\n1\n", "sentence: expected a text, got None"),
        ("sentence,label\n", "expected one row or more, got none"),
        ("sentence,label\nkal\udcff,1\n", "expected rows as GLUE .* got UnicodeDecodeError"),
    ],
)
def test_wrong_labels_of_a_table_are_named(text, message, tmp_path):
    (tmp_path / "cola").mkdir()
    (tmp_path / "cola" / "train.csv").write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(ValueError, match=f"train.csv: {message}"):
        read_rows("cola", "train", tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.csv", "sentence,label\nkalo,1\n"),
        ("train.tsv", "sentence\tlabel\nkalo\t1\n"),
        ("train.jsonl", '{"sentence": "kalo", "label": 1}\n'),
    ],
)
def test_a_byte_order_mark_is_no_text(name, text, tmp_path):
    (tmp_path / "cola").mkdir()
    (tmp_path / "cola" / name).write_text(text, "utf-8-sig")
    assert read_rows("cola", "train", tmp_path) == [{"sentence": "kalo", "label": 1}]


def test_json_lines_end_at_newlines_alone_and_labels_may_be_texts(tmp_path):
    (tmp_path / "stsb").mkdir()
    row = {"sentence1": "a\u2028b", "sentence2": "c\x85d\x0ce", "label": "3.5"}
    text = f"{json.dumps(row, ensure_ascii=False)}\r\n" * 2
    (tmp_path / "stsb" / "train.jsonl").write_bytes(text.encode())
    assert read_rows("stsb", "train", tmp_path) == [row | {"label": 3.5}] * 2
    write(tmp_path / "sst2" / "train.jsonl", [{"sentence": "a", "label": x} for x in ("1", "0.0")])
    assert [row["label"] for row in read_rows("sst2", "train", tmp_path)] == [1, 0]


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("train.csv", "idx,sentence,label\n0,12,1\nx,3.5,0\n", [("12", 1), ("3.5", 0)]),
        ("train.csv", 'label,label,sentence\n0,1,"a\nb"\n', [("a\nb", 1)]),
        (
            "train.tsv",
            'sentence\tlabel\n"12\t1\n2026-11-27\t0\tx\n',
            [('"12', 1), ("2026-11-27", 0)],
        ),
        (
            "train.jsonl",
            '{"sentence": "2026-11-27", "label": 1}\n\n{"sentence": "a", "label": "0", "x": 1}',
            [("2026-11-27", 1), ("a", 0)],
        ),
        ("train.json", json.dumps({"sentence": "a" * 2**21, "label": 1}), [("a" * 2**21, 1)]),
    ],
)
def test_texts_stay_as_a_file_has_them(name, text, rows, tmp_path):
    (tmp_path / "cola").mkdir()
    (tmp_path / "cola" / name).write_text(text)
    found = read_rows("cola", "train", tmp_path)
    assert found == [{"sentence": text, "label": label} for text, label in rows]


@pytest.mark.parametrize(("package", "folder"), [("datasets", None), ("pyarrow", "data")])
def test_a_missing_package_is_named(package, folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "data" / "cola").mkdir(parents=True)
    (tmp_path / "data" / "cola" / "train.parquet").touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit):
        read_rows("cola", "train", folder and tmp_path / folder)
    assert f"needs {package}: pip install 'bert_unpad[evaluate]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "answers",
    [
        "{}",
        [{"text": "a", "answer_start": 0}],
        {"text": "a", "answer_start": 0},
        {"text": ["a"], "answer_start": []},
        {"text": ["a"], "answer_start": ["0"]},
        {"text": [None], "answer_start": [0]},
        None,
    ],
)
def test_answers_of_another_shape_are_named(answers, tmp_path):
    write(
        tmp_path / "squad" / "train.jsonl",
        [{"question": "q", "context": "a"} | {"answers": answers}],
    )
    with pytest.raises(ValueError, match="answers: expected an object with the lists text and"):
        read_rows("squad", "train", tmp_path)


def test_parquet_files_have_the_columns_of_the_datasets_library(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "cola").mkdir()
    rows, columns = single(5, 0), ["sentence", "label"]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "cola" / "train.parquet")
    expected = [{name: row[name] for name in columns} for row in rows]
    assert read_rows("cola", "train", tmp_path) == expected
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    assert read_rows("cola", "train", None) == expected


def test_more_wrong_files(tmp_path):
    for ending in ("csv", "jsonl"):
        write(tmp_path / "cola" / f"train.{ending}", single(2, 0))
    with pytest.raises(
        ValueError, match=r"expected one file of train, got train\.jsonl, train\.csv"
    ):
        read_rows("cola", "train", tmp_path)
    (tmp_path / "squad").mkdir()
    (tmp_path / "squad" / "train.json").write_text('{"data": [{"paragraphs": [{}]}]}')
    with pytest.raises(ValueError, match=r"as GLUE or SQuAD 1.1 has them, got KeyError: 'qas'"):
        read_rows("squad", "train", tmp_path)
    none = squad(1, 0, 5)
    none["data"][0]["paragraphs"][0]["qas"][0]["answers"] = []
    (tmp_path / "squad" / "train.json").write_text(json.dumps(none))
    with pytest.raises(ValueError, match=r"answers: expected an object .* length, 1 or more"):
        read_rows("squad", "train", tmp_path)
