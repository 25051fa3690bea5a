"""Preparing: the same bytes whoever did which part of the work, and whatever was killed."""

import contextlib
import dataclasses
import itertools
import os
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest

from bert_unpad.data import DataConfig, ShardDataset
from bert_unpad.data.formats.sources import open_files
from bert_unpad.data.preparation import duplicates, join, pieces
from bert_unpad.data.preparation.engines import InProcess, Processes
from bert_unpad.data.preparation.join import join_parts
from bert_unpad.data.preparation.parts import Part
from bert_unpad.data.preparation.pipeline import LEAST_MEMORY, Pipeline
from bert_unpad.data.prepared import SPLITS, is_prepared, open_prepared
from bert_unpad.data.text.json_tokenizer import load_tokenizer
from tests.support.pipelines import BLOCK, child, pipeline
from tests.support.prepared_text import contents
from tests.support.processes import TIMEOUT
from tests.support.seeds import derived
from tests.support.sentences import split_sentences


def test_documents_are_what_they_were(corpus, expected):
    _, texts = corpus
    train, held_out, manifest = open_prepared(expected, verify=True)
    distinct = list(dict.fromkeys(" ".join(split_sentences(text)) for text in texts))
    counts = manifest["statistics"]
    assert counts["documents"] == len(distinct)
    assert counts["duplicates"] == len(texts) - len(distinct)
    assert counts["train_documents"] + counts["validation_documents"] == len(distinct)
    assert 0.02 < counts["validation_documents"] / len(distinct) < 0.25
    assert counts["train_examples"] == len(train)
    assert counts["train_tokens"] == train.num_tokens == len(train.tokens)
    assert len(train._token_paths) > 5
    assert sorted(path.name for path in expected.iterdir()) == [
        *("manifest.json", "tokenizer", "train", "validation")
    ]
    tokenizer = load_tokenizer(expected / "tokenizer")
    texts = [" ".join(tokenizer.decode(e.input_ids) for e in part) for part in (train, held_out)]
    # Each sentence begins with its document's number; one at a segment's end may be cut off.
    numbers = [set(re.findall(r"\bn(\d+) \w", text)) for text in texts]
    assert not numbers[0] & numbers[1]
    assert len(numbers[0] | numbers[1]) > 0.9 * len(distinct)


def test_two_processes(corpus, expected, tmp_path):
    with Processes(2) as engine:
        pipeline(corpus, tmp_path / "out", engine).run()
    assert contents(tmp_path / "out") == contents(expected)


def test_text_without_ends_of_documents_is_reported(corpus, tmp_path, caplog, monkeypatch):
    config, _ = corpus
    monkeypatch.setattr(join, "AT_ONCE", 7)
    (tmp_path / "lines.txt").write_text("".join(f"Line {i} of the text.\n" for i in range(900)))
    source = open_files(tmp_path / "lines.txt")
    config = dataclasses.replace(config, source=source.name, validation_share=0.0)
    Pipeline(tmp_path / "nsp", config, source, InProcess(), block_bytes=2000).run()
    labels = ShardDataset(tmp_path / "nsp" / "train").next_sentence_labels
    assert len(labels) > 7
    assert set(labels.tolist()) == {0}
    assert "only 0 % of the pairs have a random second segment" in caplog.text
    caplog.clear()
    pipeline(corpus, tmp_path / "whole").run()
    config = dataclasses.replace(config, objective="mlm_sop")
    Pipeline(tmp_path / "sop", config, source, InProcess(), block_bytes=2000).run()
    assert "random second segment" not in caplog.text


def test_killed_at_random_moments(corpus, expected, tmp_path):
    process = child(corpus, tmp_path / "whole")
    begun = time.monotonic()
    process.join(TIMEOUT)
    assert process.exitcode == 0
    seconds = time.monotonic() - begun
    rng, output = random.Random(derived(0)), tmp_path / "out"
    for _ in range(10):
        if is_prepared(output):
            break
        process = child(corpus, output)
        time.sleep(rng.uniform(0, seconds / 5))
        process.kill()  # if it has not ended
        process.join(TIMEOUT)
    if is_prepared(output):
        join_parts(output)  # removes what it was killed over
    else:
        process = child(corpus, output)
        process.join(TIMEOUT)
        assert process.exitcode == 0
    assert contents(output) == contents(expected)


class Interrupted(Exception):
    pass


@pytest.fixture(scope="module")
def unjoined(corpus, tmp_path_factory):
    """All but joining is done."""
    output = tmp_path_factory.mktemp("unjoined") / "out"
    work = pipeline(corpus, output, part=Part())
    work.read()
    work.plan()
    work.make_examples()
    return output


@pytest.mark.parametrize("name", ["rename", "replace", "fsync"])
def test_killed_while_joining(corpus, unjoined, expected, tmp_path, monkeypatch, name):
    """Stops before each file gets its name or is on disk, which it then never is; later goes on."""
    original = getattr(os, name)
    for call in itertools.count():
        output, left = tmp_path / str(call), [call]
        shutil.copytree(unjoined, output)

        def stop(*arguments, left=left):
            if not left[0]:
                if name == "fsync":
                    with contextlib.suppress(OSError):  # a folder
                        os.truncate(f"/proc/self/fd/{arguments[0]}", 0)
                raise Interrupted
            left[0] -= 1
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, stop)
            try:
                join_parts(output)
                break
            except Interrupted:
                pass
        pipeline(corpus, output).run()
        assert contents(output) == contents(expected)
    assert call >= {"rename": 10, "replace": 3, "fsync": 10}[name]


def test_ranges_of_digests_find_the_same(corpus, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(duplicates, "_BYTES_PER_DOCUMENT", LEAST_MEMORY // 80)
    pipeline(corpus, tmp_path / "out", memory=LEAST_MEMORY).run()
    assert contents(tmp_path / "out") == contents(expected)
    assert duplicates.num_ranges(400, LEAST_MEMORY // 2) == 10


class Killed(InProcess):
    """Runs every job twice, as if the first worker had been lost before it could answer."""

    def run(self, job, arguments):
        for one in arguments:
            job(*one)
        yield from super().run(job, arguments)


def test_jobs_may_run_again(corpus, expected, tmp_path):
    pipeline(corpus, tmp_path / "out", Killed()).run()
    assert contents(tmp_path / "out") == contents(expected)


@pytest.mark.parametrize("moment", ["tokenize", "make_examples"])
def test_another_worker_is_quicker(corpus, tmp_path, monkeypatch, moment):
    work = pipeline(corpus, tmp_path / "out")
    work.read()
    work.plan()
    piece = work.build.piece("train", 0)
    original, quicker = getattr(pieces, moment), []

    def late(*arguments, **options):
        if not quicker:
            quicker.append(None)
            pieces.make_piece(work.build, "train", 0)
            quicker[0] = contents(piece)
        return original(*arguments, **options)

    monkeypatch.setattr(pieces, moment, late)
    pieces.make_piece(work.build, "train", 0)
    assert quicker == [contents(piece)]
    assert list(piece.parent.iterdir()) == [piece]


class Listed:
    """A source that is read in order, with an error after some documents."""

    name = "listed"

    def __init__(self, texts, last=10**9):
        self.texts, self.last, self.read = texts, last, 0

    def documents(self):
        for text in self.texts[: self.last]:
            self.read += 1
            yield text
        if self.last < len(self.texts):
            raise ConnectionError("the stream has ended early")


def test_sources_that_are_read_in_order(corpus, expected, tmp_path):
    config, texts = corpus
    for last in (10, 200, 390):
        work = Pipeline(
            tmp_path / "out", config, Listed(texts, last), InProcess(), block_bytes=BLOCK
        )
        with pytest.raises(ConnectionError):
            work.run()
    Pipeline(tmp_path / "out", config, Listed(texts), InProcess(), block_bytes=BLOCK).run()
    whole = tmp_path / "whole"
    Pipeline(whole, config, Listed(texts), InProcess(), block_bytes=BLOCK).run()
    assert contents(tmp_path / "out") == contents(whole)
    # The same documents in the same order as from files, in other blocks.
    found, other = (open_prepared(folder)[2] for folder in (whole, expected))
    assert found["settings"]["corpus"] == other["settings"]["corpus"]
    for name in ("documents", "duplicates", "train_documents", "validation_documents"):
        assert found["statistics"][name] == other["statistics"][name]


def test_block_size_changes_pairs_but_no_document(corpus, expected, tmp_path):
    pipeline(corpus, tmp_path / "out", block_bytes=1 << 20).run()
    found, other = (
        open_prepared(folder)[2]["statistics"] for folder in (tmp_path / "out", expected)
    )
    assert found["train_documents"] == other["train_documents"]
    for split in SPLITS:
        one, two = (ShardDataset(folder / split) for folder in (tmp_path / "out", expected))
        assert not np.array_equal(one.lengths, two.lengths)


def test_bad_input(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"memory: expected 1,000,000,000 bytes or more, got 5"):
        pipeline(corpus, tmp_path / "out", memory=5)
    with pytest.raises(ValueError, match="block_bytes: expected 1 or more, got 0"):
        pipeline(corpus, tmp_path / "out", block_bytes=0)
    with pytest.raises(ValueError, match="workers: expected at least 1, got 0"):
        Processes(0)
    for number, count in ((0, 3), (4, 3), (1, 0)):
        with pytest.raises(ValueError, match=f"part: expected 1/n to n/n, got {number}/{count}"):
            Part(number, count)
    with pytest.raises(ValueError, match="output: expected a preparation that was begun in"):
        join_parts(tmp_path)
    (tmp_path / "taken" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"output: expected a new folder, .* with train"):
        pipeline(corpus, tmp_path / "taken")
    pipeline(corpus, tmp_path / "out").read()
    other = tmp_path / "other.txt"
    other.write_text("Something else.")
    with pytest.raises(ValueError, match=r"output: .*begun with other settings .*block_bytes 6000"):
        pipeline(corpus, tmp_path / "out", block_bytes=7000)
    config, _ = corpus
    with pytest.raises(ValueError, match=r"expected the files of .* as they were then, got others"):
        Pipeline(tmp_path / "out", config, open_files(other), InProcess(), block_bytes=BLOCK)
    with pytest.raises(ValueError, match="output: expected parts that have read"):
        join_parts(tmp_path / "out")


def killed_job(number):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_ends_the_run_with_what_to_do():
    with Processes(1) as engine, pytest.raises(RuntimeError, match="a worker was killed"):
        list(engine.run(killed_job, [(1,)]))


def test_given_tokenizers(corpus, expected, tmp_path):
    config, texts = corpus
    tokenizer = load_tokenizer(expected / "tokenizer")
    tokenizer.save(tmp_path)
    given = DataConfig(
        config.source,
        max_seq_length=48,
        validation_share=0.1,
        vocab_file=str(tmp_path / "vocab.txt"),
    )
    pipeline((given, texts), tmp_path / "out").run()
    for split in SPLITS:
        assert contents(tmp_path / "out" / split) == contents(expected / split)
