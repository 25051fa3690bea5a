"""`data.source` FORMAT:PATH and examples:PATH, from the files' names to prepared data."""

from __future__ import annotations

import errno
import os
import shutil

import numpy as np
import pytest

from bert_unpad.data import DataConfig, ShardWriter, WordPieceTokenizer, prepare
from bert_unpad.data.readers import READERS, detect, kind_of
from bert_unpad.data.readers.cached import cached
from tests.support.masked_examples import LONGEST, VOCAB
from tests.support.token_files import random_sequences, write_megatron

SEQUENCES = random_sequences(30)


@pytest.fixture
def data(tmp_path):
    """A folder with training and held-out examples and their vocabulary."""
    write_megatron(tmp_path / "data" / "train" / "part", SEQUENCES[:20])
    write_megatron(tmp_path / "data" / "validation" / "part", SEQUENCES[20:])
    WordPieceTokenizer(VOCAB).save(tmp_path / "data" / "tokenizer")
    return tmp_path / "data"


def config(source, tmp_path, **options):
    options = {"objective": "mlm", "max_seq_length": LONGEST} | options
    return DataConfig(source=source, cache_dir=str(tmp_path / "cache"), **options)


@pytest.mark.parametrize("kind", ["megatron", "examples"])
def test_a_folder_of_splits(data, tmp_path, kind):
    settings = config(f"{kind}:{data}", tmp_path)
    prepared = prepare(settings)
    assert (len(prepared.train), len(prepared.validation)) == (20, 10)
    assert prepared.statistics["validation_tokens"] == sum(map(len, SEQUENCES[20:]))
    assert prepared.tokenizer.vocab_size == len(VOCAB)
    assert settings.segments == 1
    tokens = prepared.validation.batch(np.arange(10)).tokens.tolist()
    assert tokens == [t for ids in SEQUENCES[20:] for t in ids]


def test_held_out_examples_elsewhere_and_a_vocabulary_that_is_named(data, tmp_path):
    vocab = data / "tokenizer" / "vocab.txt"
    source = f"megatron:{data / 'train' / 'part.idx'}?validation={data / 'validation'}&add=none"
    prepared = prepare(config(source, tmp_path, vocab_file=str(vocab)))
    assert (len(prepared.train), len(prepared.validation)) == (20, 10)
    with pytest.raises(ValueError, match="vocab_file: expected the vocabulary"):
        prepare(config(source, tmp_path))


@pytest.mark.parametrize("elsewhere", ["", "?validation={}", "?validation={}/b.bin"])
def test_held_out_and_hidden_files_are_not_trained_on(tmp_path, elsewhere):
    folder = tmp_path / "data"
    held_out = folder / ("sub" if elsewhere else "validation")
    write_megatron(folder / "a", SEQUENCES[:20])
    write_megatron(held_out / "b", SEQUENCES[20:])
    write_megatron(folder / ".trash" / "c", SEQUENCES)
    WordPieceTokenizer(VOCAB).save(folder / "tokenizer")
    prepared = prepare(config(f"megatron:{folder}{elsewhere.format(held_out)}", tmp_path))
    assert (len(prepared.train), len(prepared.validation)) == (20, 10)


@pytest.mark.parametrize(
    "options", ["add=both", "long=yes", "unit=word", "column=x", "split=train", "add="]
)
def test_options_of_a_source_are_checked(data, tmp_path, options):
    message = (
        r"source: expected megatron:PATH or megatron:PATH\?validation=PATH&"
        r"add=none\|cls\|sep\|cls,sep&long=error\|cut\|split&unit=document\|sequence, got"
    )
    with pytest.raises(ValueError, match=message):
        prepare(config(f"megatron:{data}?{options}", tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "mlm_nsp"}, "objective: expected mlm or rtd with source megatron:"),
        ({"objective": "mlm_sop"}, "objective: expected mlm or rtd with source megatron:"),
        ({"documents": "joined"}, "documents: expected apart with source megatron:"),
        ({"max_seq_length": 9}, r"max_seq_length: expected at least \d+, for the longest"),
    ],
)
def test_settings_that_do_not_fit(data, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(config(f"megatron:{data}", tmp_path, **options))


def test_files_of_several_formats_or_none_are_an_error(data, tmp_path):
    (data / "train" / "x.parquet").touch()
    with pytest.raises(ValueError, match=r"got megatron and parquet files; megatron:.* chooses"):
        prepare(config(f"examples:{data}", tmp_path))
    assert kind_of(f"examples:{data}") is None
    with pytest.raises(ValueError, match=r"with one of these names at .*\*\.idx \(megatron\)"):
        detect(data / "tokenizer")
    for source in ("examples:no/such", "megatron:no/such"):
        with pytest.raises(FileNotFoundError, match="source: no/such does not exist"):
            prepare(config(source, tmp_path))
    for source in ("examples:", "megatron:"):
        with pytest.raises(ValueError, match=rf"source: expected {source}PATH"):
            prepare(config(source, tmp_path))


def test_shards_are_detected_too(tmp_path):
    with ShardWriter(
        tmp_path / "shard", vocab_size=100, unmaskable_ids=(0,), max_seq_length=9
    ) as writer:
        writer.append(*(np.array(x) for x in ([2, 7, 3], [3], [2], [0])))
    assert detect(tmp_path) == "shards"
    assert config(f"examples:{tmp_path}", tmp_path).segments == 2


@pytest.mark.parametrize("kind", [kind for kind, row in READERS.items() if row.package])
def test_a_missing_package_is_named(data, tmp_path, kind, monkeypatch):
    row = READERS[kind]

    def missing(name):
        raise ModuleNotFoundError(f"No module named {row.package!r}", name=f"{row.package}.part")

    monkeypatch.setattr("bert_unpad.data.readers.importlib.import_module", missing)
    message = rf"needs the package `{row.package}`: pip install 'bert_unpad\[{row.extra}\]'"
    with pytest.raises(ImportError, match=message):
        prepare(config(f"{kind}:{data}", tmp_path))


def test_what_a_killed_process_left_in_the_cache_is_removed(tmp_path):
    (tmp_path / "file").touch()
    arguments = (tmp_path / "cache", "kind", [tmp_path / "file"], [])
    made = cached(*arguments, lambda folder: None, lambda folder: folder)
    shutil.move(made, made.with_name(f".{made.name}.0123"))
    assert cached(*arguments, lambda folder: None, lambda folder: folder) == made
    assert list(made.parent.iterdir()) == [made]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_is_cached_outlives_errors_that_pass(tmp_path, number):
    (tmp_path / "file").touch()
    arguments = (tmp_path / "cache", "kind", [tmp_path / "file"], [])
    made = cached(*arguments, lambda folder: (folder / "a").write_text("a"), lambda folder: folder)

    def fails(folder):
        raise OSError(number, os.strerror(number), str(folder))

    with pytest.raises(OSError, match=os.strerror(number)):
        cached(*arguments, lambda folder: pytest.fail("it was made again"), fails)
    assert (made / "a").read_text() == "a"
    (made / "a").unlink()
    again = cached(
        *arguments, lambda folder: (folder / "a").write_text("b"), lambda f: (f / "a").read_text()
    )
    assert again == "b"


def test_what_is_cached_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (synced.add(os.fstat(handle).st_ino), fsync(handle))
    )

    def write(folder):
        for name in ("a", "b"):
            (folder / name).write_text(name)

    made = cached(tmp_path / "cache", "kind", [tmp_path / "file"], [], write, lambda folder: folder)
    assert {path.stat().st_ino for path in made.iterdir()} <= synced
