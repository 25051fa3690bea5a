"""Preparing data: the cache's key, damage, several processes at once, both parts, errors."""

import dataclasses
import logging
import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bert_unpad.data import DamagedDataError, DataConfig, ShardWriter, WordPieceTokenizer, prepare
from bert_unpad.data.formats import sources
from bert_unpad.data.preparation import cached, join, pipeline
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived

WORDS = ["the", "of", "packed", "token", "batch", "model", "reads", "every", "then", "learns"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    rng = random.Random(derived(0))
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    documents = []
    for number in range(200):
        sentences = []
        for _ in range(rng.randint(1, 8)):
            words = [rng.choice(WORDS) for _ in range(rng.randint(3, 12))]
            sentences.append(f"N{number} {' '.join(words)}.")
        documents.append("\n".join(sentences))
    path.write_text("\n\n".join([*documents, documents[3], documents[5]]))
    return path


@pytest.fixture
def config(text_file, tmp_path):
    return DataConfig(
        source=str(text_file),
        cache_dir=str(tmp_path / "cache"),
        max_seq_length=48,
        vocab_size=200,
        validation_share=0.1,
    )


def builds(caplog):
    return sum("training a vocabulary" in record.message for record in caplog.records)


def test_builds_once_then_opens(config, caplog):
    caplog.set_level(logging.INFO)
    first = prepare(config, progress=False)
    again = prepare(config, progress=False)
    assert builds(caplog) == 1
    assert again.path == first.path
    np.testing.assert_array_equal(again.train.tokens, first.train.tokens)
    counts = first.statistics
    assert (counts["documents"], counts["duplicates"]) == (200, 2)
    assert counts["train_documents"] + counts["validation_documents"] == 200
    assert counts["train_examples"] == len(first.train)
    assert counts["validation_tokens"] == len(first.validation.tokens)
    assert first.train.lengths.max() == 48
    assert sorted(p.name for p in first.path.iterdir()) == [
        *("manifest.json", "tokenizer", "train", "validation")
    ]
    assert [p.name for p in first.path.parent.iterdir()] == [first.path.name]


def test_key_follows_content_and_settings_but_not_masking(config, text_file, tmp_path):
    path = prepare(config, progress=False).path
    for change in (
        {"masked_lm_prob": 0.3, "mask_unit": "word", "max_predictions_per_seq": 5},
        {"verify": True},
    ):
        assert prepare(dataclasses.replace(config, **change), progress=False).path == path
    paths = {path}
    for change in (
        {"max_seq_length": 32},
        {"vocab_size": 150},
        {"lowercase": False},
        {"short_seq_prob": 0.5},
        {"dupe_factor": 2},
        {"validation_share": 0.2},
        {"seed": 1},
        {"source": f"{text_file}?file_per_document=true"},
    ):
        paths.add(prepare(dataclasses.replace(config, **change), progress=False).path)
    other = tmp_path / "other.txt"
    other.write_bytes(text_file.read_bytes())
    copy = dataclasses.replace(config, source=str(other))
    assert prepare(copy, progress=False).path == path  # the content counts, not the name
    other.write_text(other.read_text() + " More.")
    paths.add(prepare(copy, progress=False).path)
    assert len(paths) == 10


def test_held_out_documents_do_not_depend_on_the_seed(config):
    first = prepare(config, progress=False)
    other = prepare(dataclasses.replace(config, seed=1, dupe_factor=3), progress=False)
    # The same training text gives the same vocabulary and document counts, with other pairs.
    assert other.tokenizer.vocabulary == first.tokenizer.vocabulary
    assert other.statistics["validation_documents"] == first.statistics["validation_documents"]
    assert not np.array_equal(other.train.tokens[:300], first.train.tokens[:300])
    assert len(other.train) > 2.5 * len(first.train)


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "tokenizer/vocab.txt", "train/tokens-000000.bin", "validation/manifest.json"],
)
@pytest.mark.parametrize("damage", ["truncate", "alter", "remove"])
def test_damaged_caches_are_reported_and_rebuilt(config, caplog, name, damage):
    if (name, damage) == ("train/tokens-000000.bin", "alter"):
        config = dataclasses.replace(config, verify=True)
    data = prepare(config, progress=False)
    tokens = data.train.tokens.copy()
    file = data.path / name
    content = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(content[:-20])
    elif damage == "remove":
        file.unlink()
    else:
        middle = len(content) // 2
        file.write_bytes(content[:middle] + b"\x01" + content[middle + 1 :])
    rebuilt = prepare(config, progress=False)
    (warning,) = (r.message for r in caplog.records if r.levelno == logging.WARNING)
    assert "rebuilding damaged data" in warning
    assert str(file) in warning
    assert "expected" in warning
    np.testing.assert_array_equal(rebuilt.train.tokens, tokens)
    assert file.read_bytes() == content


BUILD = """
import logging, sys
from bert_unpad.data import DataConfig, prepare
logging.basicConfig(level=logging.INFO)
data = prepare(DataConfig(source=sys.argv[1], cache_dir=sys.argv[2], vocab_size=200), False)
print(data.path, int(data.train.tokens.astype(int).sum()), len(data.validation))
"""


def test_processes_at_once_build_once_and_alike(text_file, tmp_path):
    """Two processes share a cache and one has its own; hash seeds differ between them."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD, str(text_file), str(tmp_path / cache)],
            env={**os.environ, "PYTHONHASHSEED": str(number), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, cache in enumerate(["shared", "shared", "own"])
    ]
    results = [process.communicate(timeout=TIMEOUT) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, results
    outputs = [out.replace("shared", "*").replace("own", "*") for out, _ in results]
    assert len(set(outputs)) == 1
    assert [err.count("training a vocabulary") for _, err in results[2:]] == [1]
    assert sum(err.count("training a vocabulary") for _, err in results[:2]) == 1


def test_failed_build_leaves_nothing(config, monkeypatch):
    def fail(self):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "close", fail)
        with pytest.raises(OSError, match="disk full"):
            prepare(config, progress=False)
    assert list((Path(config.cache_dir) / "prepared").iterdir()) == []
    data = prepare(config, progress=False)
    assert [p.name for p in data.path.parent.iterdir()] == [data.path.name]


def build_until_examples(config):
    ShardWriter.close = lambda self: os._exit(9)
    prepare(config, progress=False)


@pytest.mark.parametrize("text", ["untouched", "touched", "elsewhere"])
def test_a_killed_build_is_continued(config, text_file, tmp_path, text):
    folder = Path(config.cache_dir)
    copy = tmp_path / "copy.txt"
    copy.write_bytes(text_file.read_bytes())
    config = dataclasses.replace(config, source=str(copy))
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=build_until_examples, args=(config,))
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == 9
    (building,) = (folder / "building").iterdir()
    (records,) = (building / "work" / "spool").glob("*.npy")
    read = records.stat().st_mtime_ns
    before = (building / "tokenizer" / "vocab.txt").stat().st_mtime_ns
    assert read < before
    if text == "touched":
        os.utime(copy)
    elif text == "elsewhere":
        config = dataclasses.replace(config, source=str(text_file))
    data = prepare(config, progress=False)
    assert (data.path / "tokenizer" / "vocab.txt").stat().st_mtime_ns == before
    assert list((folder / "building").iterdir()) == []


def test_text_that_changes_while_it_is_read_is_not_taken(config, tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("One two three.\n\n" * 50 + "Four five six.")
    config = dataclasses.replace(config, source=str(path))
    read = pipeline.spool_block

    def changes(*arguments):
        done = read(*arguments)
        path.write_text(path.read_text().replace("Four", "Five"))
        os.utime(path, (1_000_000_000, 1_000_000_000))
        return done

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "spool_block", changes)
        with pytest.raises(ValueError, match=r"source: expected files of .* that stay as they are"):
            prepare(config, progress=False)
    assert prepare(config, progress=False).statistics["documents"] == 2


def test_leftovers_are_old_in_all_their_files(tmp_path):
    for name in ("dead", "alive"):
        spool = tmp_path / name / "work" / "spool"
        spool.mkdir(parents=True)
        (spool / "000000.txt").touch()
        for path in (spool / "000000.txt", spool, spool.parent, tmp_path / name):
            os.utime(path, (1_000_000_000, 1_000_000_000))
    (tmp_path / "alive" / "work" / "spool" / "000001.txt").touch()
    cached._remove_leftovers(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["alive"]


def build_until_joined(config):
    join.remove_work = lambda folder: os._exit(9)
    prepare(config, progress=False)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_build_killed_at_its_end_is_finished(config, damaged):
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=build_until_joined, args=(config,))
    process.start()
    process.join(TIMEOUT)
    assert process.exitcode == 9
    (building,) = (Path(config.cache_dir) / "building").iterdir()
    assert (building / "work").exists()
    if damaged:
        (building / "manifest.json").write_text("{")
    data = prepare(config, progress=False)
    assert sorted(p.name for p in data.path.iterdir()) == [
        *("manifest.json", "tokenizer", "train", "validation")
    ]


def test_a_build_with_damaged_files_is_begun_again(config, monkeypatch):
    def fail(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "close", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, progress=False)
    (spool,) = Path(config.cache_dir).glob("building/*/work/spool/000000.txt")
    os.truncate(spool, spool.stat().st_size // 2)
    with pytest.raises(DamagedDataError, match=r"000000\.txt: expected [\d,]+ bytes, got [\d,]+;"):
        prepare(config, progress=False)
    assert prepare(config, progress=False).statistics["documents"] == 200


def test_fingerprints_are_remembered_until_files_change(config, text_file, monkeypatch):
    os.utime(text_file, (1_000_000_000, 1_000_000_000))
    path = prepare(config, progress=False).path
    hashed = []
    digest = sources.file_sha256
    monkeypatch.setattr(sources, "file_sha256", lambda p: hashed.append(p) or digest(p))
    assert prepare(config, progress=False).path == path
    assert hashed == []
    os.utime(text_file, (1_000_000_001, 1_000_000_001))
    assert prepare(config, progress=False).path == path
    assert hashed == [text_file]


def test_one_process_checks_for_the_others(config):
    data = prepare(config, progress=False)
    file = data.path / "train" / "tokens-000000.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-2])
    unchecked = prepare(config, progress=False, check=False)
    with pytest.raises(DamagedDataError, match=r"tokens-000000\.bin has .* bytes; expected"):
        unchecked.train.batch(np.arange(2))
    prepare(config, progress=False)
    assert file.read_bytes() == content


def test_vocab_file_is_used_and_keyed_by_content(config, tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*SPECIAL_TOKENS, "n", "##1", *WORDS, "."]))
    config = dataclasses.replace(config, vocab_file=str(vocab))
    data = prepare(config, progress=False)
    assert data.tokenizer.vocabulary == WordPieceTokenizer.from_vocab_file(vocab).vocabulary
    assert prepare(dataclasses.replace(config, vocab_size=999), progress=False).path == data.path
    vocab.write_text(vocab.read_text() + "\nq")
    assert prepare(config, progress=False).path != data.path


def test_collator_takes_the_masking_of_the_configuration(config):
    data = prepare(dataclasses.replace(config, max_predictions_per_seq=2), progress=False)
    inputs = data.collator()(np.arange(20), 0)
    assert len(inputs.masked_positions) == sum(
        min(2, max(1, round(0.15 * length))) for length in data.train.lengths[:20].tolist()
    )
    held_out = data.collator("validation", seed=9)
    assert held_out.dataset is data.validation
    assert held_out.masker.seed == 9
    with pytest.raises(ValueError, match="split: expected"):
        data.collator("test")


def test_validation_share_zero_and_single_documents(config, tmp_path, caplog):
    assert len(prepare(dataclasses.replace(config, validation_share=0.0), False).validation) == 0
    assert "validation part is empty" not in caplog.text
    path = tmp_path / "one.txt"
    path.write_text("The one document that is here. It has two sentences in it here.")
    data = prepare(dataclasses.replace(config, source=str(path)), progress=False)
    assert len(data.train) == 1
    assert len(data.validation) == 0
    assert "validation part is empty" in caplog.text
    assert data.collator("validation")(np.empty(0, np.int64), 0).batch.total == 0


def test_progress_bars_only_if_asked(config, capsys):
    prepare(config)  # stderr is no terminal here
    assert capsys.readouterr().err == ""
    prepare(dataclasses.replace(config, seed=2), progress=True)
    shown = capsys.readouterr().err
    for step in ("reading", "making examples"):
        assert step in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seq_length": 4}, r"max_seq_length: expected 5 .* to 65,535 tokens, got 4"),
        ({"max_seq_length": 65_536}, "max_seq_length: expected .* got 65536"),
        ({"vocab_size": 5}, "vocab_size: expected at least 6"),
        ({"short_seq_prob": 1.5}, "short_seq_prob: expected 0 to 1"),
        ({"dupe_factor": 0}, "dupe_factor: expected at least 1"),
        ({"validation_share": 1.0}, "validation_share: expected"),
        ({"masked_lm_prob": 0}, "masked_lm_prob: expected"),
        ({"max_predictions_per_seq": -1}, "max_predictions_per_seq: expected"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**change)


def test_bad_inputs_are_named(config, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"source: .*nothing does not exist; expected"):
        prepare(dataclasses.replace(config, source=str(tmp_path / "nothing")))
    with pytest.raises(FileNotFoundError, match=r"vocab_file: .*nothing does not exist"):
        prepare(dataclasses.replace(config, vocab_file=str(tmp_path / "nothing")))
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n\n \n")
    with pytest.raises(ValueError, match=r"source: .*blank\.txt holds no text"):
        prepare(dataclasses.replace(config, source=str(blank)))
    controls = tmp_path / "controls.txt"
    controls.write_text("\x01\x02")
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join([*SPECIAL_TOKENS, "a"]))
    empty = dataclasses.replace(config, source=str(controls), vocab_file=str(vocab))
    with pytest.raises(ValueError, match="holds no text that the tokenizer knows"):
        prepare(empty)


@pytest.mark.slow
def test_standard_library(tmp_path):
    """The default source: thousands of documents, nearly no unknown words."""
    data = prepare(DataConfig(cache_dir=str(tmp_path)), progress=False)
    assert data.tokenizer.vocab_size == 8192
    assert data.statistics["documents"] > 3000
    assert len(data.train.tokens) > 300_000
    assert np.mean(data.train.tokens == data.tokenizer.unk_id) < 1e-3
    assert abs(np.mean(data.train.next_sentence_labels) - 0.5) < 0.02
