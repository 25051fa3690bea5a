"""`python -m bert_unpad.data`: prepare, merge and check; the trainer opens the result."""

import bz2
import contextlib
import dataclasses
import errno
import gzip
import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bert_unpad.data import DamagedDataError, DataConfig, cli, prepare
from bert_unpad.data.cli import main
from bert_unpad.data.formats.sources import open_source
from bert_unpad.data.preparation.locks import build_lock
from bert_unpad.data.preparation.ordered_sources import divide
from bert_unpad.data.preparation.pipeline import Pipeline
from bert_unpad.data.prepared import read_prepared
from tests.support.paths import ROOT
from tests.support.prepared_text import contents, write_corpus
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(folder, random.Random(derived(0)))
    return folder


def arguments(text, output, *more):
    options = ["--max-seq-length", "48", "--vocab-size", "200", "--validation-share", "0.1"]
    options += ["--block-mb", "0.01", "--source", str(text)]
    return ["prepare", str(output), *options, *more]


@pytest.fixture(scope="module")
def prepared(text, tmp_path_factory):
    output = tmp_path_factory.mktemp("prepared") / "out"
    assert main(arguments(text, output, "--workers", "1")) == 0
    return output


def test_summary_and_what_is_written(text, prepared, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "AT_ONCE", 100)
    assert main(arguments(text, tmp_path / "out", "--workers", "2", "--memory", "1.5")) == 0
    said = capsys.readouterr().out
    data = prepare(DataConfig(f"shards:{prepared}", max_seq_length=48), progress=False)
    assert f"{len(data.train):,} examples, {data.train.num_tokens:,} tokens; lengths: mean" in said
    assert f"longest {data.train.lengths.max()}" in said
    for stage in ("read", "duplicates", "vocabulary", "tokenize", "examples"):
        assert f"\n{stage}: " in said
    assert said.count("MB/s a worker") == 5
    lengths = data.train.lengths
    quantiles = np.quantile(lengths, [0.25, 0.5, 0.75, 0.95], method="inverted_cdf").tolist()
    assert "quartiles {}, {}, {}, 95 % up to {}, longest".format(*quantiles) in said
    assert contents(tmp_path / "out") == contents(prepared)
    assert main(arguments(text, tmp_path / "out")) == 0
    assert "is complete; remove it to prepare it again" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max-seq-length", "64"], "expected max_seq_length 48, got 64"),
        (["--source", "stdlib"], "expected source '.*text', got 'stdlib'"),
        (["--block-mb", "1"], "expected block_bytes 10485, got 1048576"),
    ],
)
def test_a_finished_folder_of_other_settings_is_refused(text, prepared, capsys, given, message):
    with pytest.raises(SystemExit):
        main(arguments(text, prepared, *given))
    assert re.search(f"output: .*begun with other settings .*: {message}", capsys.readouterr().err)


def test_parts(text, prepared, tmp_path, capsys):
    output = tmp_path / "out"
    for stage in ("read", "examples"):
        for part in ("1/2", "2/2"):
            given = ["--part", part, "--stage", stage, "--workers", "1"]
            assert main(arguments(text, output, *given)) == 0
    assert "part 2 of 2 is done" in capsys.readouterr().out
    assert main(["merge", str(output)]) == 0
    assert "duplicates left out" in capsys.readouterr().out
    assert contents(output) == contents(prepared)


def test_a_second_command_at_once_is_refused(text, tmp_path, capsys):
    output = tmp_path / "out"
    assert main(arguments(text, output, "--part", "1/2", "--stage", "read")) == 0
    for given in (arguments(text, output), ["merge", str(output)]):
        with build_lock(output / "work", alone=False), pytest.raises(SystemExit) as error:
            main(given)
        assert error.value.code == 2
        assert f"output: expected no other process at work in {output}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same documents in files that are read in order, as JSON Lines, and as plain text."""
    folder = tmp_path_factory.mktemp("files")
    texts = write_corpus(folder / "other", random.Random(derived(0)), documents=240)
    for name in ("plain", "packed", "lines"):
        (folder / name).mkdir()
    for number, first in enumerate(range(0, len(texts), 25)):
        some = texts[first : first + 25]
        blank = "\n\n".join(some).encode()
        lines = "\n".join(json.dumps({"text": text}) for text in some).encode()
        (folder / "plain" / f"{number:02}.txt").write_bytes(blank)
        with (folder / "lines" / f"{number // 9}.jsonl").open("ab") as file:
            file.write(lines + b"\n")
        ending, data = [
            (".txt.gz", gzip.compress(blank)),
            (".jsonl", lines),
            (".jsonl.xz", lzma.compress(lines)),
            (".txt.bz2", bz2.compress(blank)),
        ][number % 4]
        (folder / "packed" / f"{number:02}{ending}").write_bytes(data)
    assert len(divide(open_source(str(folder / "packed"), cache_dir=folder), _smallest(folder))) > 3
    return folder


def _smallest(files):
    """Bytes of blocks with which every compressed file is a part of the work."""
    return min(path.stat().st_size for path in (files / "packed").iterdir())


@pytest.mark.parametrize("source", ["packed", "lines"])
def test_compressed_text_and_json_lines_in_parallel(files, tmp_path, source):
    def run(name, *given, source=source):
        command = arguments(files / source, tmp_path / name, *given)
        command[command.index("--block-mb") + 1] = str(_smallest(files) / 2**20)
        assert main(command) == 0

    run("one", "--workers", "1")
    run("two", "--workers", "2")
    for stage in ("read", "examples"):
        for number in (2, 3, 1):
            run("three", "--part", f"{number}/3", "--stage", stage, "--workers", "1")
    assert main(["merge", str(tmp_path / "three")]) == 0
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert contents(tmp_path / "three") == contents(tmp_path / "one")
    run("plain", "--workers", "1", source="plain")
    found, expected = (read_prepared(tmp_path / name) for name in ("one", "plain"))
    assert found["settings"]["corpus"] == expected["settings"]["corpus"]
    for name in ("documents", "duplicates", "train_documents", "validation_documents"):
        assert found["statistics"][name] == expected["statistics"][name]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_damaged_file_is_named_whoever_reads_it(files, tmp_path, capsys, workers):
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in (files / "packed").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damaged = sorted(folder.glob("*.gz"))[-1]
    damaged.write_bytes(damaged.read_bytes()[:-9])
    command = arguments(folder, tmp_path / "out", "--workers", workers)
    command[command.index("--block-mb") + 1] = str(_smallest(files) / 2**20)
    assert main(command) == 1
    assert f"{damaged}: expected a complete .gz file" in capsys.readouterr().err


def test_killed_with_its_workers(text, prepared, tmp_path):
    """SIGKILL of the command alone: its workers must end too, and what they did is kept."""
    output = tmp_path / "out"
    command = [sys.executable, "-m", "bert_unpad.data"]
    command += arguments(text, output, "--workers", "2")
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + TIMEOUT
    while not list(output.glob("work/spool/*.npy")) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not group_lives(process.pid)
    assert (output / "work").exists()
    assert main(arguments(text, output, "--workers", "1")) == 0
    assert contents(output) == contents(prepared)


def group_lives(group):
    """Whether a process of the group runs; one that has ended and was not waited for does not."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, found, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(found) == group and state != "Z":
            return True
    return False


def test_the_trainer_opens_it(prepared, tmp_path):
    config = DataConfig(f"shards:{prepared}", max_seq_length=48)
    data = prepare(config, progress=False)
    assert len(data.train) > 100
    assert 0 < len(data.validation) < len(data.train)
    assert set(np.unique(data.train.next_sentence_labels)) <= {0, 1, -100}
    labels = prepare(dataclasses.replace(config, objective="mlm"), progress=False).train.batch(
        np.arange(20)
    )
    assert (labels.next_sentence_labels == -100).all()
    inputs = data.collator()(np.arange(20), 0)
    assert len(inputs.masked_positions)
    for change, message in (
        ({"objective": "mlm_sop"}, "objective: expected one whose examples are those of"),
        ({"max_seq_length": 20}, "max_seq_length: expected at least"),
        ({"objective": "mlm", "documents": "joined"}, "documents: expected apart, as the examples"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(dataclasses.replace(config, **change), progress=False)


def test_sentence_order_is_opened_as_what_it_is(text, tmp_path):
    given = ["--workers", "1", "--objective", "mlm_sop"]
    assert main(arguments(text, tmp_path / "out", *given)) == 0
    config = DataConfig(f"shards:{tmp_path / 'out'}", max_seq_length=48, objective="mlm_sop")
    assert len(prepare(config, progress=False).train) > 100
    with pytest.raises(ValueError, match="objective: expected one whose examples"):
        prepare(dataclasses.replace(config, objective="mlm_nsp"), progress=False)


def test_check_finds_what_opening_does_not(prepared, tmp_path, capsys):
    files = contents(prepared)
    folder = tmp_path / "copy"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    assert main(["check", str(folder)]) == 0
    assert "as written" in capsys.readouterr().out
    config = DataConfig(f"shards:{folder}", max_seq_length=48)
    for name in ("train/tokens-000003.bin", "train/lengths.bin", "validation/offsets.bin"):
        damaged = bytearray(files[name])
        damaged[len(damaged) // 2 & ~1] ^= 1
        (folder / name).write_bytes(damaged)
        assert main(["check", str(folder)]) == 1
        assert f"{folder / name} was altered" in capsys.readouterr().err
        (folder / name).write_bytes(files[name])
    for name in ("manifest.json", "train/manifest.json", "tokenizer/vocab.txt"):
        (folder / name).write_bytes(files[name].replace(b"1", b"2"))
        with pytest.raises(DamagedDataError, match=name.rpartition("/")[2]):
            prepare(config, progress=False)
        (folder / name).write_bytes(files[name])
    (folder / "train/tokens-000003.bin").unlink()
    with pytest.raises(DamagedDataError, match=r"tokens-000003\.bin is missing; expected"):
        prepare(config, progress=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--part", "3"], "--part: expected I/N, such as 1/16, got '3'"),
        (["--part", "3/2"], "part: expected 1/n to n/n, got 3/2"),
        (["--stage", "read"], "--stage: expected --part beside it"),
        (["--memory", "0.5"], "memory: expected 1,000,000,000 bytes or more, got 500,000,000"),
        (["--memory", "inf"], "--memory: expected a number of 0 or more, got 'inf'"),
        (["--block-mb", "nan"], "--block-mb: expected a number of 0 or more, got 'nan'"),
        (["--vocab-sample-mb", "-1"], "--vocab-sample-mb: expected a number of 0 or more"),
        (["--wait", "0"], "--wait: expected a number above 0, got '0'"),
        (["--workers", "0"], "--workers: expected an integer of 1 or more, got '0'"),
        (["--address", "auto"], "--address: expected --engine ray beside it, got auto"),
        (["--block-mb", "0"], "--block-mb: expected a number above 0, got '0'"),
        (["--block-mb", "1e-9"], "block_bytes: expected 1 or more, got 0"),
        (["--source", "shards:/tmp"], "--source: expected text .* got shards:/tmp"),
        (["--source", "stream:c4"], "--source: expected text .* got stream:c4"),
        (["--source", "/nothing"], "source: /nothing does not exist"),
        (["--objective", "mlm", "--dupe-factor", "2"], "dupe_factor: expected 1 with objective"),
    ],
)
def test_bad_arguments_are_named(text, tmp_path, capsys, given, message):
    with pytest.raises(SystemExit) as error:
        main(arguments(text, tmp_path / "out", *given))
    assert error.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_result_within_the_source_is_refused(text, tmp_path, capsys, monkeypatch):
    (tmp_path / "text").mkdir()
    for path in text.iterdir():
        (tmp_path / "text" / path.name).write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    for source, output in (("text", "text/out"), (".", "./other/out"), ("text", "text")):
        with pytest.raises(SystemExit):
            main(arguments(source, output))
        said = capsys.readouterr().err
        assert f"output: expected a folder outside of {source}, whose files are all read" in said
    config = DataConfig("text", cache_dir="text/cache")
    with pytest.raises(ValueError, match="cache_dir: expected a folder outside of text"):
        prepare(config, progress=False)
    assert main(arguments("text", "text/.out", "--workers", "1")) == 0
    assert main(arguments("text/000.txt", "text/000.txt.prepared", "--workers", "1")) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (OSError(errno.EIO, "Input/output error"), 1),
        (PermissionError(errno.EACCES, "Permission denied"), 1),
        (BlockingIOError("output: expected no other process"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), 2),
    ],
)
def test_a_disk_that_fails_is_no_bad_argument(text, tmp_path, capsys, monkeypatch, error, code):
    def fails(*_):
        raise error

    monkeypatch.setattr(Pipeline, "run", fails)
    with contextlib.suppress(SystemExit):
        assert main(arguments(text, tmp_path / "out", "--workers", "1")) == code == 1
    said = capsys.readouterr().err
    assert (error.strerror or str(error)) in said
    assert ("usage:" in said) == (code == 2)


@pytest.mark.parametrize("manifest", ["{}", '{"format": "bert_unpad prepared data, vers', "[]"])
def test_merging_deletes_no_work_of_others(tmp_path, manifest):
    (tmp_path / "manifest.json").write_text(manifest)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("Mine.")
    with contextlib.suppress(SystemExit):
        assert main(["merge", str(tmp_path)]) == 1
    assert (tmp_path / "work" / "thesis.txt").exists()


def test_merging_a_finished_folder_removes_its_work_only(text, tmp_path):
    output = tmp_path / "out"
    assert main(arguments(text, output, "--workers", "1")) == 0
    (output / "work" / "spool").mkdir(parents=True)
    assert main(["merge", str(output)]) == 0
    assert (output / "work").exists()
    (output / "work" / "settings.json").write_text("{}")
    assert main(["merge", str(output)]) == 0
    assert not (output / "work").exists()


def test_one_shard_of_a_prepared_folder_opens(prepared):
    vocab = str(prepared / "tokenizer" / "vocab.txt")
    whole = prepare(DataConfig(f"shards:{prepared}", max_seq_length=48))
    part = prepare(DataConfig(f"shards:{prepared / 'train'}", vocab_file=vocab, max_seq_length=48))
    assert (len(part.train), len(part.validation)) == (len(whole.train), 0)


def test_folders_without_data_are_named(tmp_path, capsys):
    for command, message in (("merge", "expected a preparation"), ("check", "does not exist")):
        with pytest.raises(SystemExit):
            main([command, str(tmp_path / "nothing")])
        assert message in capsys.readouterr().err
    assert main(["check", str(tmp_path)]) == 1
    assert "manifest.json is missing" in capsys.readouterr().err
