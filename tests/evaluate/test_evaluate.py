"""Fine-tuning on GLUE and SQuAD, from local files in the formats of the real ones."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("sklearn")

from bert_unpad.data import WordPieceTokenizer
from bert_unpad.evaluate.answers import answer_features, answers_of, measures
from bert_unpad.evaluate.cli import main
from bert_unpad.evaluate.fine_tune import load
from bert_unpad.evaluate.tasks import read_rows
from bert_unpad.hf.stock_modules import PackedCall
from bert_unpad.nn import BertConfig, BertForPreTraining
from tests.support.seeds import derived

WORDS = ["kalo", "mitu", "soka", "lumi", "tesa", "rano", "pilu", "demo"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """The folder `model` of a run, with fresh weights."""
    folder = tmp_path_factory.mktemp("evaluate") / "model"
    text = [[f"{a} {b}, {a}." for a in WORDS for b in WORDS]]
    tokenizer = WordPieceTokenizer.train(lambda: text, vocab_size=80)
    torch.manual_seed(derived(0))
    config = BertConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertForPreTraining(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def test_a_model_saved_in_16_bits_trains_in_32(model_dir, tmp_path):
    folder = tmp_path / "model"
    model = transformers.AutoModel.from_pretrained(model_dir, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder)
    for task in ("cola", "squad"):
        _, loaded = load(SimpleNamespace(model=folder, padded=False), task, 0)
        assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def sentence(rng: random.Random, words: list[str], longest: int = 9) -> str:
    return " ".join(rng.choice(words) for _ in range(rng.randint(1, longest)))


def single(count: int, seed: int) -> list[dict]:
    """Sentences; those of class 1 have the word kalo."""
    rng, rows = random.Random(derived(seed)), []
    for index in range(count):
        words = [*sentence(rng, WORDS[1:]).split(), *["kalo"] * (index % 2)]
        rng.shuffle(words)
        rows.append({"sentence": " ".join(words), "label": index % 2, "idx": index})
    return rows


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        quoted = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), **quoted)
            writer.writeheader()
            writer.writerows(rows)


def run(model_dir: Path, folder: Path, *arguments: str, lr: str = "5e-3") -> dict[str, dict]:
    """The results of a command, by file."""
    given = ["--data", str(folder / "data"), "--output", str(folder / "out"), "--cpu"]
    more = ["--batch-size", "8", "--lr", lr, *arguments]
    assert main([str(model_dir), *given, *more]) == 0
    found = sorted((folder / "out").glob("*/*.json"))
    return {f"{path.parent.name}/{path.stem}": json.loads(path.read_text()) for path in found}


def test_a_model_learns_and_the_table_has_means(model_dir, tmp_path, capsys):
    write(tmp_path / "data" / "sst2" / "train.tsv", single(256, 1))
    write(tmp_path / "data" / "sst2" / "validation.csv", single(40, 2))
    options = ("--tasks", "sst2", "--seeds", "0", "7", "--epochs", "8")
    found = run(model_dir, tmp_path, *options, lr="2e-3")
    accuracies = [found[f"sst2/seed-{seed}"]["metrics"]["accuracy"] for seed in (0, 7)]
    assert min(accuracies) > 0.9
    mean, deviation = 50 * sum(accuracies), 100 * np.std(accuracies, ddof=1)
    row = f"| sst2 | accuracy | {mean:.2f} | {deviation:.2f} | 2 |"
    assert row in capsys.readouterr().out
    assert row in (tmp_path / "out" / "table.md").read_text()


def test_results_that_are_there_are_kept(model_dir, tmp_path, capsys):
    for split in ("train", "validation"):
        write(tmp_path / "data" / "cola" / f"{split}.jsonl", single(16, 3))
    first = run(model_dir, tmp_path, "--tasks", "cola", "--seeds", "1", "--epochs", "1")
    file = tmp_path / "out" / "cola" / "seed-1.json"
    noted = json.loads(file.read_text()) | {"metrics": {"matthews": 0.123}}
    file.write_text(json.dumps(noted))
    again = run(model_dir, tmp_path, "--tasks", "cola", "--seeds", "1", "2", "--epochs", "1")
    assert again["cola/seed-1"]["metrics"] == {"matthews": 0.123}
    assert again["cola/seed-2"]["metrics"].keys() == first["cola/seed-1"]["metrics"].keys()
    capsys.readouterr()

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            run(model_dir, tmp_path, "--tasks", "cola", "--seeds", "1", *arguments)
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "seed-1.json: expected a result with these settings" in refused("--epochs", "2")
    vocab = model_dir / "vocab.txt"
    text = vocab.read_text()
    vocab.write_text(text.replace("\n", "\n\n", 1))
    assert "seed-1.json: expected a result with these settings" in refused("--epochs", "1")
    vocab.write_text(text)
    write(tmp_path / "data" / "cola" / "validation.jsonl", single(18, 3))
    assert "seed-1.json: expected a result with these settings" in refused("--epochs", "1")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--batch-size", "0", "expected an integer of 1 or more"),
        ("--epochs", "-1", "expected an integer of 1 or more"),
        ("--max-length", "0", "expected an integer of 1 or more"),
        ("--max-length", "2", "expected at least 3, got 2"),
        ("--stride", "-1", "expected an integer of 0 or more"),
        ("--seeds", "-1", "expected an integer of 0 or more"),
        ("--lr", "nan", "expected a number of 0 or more"),
        ("--weight-decay", "inf", "expected a number of 0 or more"),
        ("--warmup-share", "2", "expected a share of 0 to 1, got '2'"),
    ],
)
def test_wrong_options_are_named(model_dir, tmp_path, capsys, option, value, message):
    for split in ("train", "validation"):
        write(tmp_path / "data" / "cola" / f"{split}.jsonl", single(4, 3))
    with pytest.raises(SystemExit) as ended:
        run(model_dir, tmp_path, "--tasks", "cola", option, value)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"{option}: {message}" in error
    assert not (tmp_path / "out").exists()


def test_the_same_seed_gives_the_same_result_and_padding_changes_nothing(model_dir, tmp_path):
    rng = random.Random(derived(4))
    rows = [
        {"sentence1": sentence(rng, WORDS), "sentence2": sentence(rng, WORDS), "label": x / 8}
        for x in range(40)
    ]
    for split in ("train", "validation"):
        write(tmp_path / "data" / "stsb" / f"{split}.jsonl", rows)
    common = ("--tasks", "stsb", "--seeds", "5", "--epochs", "2")
    out = [tmp_path / name for name in ("a", "b", "c")]
    for folder in out:
        folder.mkdir()
        (folder / "data").symlink_to(tmp_path / "data")
    first, second = (run(model_dir, folder, *common, lr="1e-3") for folder in out[:2])
    padded = run(model_dir, out[2], *common, "--padded", lr="1e-3")
    measures = [x["stsb/seed-5"]["metrics"] for x in (first, second, padded)]
    assert measures[0] == measures[1]
    assert measures[0] == pytest.approx(measures[2], abs=0.02)
    assert set(measures[0]) == {"pearson", "spearman"}


def test_todays_models_are_fine_tuned_packed(model_dir, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    transformers.AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder)
    config = transformers.ModernBertConfig(
        vocab_size=80, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, pad_token_id=0, local_attention=8,
        cls_token_id=0, sep_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(derived(6))
    transformers.ModernBertForMaskedLM(config).save_pretrained(folder)
    calls, stock = [], PackedCall._bert_unpad_packed_call
    monkeypatch.setattr(
        PackedCall,
        "_bert_unpad_packed_call",
        lambda model, *given: calls.append(model) or stock(model, *given),
    )
    measures = []
    for how in ((), ("--padded",)):
        out = tmp_path / f"run{len(how)}"
        write(out / "data" / "sst2" / "train.tsv", single(64, 1))
        write(out / "data" / "sst2" / "validation.csv", single(40, 2))
        calls.clear()
        found = run(
            folder, out, "--tasks", "sst2", "--seeds", "0", "--epochs", "2", *how, lr="1e-3"
        )
        assert bool(calls) == (not how)
        measures.append(found["sst2/seed-0"]["metrics"])
    assert measures[0] == pytest.approx(measures[1], abs=0.1)


def squad(count: int, seed: int, longest: int) -> dict:
    """SQuAD's own layout: the answer is the word after the one that is asked for."""
    rng, paragraphs = random.Random(derived(seed)), []
    for index in range(count):
        words = [rng.choice(WORDS) for _ in range(rng.randint(4, longest))]
        place = rng.randrange(len(words) - 1)
        text = " ".join(words)
        start = len(" ".join(words[: place + 1])) + 1
        question = {
            "id": str(index),
            "question": f"{words[place]} ?",
            "answers": [{"text": words[place + 1], "answer_start": start}],
        }
        paragraphs.append({"context": text, "qas": [question]})
    return {"version": "1.1", "data": [{"title": "made up", "paragraphs": paragraphs}]}


def test_answers_of_long_texts_come_back(model_dir, tmp_path):
    folder = tmp_path / "squad"
    folder.mkdir()
    (folder / "validation.json").write_text(json.dumps(squad(30, 6, 60)))
    rows = read_rows("squad", "validation", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    features = answer_features(rows, tokenizer, 24, 8)
    assert len(features) > len(rows)
    assert max(len(feature["input_ids"]) for feature in features) <= 24
    scores = np.tile(-np.arange(32.0), (2, len(features), 1))  # the nearest to the front otherwise
    with_answer = {feature["row"] for feature in features if feature["end_positions"]}
    for score, side in zip(scores, ("start_positions", "end_positions"), strict=True):
        for row, feature in zip(score, features, strict=True):
            row[len(feature["input_ids"]) :] = 99  # padding, which is no answer
            if feature["end_positions"]:
                row[feature[side]] = 50
    assert with_answer == set(range(len(rows)))
    found = answers_of(rows, features, *scores)
    assert found == [row["answers"]["text"][0] for row in rows]
    assert measures(found, rows) == {"exact_match": 1.0, "answer_f1": 1.0}


def test_squad_runs_packed(model_dir, tmp_path):
    folder = tmp_path / "data" / "squad"
    folder.mkdir(parents=True)
    (folder / "train.json").write_text(json.dumps(squad(24, 7, 20)))
    write(
        folder / "validation.jsonl",
        [
            {
                "id": question["id"],
                "context": paragraph["context"],
                "question": question["question"],
                "answers": {
                    "text": [question["answers"][0]["text"]],
                    "answer_start": [question["answers"][0]["answer_start"]],
                },
            }
            for paragraph in squad(12, 8, 20)["data"][0]["paragraphs"]
            for question in paragraph["qas"]
        ],
    )
    found = run(model_dir, tmp_path, "--tasks", "squad", "--max-length", "32", "--stride", "8")
    metrics = found["squad/seed-0"]["metrics"]
    assert 0 <= metrics["exact_match"] <= metrics["answer_f1"] <= 1


def test_measures_of_answers():
    answers = [["The Kalo!", "mitu"], ["a soka lumi"], ["x"]]
    found = measures(["kalo", "lumi tesa", "y"], [{"answers": {"text": a}} for a in answers])
    assert found == pytest.approx({"exact_match": 1 / 3, "answer_f1": (1 + 0.5 + 0) / 3})


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("rte", None, "rte: expected one of train.jsonl, train.json, train.csv"),
        (
            "rte",
            [{"sentence1": "a", "label": 1}],
            "expected the columns sentence1, .* got none with the name sentence2",
        ),
        ("sst2", [{"sentence": "a", "label": 2}], "label: expected 0 to 1, got 2"),
        ("sst2", [], "expected rows as GLUE .* got ArrowInvalid: Empty JSON file"),
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
        ("sentence,label\nkalo,0.5\n", "label: expected 0 to 1, got 0.5"),
        ("sentence,label\nkalo\n", "expected rows as GLUE .* Expected 2 columns, got 1: kalo"),
    ],
)
def test_wrong_labels_of_a_table_are_named(text, message, tmp_path):
    (tmp_path / "cola").mkdir()
    (tmp_path / "cola" / "train.csv").write_text(text)
    with pytest.raises(ValueError, match=f"train.csv: {message}"):
        read_rows("cola", "train", tmp_path)


def test_json_lines_end_at_newlines_alone_and_labels_may_be_texts(tmp_path):
    (tmp_path / "stsb").mkdir()
    row = {"sentence1": "a\u2028b", "sentence2": "c\x85d\x0ce", "label": "3.5"}
    text = f"{json.dumps(row, ensure_ascii=False)}\r\n" * 2
    (tmp_path / "stsb" / "train.jsonl").write_bytes(text.encode())
    assert read_rows("stsb", "train", tmp_path) == [row | {"label": 3.5}] * 2
    write(tmp_path / "sst2" / "train.jsonl", [{"sentence": "a", "label": x} for x in ("1", "0.0")])
    assert [row["label"] for row in read_rows("sst2", "train", tmp_path)] == [1, 0]


@pytest.mark.parametrize(
    "answers",
    [
        "{}",
        [{"text": "a", "answer_start": 0}],
        {"text": "a", "answer_start": 0},
        {"text": ["a"], "answer_start": []},
    ],
)
def test_answers_of_another_shape_are_named(answers, tmp_path):
    write(
        tmp_path / "squad" / "train.jsonl",
        [{"question": "q", "context": "a"} | {"answers": answers}],
    )
    with pytest.raises(ValueError, match="answers: expected an object with the lists text and"):
        read_rows("squad", "train", tmp_path)


def test_a_long_question_is_cut(model_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    row = {"context": "kalo mitu soka lumi", "answers": {"text": ["soka"], "answer_start": [10]}}
    rows = [row | {"question": question} for question in ("tesa " * 60, "demo")]
    features = answer_features(rows, tokenizer, 32, 16)
    assert max(len(feature["input_ids"]) for feature in features) <= 32
    assert {feature["row"] for feature in features if feature["end_positions"]} == {0, 1}
    with pytest.raises(ValueError, match=r"^--max-length: expected at least 21 with --stride 16"):
        answer_features(rows, tokenizer, 20, 16)
    assert answer_features(rows, tokenizer, 21, 16)


def test_parquet_files_have_the_columns_of_the_datasets_library(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    (tmp_path / "cola").mkdir()
    rows, columns = single(5, 0), ["sentence", "label"]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "cola" / "train.parquet")
    expected = [{name: row[name] for name in columns} for row in rows]
    assert read_rows("cola", "train", tmp_path) == expected
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    assert read_rows("cola", "train", None) == expected


def test_more_wrong_files(tmp_path, model_dir, capsys):
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
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing"), "--data", str(tmp_path), "--output", str(tmp_path / "o")])
    assert "model: expected a folder with config.json" in capsys.readouterr().err
