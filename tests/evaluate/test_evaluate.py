"""Fine-tuning on GLUE and SQuAD, from local files in the formats of the real ones."""

import json
import math
import random
import shutil
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
from tests.support.task_files import WORDS, sentence, single, squad, write


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
    run(
        model_dir,
        tmp_path,
        "--tasks",
        "cola",
        "--epochs",
        "1",
        "--max-length",
        "128",
        "--seeds",
        "1",
    )
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


@pytest.mark.parametrize("task", ["stsb", "squad"])
def test_a_run_that_diverged_has_no_measures(model_dir, tmp_path, task, capsys):
    """Of a model whose config asks for more outputs and for another loss."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    asked = {"output_hidden_states": True, "output_attentions": True}
    config |= asked | {"problem_type": "multi_label_classification", "num_labels": 3}
    (folder / "config.json").write_text(json.dumps(config))
    for split in ("train", "validation"):
        (tmp_path / "data" / task).mkdir(parents=True, exist_ok=True)
        if task == "squad":
            text = json.dumps(squad(1, 7, 20))
            (tmp_path / "data" / task / f"{split}.json").write_text(text)
        else:
            row = {"sentence1": "kalo", "sentence2": "mitu", "label": 2.5}
            write(tmp_path / "data" / task / f"{split}.jsonl", [row])
    options = ("--tasks", task, "--max-length", "48", "--stride", "8", "--warmup-share", "0")
    found = run(folder, tmp_path, *options)[f"{task}/seed-0"]["metrics"]
    assert set(found.values()) <= {0.0, 1.0}
    shutil.rmtree(tmp_path / "out")
    options += ("--seeds", "0", "1")
    found = run(folder, tmp_path, *options, lr="1e38")[f"{task}/seed-0"]["metrics"]
    assert [math.isnan(value) for value in found.values()] == [True, True]
    assert f"| {next(iter(found))} | nan | nan | 2 |" in capsys.readouterr().out


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


def test_answers_are_trained_without_the_scores_of_padding(model_dir, tmp_path, monkeypatch):
    folder = tmp_path / "data" / "squad"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        (folder / f"{split}.json").write_text(json.dumps(squad(24, 7, 20)))
    losses: list[float] = []
    stock = transformers.Trainer.training_step

    def noted(*given, **named):
        losses.append(float(loss := stock(*given, **named)))
        return loss

    monkeypatch.setattr(transformers.Trainer, "training_step", noted)
    for how in ([], ["--padded"]):
        options = ["--tasks", "squad", "--max-length", "32", "--stride", "8", *how]
        run(model_dir, tmp_path, *options, "--output", str(tmp_path / f"out{len(how)}"))
    count = len(losses) // 2
    assert count > 8
    assert losses[:count] == pytest.approx(losses[count:], rel=1e-4)


def test_measures_of_answers():
    answers = [["The Kalo!", "mitu"], ["a soka lumi"], ["x"]]
    found = measures(["kalo", "lumi tesa", "y"], [{"answers": {"text": a}} for a in answers])
    assert found == pytest.approx({"exact_match": 1 / 3, "answer_f1": (1 + 0.5 + 0) / 3})


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


def test_a_missing_model_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing"), "--data", str(tmp_path), "--output", str(tmp_path / "o")])
    assert "model: expected a folder with config.json" in capsys.readouterr().err
