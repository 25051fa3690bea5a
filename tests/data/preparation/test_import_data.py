"""`python -m bert_unpad.data import`: from files of other formats to shards that training opens."""

import fcntl
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest

from bert_unpad.data import (
    DamagedDataError,
    DataConfig,
    PackedCollator,
    ShardWriter,
    WordPieceTokenizer,
    prepare,
)
from bert_unpad.data.cli import main
from bert_unpad.data.formats import FORMATS
from bert_unpad.data.preparation import import_data
from tests.support.imported import as_lists, imported, raw_of
from tests.support.masked_examples import LONGEST, VOCAB, masked_examples
from tests.support.paths import ROOT
from tests.support.prepared_text import contents
from tests.support.processes import TIMEOUT
from tests.support.tf_records import example, features_of, write_records
from tests.support.token_files import random_sequences, write_megatron

SEQUENCES = random_sequences(30)
RAW = as_lists(masked_examples(30))
LENGTH = ["--max-seq-length", str(LONGEST)]


@pytest.fixture
def data(tmp_path):
    """A folder with training and held-out files of token ids and their vocabulary."""
    for number in range(4):
        some = SEQUENCES[5 * number : 5 * number + 5]
        write_megatron(tmp_path / "data" / "train" / f"part{number}", some)
    write_megatron(tmp_path / "data" / "validation" / "part", SEQUENCES[20:])
    WordPieceTokenizer(VOCAB).save(tmp_path / "data" / "tokenizer")
    return tmp_path / "data"


@pytest.fixture
def masked(tmp_path):
    """Training files of examples with masks."""
    for number in range(3):
        records = [example(features_of(raw)) for raw in RAW[10 * number : 10 * number + 10]]
        write_records(tmp_path / "masked" / f"{number}.tfrecord", records)
    WordPieceTokenizer(VOCAB).save(tmp_path / "masked" / "tokenizer")
    return tmp_path / "masked"


def opened(output, **options):
    options = {"objective": "mlm", "max_seq_length": LONGEST} | options
    return prepare(DataConfig(f"shards:{output}", **options))


def joined(sequences):
    return [token for ids in sequences for token in ids]


def message_of(capsys, *arguments):
    """The error of a command with bad arguments."""
    with pytest.raises(SystemExit) as stopped:
        main(["import", *map(str, arguments), "--workers", "1"])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_a_folder_of_splits(data, tmp_path, capsys):
    output = tmp_path / "out"
    command = ["import", f"megatron:{data}", str(output), *LENGTH]
    assert main(command) == 0
    tokens = sum(map(len, SEQUENCES[:20]))
    assert f"train: 20 examples, {tokens:,} tokens" in capsys.readouterr().out
    assert sorted(path.name for path in output.iterdir()) == [
        *("manifest.json", "tokenizer", "train", "validation")
    ]
    found = opened(output)
    assert found.train.tokens.tolist() == joined(SEQUENCES[:20])
    assert found.validation.tokens.tolist() == joined(SEQUENCES[20:])
    assert found.tokenizer.identity() == WordPieceTokenizer(VOCAB).identity()
    assert (found.config.segments, found.train.has_masks) == (1, False)
    with pytest.raises(ValueError, match=r"objective: expected one whose examples are those of"):
        opened(output, objective="mlm_nsp")
    assert main(["check", str(output)]) == 0
    # The same command finds it complete, and workers change nothing.
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    assert main(["import", f"megatron:{data}", str(tmp_path / "one"), *LENGTH, "--workers=1"]) == 0
    assert contents(tmp_path / "one") == contents(output)
    [last] = (output / "train").glob("tokens-000003.bin")
    last.write_bytes(bytes(last.stat().st_size))
    assert main(["check", str(output)]) == 1
    assert "tokens-000003.bin was altered" in capsys.readouterr().err


@pytest.mark.parametrize("unmask", [False, True])
def test_finished_examples(masked, tmp_path, unmask):
    output = tmp_path / "out"
    given = ["--unmask"] if unmask else []
    assert main(["import", f"tfrecord:{masked}", str(output), *LENGTH, "--workers=1", *given]) == 0
    found = opened(output, objective="mlm_nsp")
    batch = found.train.batch(np.arange(30))
    assert (found.config.segments, len(found.validation)) == (2, 0)
    assert found.train.has_masks == (not unmask)
    if unmask:
        true = [list(ids) for ids, *_ in RAW]
        for ids, (_, _, positions, labels, _) in zip(true, RAW, strict=True):
            for place, label in zip(positions, labels, strict=True):
                ids[place] = label
        assert batch.tokens.tolist() == joined(true)
        return
    assert raw_of(batch) == RAW
    labels = np.bincount(joined(raw[3] for raw in RAW), minlength=len(VOCAB))
    assert found.train.target_counts().tolist() == labels.tolist()
    collator = PackedCollator(found.train, found.tokenizer, seed=1)
    longest_first = sorted(RAW, key=lambda raw: -len(raw[0]))
    for epoch in (0, 5):  # the files' masks are kept
        inputs = collator(np.arange(30), epoch)
        places = zip(inputs.batch.cu_seqlens.tolist(), longest_first, strict=False)
        assert inputs.input_ids.tolist() == joined(raw[0] for raw in longest_first)
        assert inputs.masked_positions.tolist() == joined(
            [begin + place for place in raw[2]] for begin, raw in places
        )
        assert inputs.masked_labels.tolist() == joined(raw[3] for raw in longest_first)
        assert inputs.next_sentence_labels.tolist() == [raw[4] for raw in longest_first]


def test_a_vocabulary_that_is_named(data, tmp_path, capsys):
    source = f"megatron:{data / 'train'}?validation={data / 'validation' / 'part.bin'}&add=none"
    vocab = ["--vocab-file", data / "tokenizer" / "vocab.txt", "--cased"]
    assert "vocab_file: expected the vocabulary" in message_of(capsys, source, tmp_path / "out")
    assert main(["import", source, str(tmp_path / "out"), *map(str, vocab), "--workers=1"]) == 0
    found = opened(tmp_path / "out", max_seq_length=LONGEST)
    assert (len(found.train), len(found.validation)) == (20, 10)
    assert found.tokenizer.identity() == WordPieceTokenizer(VOCAB, False).identity()


@pytest.mark.parametrize("elsewhere", ["", "?validation={}", "?validation={}/b.bin"])
def test_held_out_and_hidden_files_are_not_trained_on(tmp_path, elsewhere):
    folder = tmp_path / "data"
    held_out = folder / ("sub" if elsewhere else "validation")
    write_megatron(folder / "a", SEQUENCES[:20])
    write_megatron(held_out / "b", SEQUENCES[20:])
    write_megatron(folder / ".trash" / "c", SEQUENCES)
    imported(f"megatron:{folder}{elsewhere.format(held_out)}", tmp_path / "out")
    found = opened(tmp_path / "out")
    assert (len(found.train), len(found.validation)) == (20, 10)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *(
            (f"megatron:{{data}}?{options}", r"expected megatron:PATH or megatron:PATH\?valid")
            for options in ("add=both", "long=yes", "unit=word", "column=x", "split=train", "add=")
        ),
        ("megatron:", "source: expected megatron:PATH"),
        ("avro:{data}", "source: expected one of hdf5:PATH, megatron:PATH"),
        ("megatron:no/such", "source: no/such does not exist"),
        ("megatron:{data}?validation=no/such", "source: no/such does not exist"),
        ("megatron:{data}/tokenizer", r"expected a file, or a folder with files \*\.idx"),
        ("tfrecord:{data}", r"expected a file, or a folder with files \*\.tfrecord"),
        ("megatron:{data}?long=split", "expected the option add=.* with long=split"),
    ],
)
def test_wrong_sources_are_named(data, tmp_path, source, message, capsys):
    given = [*LENGTH, "--vocab-file", data / "tokenizer" / "vocab.txt"]
    said = message_of(capsys, source.format(data=data), tmp_path / "out", *given)
    assert re.search(message, said)


@pytest.mark.parametrize("kind", [kind for kind, row in FORMATS.items() if row.package])
def test_a_missing_package_is_named(data, tmp_path, kind, monkeypatch, capsys):
    row = FORMATS[kind]

    def missing(name):
        raise ModuleNotFoundError(f"No module named {row.package!r}", name=f"{row.package}.part")

    monkeypatch.setattr("bert_unpad.data.formats.importlib.import_module", missing)
    said = message_of(capsys, f"{kind}:{data}", tmp_path / "out")
    assert f"needs the package `{row.package}`: pip install 'bert_unpad[{row.extra}]'" in said


def test_a_result_within_the_files_or_among_others_is_refused(data, tmp_path, capsys):
    for output in (data, data / "out", data / "train" / "out"):
        said = message_of(capsys, f"megatron:{data}", output)
        assert "output: expected a folder outside of" in said
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    said = message_of(capsys, f"megatron:{data}", tmp_path / "mine")
    assert "output: expected a new folder, or one that was begun" in said
    write_megatron(tmp_path / "none" / "a", [])
    with pytest.raises(ValueError, match=r"expected at least one example in .*, got none"):
        imported(f"megatron:{tmp_path / 'none'}", tmp_path / "out")


class Killed(BaseException):
    pass


@pytest.mark.parametrize("where", ["a piece", "join_split", "count_split", "write_prepared"])
def test_what_was_killed_goes_on(masked, tmp_path, where, monkeypatch, capsys):
    source, output = f"tfrecord:{masked}", tmp_path / "out"
    calls = []

    def killed(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2 or where == "write_prepared":
            raise Killed
        return original(*arguments, **options)

    owner, name = (ShardWriter, "close") if where == "a piece" else (import_data, where)
    original = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            imported(source, output)
    done = {path: path.stat().st_ino for path in output.rglob("tokens*.bin")}
    assert done
    for changed in ([*LENGTH, "--unmask"], ["--max-seq-length", "99"]):
        said = message_of(capsys, source, output, *changed)
        assert "was begun with other settings" in said
    imported(source, output)
    assert set(done.values()) <= {path.stat().st_ino for path in output.rglob("tokens*.bin")}
    imported(source, tmp_path / "whole")
    assert contents(output) == contents(tmp_path / "whole")


def test_files_that_have_changed_since_are_refused(data, tmp_path, monkeypatch):
    source, file = f"megatron:{data}", data / "train" / "part1.bin"
    imported(source, tmp_path / "out")
    os.utime(file, (1, 1))
    with pytest.raises(ValueError, match=r"expected the files of .* as they were then, got o"):
        imported(source, tmp_path / "out")
    monkeypatch.setattr(import_data, "_write_pieces", lambda *_: os.utime(file, (2, 2)))
    with pytest.raises(ValueError, match=r"expected files of .* that stay as they are while"):
        imported(source, tmp_path / "again")


def test_a_damaged_file_ends_the_import_and_can_be_replaced(masked, tmp_path, capsys):
    output, file = tmp_path / "out", masked / "1.tfrecord"
    good, times = file.read_bytes(), file.stat()
    file.write_bytes(good[:-1] + b"x")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert main(["import", f"tfrecord:{masked}", str(output), *LENGTH]) == 1
    assert "1.tfrecord: record 9: its checksum is wrong" in capsys.readouterr().err
    file.write_bytes(good)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    imported(f"tfrecord:{masked}", output)
    assert raw_of(opened(output, objective="mlm_nsp").train.batch(np.arange(30))) == RAW


def test_a_second_process_is_refused(data, tmp_path, monkeypatch):
    output = tmp_path / "out"
    monkeypatch.setattr(import_data, "_write_pieces", lambda *_: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        imported(f"megatron:{data}", output)
    with (output / "work" / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = ["import", f"megatron:{data}", str(output), *LENGTH, "--workers", "1"]
        done = subprocess.run(
            [sys.executable, "-m", "bert_unpad.data", *command],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            timeout=TIMEOUT,
        )
    assert done.returncode == 2
    assert "output: expected no other process at work" in done.stderr


@pytest.mark.parametrize("kind", FORMATS)
def test_other_formats_as_a_source_print_the_command(kind, tmp_path):
    source = f"{kind}:/a b?validation=/c"
    message = rf"^source: expected text or shards:PATH, got {re.escape(source)}; .* after python "
    options = {"max_seq_length": 64, "vocab_file": "v.txt", "lowercase": False}
    with pytest.raises(ValueError, match=message) as failed:
        DataConfig(source, **options)
    command = str(failed.value).partition("after ")[2]
    assert command == (
        f"python -m bert_unpad.data import {shlex.quote(source)} OUTPUT --max-seq-length 64 "
        "--vocab-file v.txt --cased"
    )
    with pytest.raises(ValueError, match=r"^mixture: expected text or shards:PATH"):
        DataConfig(mixture={source: 1.0, "x": 1.0}, tokenizer="a/tokenizer.json")


def test_folders_and_files_of_other_formats_print_the_command(data, tmp_path):
    for place in (data, data / "train", data / "train" / "part0.idx"):
        for source in (str(place), f"shards:{place}"):
            with pytest.raises(ValueError, match=rf"import megatron:{place} OUTPUT --max-seq"):
                prepare(DataConfig(source, cache_dir=str(tmp_path / "cache")))


def test_a_run_trains_on_imported_examples(masked, tmp_path, capsys):
    pytest.importorskip("jsonargparse")
    import yaml

    from bert_unpad.pretrain import main as pretrain
    from tests.support.pretrain_runs import losses, tiny_settings

    source = imported(f"tfrecord:{masked}", tmp_path / "out")
    values = tiny_settings(
        tmp_path,
        data={"source": source, "max_seq_length": LONGEST},
        batching={"global_batch_size": 6},
        schedule={"total_steps": 3},
        evaluation={"examples": 0},
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    run = ["--config", str(tmp_path / "run.yaml"), "--run_dir", str(tmp_path / "run")]
    assert pretrain(run) == 0
    assert len(losses(tmp_path / "run")) == 3
    assert pretrain([*run, "--data.source", f"tfrecord:{masked}"]) == 2
    said = capsys.readouterr().err
    assert f"data.source: expected text or shards:PATH, got tfrecord:{masked}" in said


def test_damage_in_a_worker_is_named(data, tmp_path, capsys):
    (data / "train" / "part2.bin").write_bytes(b"")
    assert main(["import", f"megatron:{data}", str(tmp_path / "out"), "--workers", "2"]) == 1
    assert re.search(r"part2\.bin: expected [\d,]+ bytes, as part2\.idx", capsys.readouterr().err)
    with pytest.raises(DamagedDataError):
        imported(f"megatron:{data}", tmp_path / "other")
