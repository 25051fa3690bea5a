"""Text that is read while it is trained on, with the real `datasets` on local files."""

import itertools
import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch
import yaml

from bert_unpad.data import DataConfig, TokenMasker, WordPieceTokenizer, pack_examples, prepare
from bert_unpad.data.store.example_batch import ExampleBatch
from bert_unpad.data.streams.text_stream import TextStream
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS
from bert_unpad.pretrain import main
from bert_unpad.pretrain.config import ConfigError, read_config
from tests.support.pretrain_runs import WORDS, losses, tiny_settings, uses
from tests.support.seeds import derived

datasets = pytest.importorskip("datasets")

ROWS = 240
SHARDS = 4  # files
BUFFER = 12
FIRST = 100  # so that all numbers have three digits, and none is what is left of a cut one
# Every row has a word of its own, so that an example's tokens say which rows it is of.
TOKENIZER = WordPieceTokenizer(
    [*SPECIAL_TOKENS, ".", *WORDS, *(f"r{FIRST + i}" for i in range(ROWS))]
)
ROW = {TOKENIZER.vocabulary.index(f"r{FIRST + i}"): i for i in range(ROWS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows in JSON lines, plain text and Parquet; every 40th is empty."""
    path = tmp_path_factory.mktemp("rows")
    rng = np.random.default_rng(derived(5))
    rows = []
    for i in range(ROWS):
        sentences = (
            " ".join([f"R{FIRST + i}", *rng.choice(WORDS, n)]) for n in rng.integers(1, 12, 3)
        )
        rows.append({"text": "" if i % 40 == 7 else ". ".join(sentences) + ".", "n": i})
    for shard in range(SHARDS):
        part = rows[shard * ROWS // SHARDS : (shard + 1) * ROWS // SHARDS]
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (path / f"part{shard}.jsonl").write_text(lines)
        (path / f"part{shard}.txt").write_text("".join(row["text"] + "\n" for row in part))
        datasets.Dataset.from_list(part).to_parquet(path / f"part{shard}.parquet")
    return path


def load(folder, kind="json", suffix="jsonl"):
    return datasets.load_dataset(
        kind, data_files=f"{folder}/*.{suffix}", split="train", streaming=True
    )


def stream(dataset, rank=0, num_ranks=1, **options):
    defaults = {"max_seq_length": 32, "shuffle_buffer": BUFFER, "seed": 3}
    return TextStream(dataset, TOKENIZER, rank, num_ranks, **(defaults | options))


def read(text_stream, epoch=0, start=0, batch_size=7):
    return ExampleBatch.concatenate(list(text_stream.batches(epoch, start, batch_size)))


def rows_of(examples):
    """Rows that some sentence of the examples is of."""
    return {ROW[token] for token in examples.tokens.tolist() if token in ROW}


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_each_row_is_read_by_one_rank(folder, num_ranks):
    """Whole files where the ranks divide their number, rows else."""
    dataset = load(folder)
    parts = [read(stream(dataset, rank, num_ranks)) for rank in range(num_ranks)]
    found = [rows_of(part) for part in parts]
    assert set().union(*found) == {i for i in range(ROWS) if i % 40 != 7}
    assert all(not a & b for a, b in itertools.combinations(found, 2))
    ids = np.concatenate([part.ids for part in parts])
    assert len(np.unique(ids)) == len(ids)
    if num_ranks == SHARDS:
        assert len({row * SHARDS // ROWS for row in found[1]}) == 1


@pytest.mark.parametrize(("kind", "suffix"), [("text", "txt"), ("parquet", "parquet")])
def test_formats_give_the_same_examples(folder, kind, suffix):
    expected, found = (read(stream(load(folder, *kinds))) for kinds in ((), (kind, suffix)))
    assert found.checksum() == expected.checksum()


def test_examples_are_pairs_as_prepared_ones_are(folder):
    examples = read(stream(load(folder)), batch_size=5)
    assert examples.lengths.min() >= 5
    assert 20 < examples.lengths.max() <= 32
    begins = np.cumsum(examples.lengths) - examples.lengths
    assert (examples.tokens[begins] == TOKENIZER.cls_id).all()
    assert (examples.tokens[begins + examples.second_starts - 1] == TOKENIZER.sep_id).all()
    assert (examples.tokens[begins + examples.lengths - 1] == TOKENIZER.sep_id).all()
    counts = np.bincount(examples.next_sentence_labels, minlength=2)
    assert counts.min() > 0.3 * len(examples)
    inputs = pack_examples(examples, TokenMasker(TOKENIZER), 0)
    assert inputs.batch.total == examples.lengths.sum()


@pytest.mark.parametrize(
    ("objective", "documents", "labels"),
    [("mlm", "apart", {-100}), ("mlm", "joined", {-100}), ("mlm_sop", "apart", {0, 1})],
)
def test_examples_of_other_objectives(folder, objective, documents, labels):
    reader = stream(load(folder), objective=objective, documents=documents)
    examples = read(reader)
    assert set(examples.next_sentence_labels.tolist()) == labels
    if objective == "mlm":
        np.testing.assert_array_equal(examples.second_starts, examples.lengths)
        assert rows_of(examples) == {i for i in range(ROWS) if i % 40 != 7}
        full = np.mean(examples.lengths >= 30)
        assert full > 0.5 if documents == "joined" else full < 0.5
    assert reader.identity() != stream(load(folder)).identity()
    half = len(examples) // 2
    assert read(reader, start=half).checksum() == examples[half:].checksum()


def test_order_depends_on_seed_and_epoch(folder):
    dataset = load(folder)
    one = stream(dataset)
    first, again, later = read(one), read(one), read(one, epoch=1)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, later.tokens)
    assert rows_of(first) == rows_of(later)
    assert not np.array_equal(first.tokens, read(stream(dataset, seed=4)).tokens)


@pytest.mark.parametrize(
    "change", [{"epoch": None}, {"examples": -1}, {"buffer": float("inf")}, {"state": []}]
)
def test_damaged_places_are_refused(folder, change):
    place = {"epoch": 0, "examples": 0, "buffer": 0, "state": {}}
    reader = stream(load(folder))
    reader.go_to(place)
    for damaged in (place | change, [], {}):
        with pytest.raises(ValueError, match=r"^place: "):
            reader.go_to(damaged)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_reading_goes_on_anywhere(folder, num_ranks, monkeypatch):
    """In another process, from a place as JSON; without reading what comes before."""
    rows_read = []
    text = TextStream._text
    monkeypatch.setattr(TextStream, "_text", lambda *args: rows_read.append(0) or text(*args))
    rank = num_ranks - 1
    whole = stream(load(folder), rank, num_ranks)
    every = read(whole)
    assert len(rows_read) == ROWS // num_ranks
    assert whole.place(0, 0) is None  # a first buffer is read from the beginning
    for start in (0, 1, len(every) // 2, len(every) - 1):
        seen = stream(load(folder), rank, num_ranks)
        list(itertools.islice(seen.batches(0, 0, 7), start // 7 + 1))
        place = json.loads(json.dumps(seen.place(0, start)))
        fresh = stream(load(folder), rank, num_ranks)
        if place is not None:
            fresh.go_to(place)
            assert 0 <= start - place["examples"] < 6 * BUFFER
        rows_read.clear()
        rest = read(fresh, start=start)
        np.testing.assert_array_equal(rest.tokens, every[start:].tokens)
        np.testing.assert_array_equal(rest.ids, every[start:].ids)
    assert place is not None
    assert len(rows_read) < ROWS // num_ranks / 2
    assert not list(fresh.batches(0, len(every), 7))
    np.testing.assert_array_equal(read(fresh, epoch=1).tokens, read(whole, epoch=1).tokens)


def test_bad_input(folder):
    with pytest.raises(ValueError, match="no column 'body'; expected one of text, n"):
        read(stream(load(folder), column="body"))
    with pytest.raises(ValueError, match=r"expected text in column 'n'.*, got int"):
        read(stream(load(folder), column="n"))
    with pytest.raises(TypeError, match=r"dataset: expected an IterableDataset.*, got Dataset"):
        stream(datasets.Dataset.from_list([{"text": "a"}]))
    with pytest.raises(ValueError, match="rank: expected 0 to 1, got 2"):
        stream(load(folder), 2, 2)
    with pytest.raises(ValueError, match="shuffle_buffer: expected 1 or more"):
        stream(load(folder), shuffle_buffer=0)
    with pytest.raises(
        ValueError, match=r"state: expected 2 ranks, .* in the middle of epoch 1, got"
    ):
        stream(load(folder)).continue_after(1, [[3, 4]])


def config(folder, options="", **changes):
    source = f"stream:json?data_files={folder}/*.jsonl&sample=100{options}"
    values = {"cache_dir": str(folder / "cache"), "max_seq_length": 32, "vocab_size": 160}
    return DataConfig(**(values | {"source": source, "validation_share": 0.2} | changes))


def test_the_sample_gives_vocabulary_and_held_out_documents(folder):
    data = prepare(config(folder), progress=False)
    held_out = data.statistics["validation_documents"]
    assert 5 < held_out < 40
    assert data.statistics["documents"] == 97  # of 100 rows 3 are empty
    text = words_of(data.validation.batch(np.arange(len(data.validation))), data.tokenizer)
    trained = words_of(read(data.open_stream(0, 1, shuffle_buffer=50)), data.tokenizer)
    whole = prepare(config(folder, validation_share=0), progress=False)
    assert not len(whole.validation)
    everything = words_of(read(whole.open_stream(0, 1)), whole.tokenizer)
    assert text
    assert not text & trained
    assert text < everything


def words_of(examples, tokenizer):
    """The words R100, R101, ... that tell the rows of the examples."""
    words = tokenizer.decode(examples.tokens).split()
    return {word for word in words if re.fullmatch(r"r\d{3}", word)}


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ("&limit=5", {}, "stream: has no option limit"),
        ("&column=body", {}, "no column 'body'"),
        ("&colum=body", {}, "expected hf:NAME.*got colum"),
        ("", {"dupe_factor": 2}, "dupe_factor: expected 1"),
        ("", {"validation_share": 1e-9}, "validation_share: expected at least 2 held-out"),
    ],
)
def test_bad_settings(folder, options, changes, message):
    with pytest.raises(ValueError, match=message):
        prepare(config(folder, options, **changes), progress=False)


def test_without_the_package(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="needs the package `datasets`: pip install"):
        prepare(config(folder), progress=False)


def test_what_needs_an_index_is_refused(folder):
    arguments = ["--data.source", config(folder).source, "--batching.batch_size_per_rank", "2"]
    with pytest.raises(ConfigError, match=r"batching\.strategy: expected exchange with data"):
        read_config([*arguments, "--schedule.total_steps", "5"])
    with pytest.raises(ConfigError, match=r"schedule\.total_steps: expected a number with data"):
        read_config([*arguments, "--schedule.epochs", "1", "--batching.strategy", "exchange"])


def test_a_run_is_resumed_where_it_was(folder, tmp_path, monkeypatch):
    """In the second epoch: the same examples and bits, and little is read again."""
    data = config(folder)
    names = ("source", "cache_dir", "max_seq_length", "vocab_size", "validation_share")
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    values = tiny_settings(
        tmp_path,
        data={name: getattr(data, name) for name in names},
        batching={"strategy": "exchange", "global_batch_size": 24, "shuffle_buffer": 8},
        schedule={"total_steps": 26},
        checkpoint={"every": 24, "keep_last": 2},
        logging={"examples": True},
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    rows_read = []
    text = TextStream._text
    monkeypatch.setattr(TextStream, "_text", lambda *args: rows_read.append(0) or text(*args))
    control, resumed = tmp_path / "control", tmp_path / "resumed"
    assert main(["--config", str(tmp_path / "run.yaml"), "--run_dir", str(control)]) == 0
    assert len(rows_read) > ROWS
    shutil.copytree(control, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-000000026")
    rows_read.clear()
    assert main(["--config", str(tmp_path / "run.yaml"), "--run_dir", str(resumed)]) == 0
    assert len(rows_read) < ROWS
    assert losses(resumed) == losses(control)
    found = uses(control)
    assert set(found) == {0, 1}
    assert set(found[0].values()) == {1}
    assert uses(resumed) == found
