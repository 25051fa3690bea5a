"""TFRecord files of BERT examples: real and independent writers, damaged and hostile files."""

from __future__ import annotations

import gzip
import pickle
import struct

import numpy as np
import pytest

from bert_unpad.data import (
    DamagedDataError,
    DataConfig,
    PackedCollator,
    WordPieceTokenizer,
    prepare,
)
from bert_unpad.data.readers import tfrecord, tfrecord_index
from bert_unpad.data.readers.tf_example import integers, read_lists
from tests.support.masked_examples import LONGEST, VOCAB, masked_examples
from tests.support.seeds import derived
from tests.support.tf_records import (
    example,
    features_of,
    frame,
    head,
    message,
    varint,
    write_records,
)
from tests.support.token_files import setting

RAW = [
    (*(column.tolist() for column in columns), following)
    for *columns, following in masked_examples(50)
]


def write_folder(folder, each=20, **options):
    for number, begin in enumerate(range(0, len(RAW), each)):
        records = [example(features_of(raw, **options)) for raw in RAW[begin : begin + each]]
        write_records(folder / f"part-{number:05}-of-00003", records)
    return folder


def check(dataset, indices):
    """Compares a batch with the examples that were written."""
    indices = np.array(indices, np.int64)
    batch = dataset.batch(indices)
    columns = zip(*(RAW[i] for i in indices), strict=True) if len(indices) else ([],) * 5
    ids, segments, positions, labels, following = columns
    assert batch.ids.tolist() == indices.tolist()
    assert batch.lengths.tolist() == [len(row) for row in ids]
    assert dataset.lengths[indices].tolist() == [len(row) for row in ids]
    assert batch.tokens.tolist() == [t for row in ids for t in row]
    assert batch.second_starts.tolist() == [row.count(0) for row in segments]
    assert batch.masks.counts.tolist() == [len(row) for row in positions]
    assert batch.masks.positions.tolist() == [p for row in positions for p in row]
    assert batch.masks.labels.tolist() == [t for row in labels for t in row]
    assert batch.next_sentence_labels.tolist() == list(following)


@pytest.mark.parametrize("without", [(), ("input_mask",), ("input_mask", "masked_lm_weights")])
def test_batches_are_the_examples_in_any_order(tmp_path, without):
    folder = write_folder(tmp_path / "data", without=without)
    dataset = tfrecord.open_split(folder, setting(tmp_path))
    assert dataset.has_masks
    for indices in (np.random.default_rng(derived(1)).permutation(50), [7, 7, 3, 49], []):
        check(dataset, indices)
    copy = pickle.loads(pickle.dumps(dataset))
    check(copy, [40, 0])
    labels = np.concatenate([raw[3] for raw in RAW])
    counts = np.bincount(labels, minlength=len(VOCAB))
    assert dataset.target_counts().tolist() == counts.tolist()


def test_files_of_several_kinds_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecord_index, "_BLOCK", 7)
    records = [
        example(features_of(raw, ("input_mask",) * (i % 2)), packed=i % 3 > 0)
        for i, raw in enumerate(RAW)
    ]
    write_records(tmp_path / "data" / "a.tfrecord", records[:33])
    write_records(tmp_path / "data" / "b.tfrecords", records[33:])
    write_records(tmp_path / "data" / "empty.tfrecord", [])
    check(tfrecord.open_split(tmp_path / "data", setting(tmp_path)), range(50))


def test_given_masks_reach_the_model(tmp_path):
    tokenizer = WordPieceTokenizer(VOCAB)
    folder = tmp_path / "data"
    tokenizer.save(folder / "tokenizer")
    write_folder(folder / "train")
    write_records(folder / "validation" / "eval.tfrecord", [example(features_of(RAW[0]))])
    config = DataConfig(
        source=f"examples:{folder}", cache_dir=str(tmp_path), max_seq_length=LONGEST
    )
    data = prepare(config)
    assert (len(data.train), len(data.validation), config.segments) == (50, 1, 2)
    inputs = PackedCollator(data.train, tokenizer)(np.array([4]), 0)
    assert inputs.input_ids.tolist() == RAW[4][0]
    assert inputs.masked_positions.tolist() == RAW[4][2]
    assert inputs.masked_labels.tolist() == RAW[4][3]
    assert inputs.next_sentence_labels.tolist() == [RAW[4][4]]


def test_converted_to_shards_once(tmp_path):
    cli = pytest.importorskip("bert_unpad.data.hdf5.cli")
    folder = tmp_path / "data"
    WordPieceTokenizer(VOCAB).save(folder / "tokenizer")
    write_folder(folder / "train")
    common = ["--max-seq-length", str(LONGEST), "--cache-dir", str(tmp_path)]
    source = ["--source", f"tfrecord:{folder}"]
    assert cli.main(["to-shards", str(tmp_path / "out"), *source, *common]) == 0
    config = DataConfig(source=f"shards:{tmp_path / 'out'}", max_seq_length=LONGEST)
    check(prepare(config).train, range(50))


def test_files_are_indexed_once_until_they_change(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "data")
    tfrecord.open_split(folder, setting(tmp_path))
    indexed, index_file = [], tfrecord_index._index_file

    def counted(path, pad_id):
        indexed.append(path.name)
        return index_file(path, pad_id)

    monkeypatch.setattr(tfrecord_index, "_index_file", counted)
    check(tfrecord.open_split(folder, setting(tmp_path)), [0, 49])
    assert indexed == []
    write_records(folder / "part-00002-of-00003", [example(features_of(RAW[40]))])
    dataset = tfrecord.open_split(folder, setting(tmp_path))
    assert (indexed, len(dataset)) == (["part-00002-of-00003"], 41)
    (newest,) = max((tmp_path / "tfrecord-1").iterdir(), key=lambda p: p.stat().st_mtime_ns).glob(
        "begins.npy"
    )
    newest.write_bytes(newest.read_bytes()[:-1])
    check(tfrecord.open_split(folder, setting(tmp_path)), [40])


def cut(size):
    return lambda data: data[:size]


def flip(at):
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


GOOD = b"".join(frame(example(features_of(raw))) for raw in RAW[:3])
SECOND = 16 + struct.unpack_from("<Q", GOOD)[0]  # where the second record begins


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut(-1), "record 2: expected at most .* it is cut off"),
        (cut(SECOND + 11), "record 1: expected a whole record, but the file is cut off"),
        (cut(SECOND + 12), "record 1: expected at most .* it is cut off"),
        (flip(0), "record 0: the checksum of its size is wrong"),
        (flip(SECOND + 6), "record 1: the checksum of its size is wrong"),
        (flip(SECOND + 9), "record 1: the checksum of its size is wrong"),
        (flip(SECOND + 40), "record 1: its checksum is wrong"),
        (flip(SECOND - 1), "record 0: its checksum is wrong"),
        (gzip.compress, "record 0: expected an uncompressed file, got gzip"),
        (lambda data: b"x" * 100, "record 0: the checksum of its size is wrong"),
        (lambda data: data + head(2**20 + 1), "record 3: expected at most 1,048,576 bytes"),
    ],
)
def test_damaged_files_are_named(tmp_path, damage, message):
    path = tmp_path / "data" / "a.tfrecord"
    path.parent.mkdir()
    path.write_bytes(damage(GOOD))
    with pytest.raises(DamagedDataError, match=rf"a\.tfrecord: {message}"):
        tfrecord.open_split(path, setting(tmp_path))


WIDE = message(2, b"\x08" + varint(2**40))  # a FloatList with an integer of 40 bits


def changed(name, values):
    return example(features_of(RAW[1]) | {name: values})


def wide(data):
    """An Example whose input_ids are such bytes."""
    features = features_of(RAW[1])
    del features["input_ids"], features["input_mask"]
    entry = message(1, b"input_ids") + message(2, message(3, message(1, data)))
    return message(1, message(1, entry)) + example(features)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"", "expected a feature input_ids, got none"),
        (b"\x0a\x7f", "a field reaches beyond its message"),
        (b"\x0b", "wire type 3"),
        (b"\x08\x05", "expected features of an Example"),
        (message(1, b"\x08\x05"), "expected a feature of an Example"),
        (message(1, message(1, b"\x08\x05\x12\x00")), "expected a feature with a name"),
        (message(1, message(1, message(1, b"a") + message(2, b"\x18\x01"))), "a: expected a list"),
        (changed("input_mask", [1, 0, 1]), "input_mask: expected padding at the end"),
        (changed("input_mask", [2]), "input_mask: expected 0 or 1"),
        (changed("input_mask", [0, 0]), "input_mask: expected 1 to 65,535 tokens, got 0 to 0"),
        (changed("input_mask", [1.0]), "input_mask: expected a list of integers"),
        (changed("masked_lm_weights", [0.5]), "masked_lm_weights: expected 0 or 1"),
        (changed("masked_lm_weights", [float("nan")]), "masked_lm_weights: expected 0 or 1"),
        (changed("masked_lm_weights", [0.0, 1.0]), "masked_lm_weights: expected padding at the"),
        (changed("masked_lm_weights", [1]), "masked_lm_weights: expected a list of floating"),
        (
            message(
                1, message(1, message(1, b"w") + message(2, message(2, b"\x08" + varint(2**40))))
            ),
            "expected numbers of 4 bytes in a list",
        ),
        (wide(b"\x05\x85"), "input_ids: expected whole numbers"),
        (wide(b"\x80" * 10 + b"\x01"), "input_ids: expected numbers of 64 bits"),
    ],
)
def test_wrong_records_are_named_when_indexed(tmp_path, record, message):
    records = [example(features_of(RAW[0])), record, example(features_of(RAW[2]))]
    path = write_records(tmp_path / "data" / "a.tfrecord", records)
    with pytest.raises(DamagedDataError, match=rf"a\.tfrecord: record 1: .*{message}"):
        tfrecord.open_split(path, setting(tmp_path))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("input_ids", [5] * 3, "input_ids: expected .* numbers, got 3"),
        ("input_ids", [-1] * LONGEST, "input_ids: expected ids of 0 to 99"),
        ("input_ids", [2**63] * LONGEST, "input_ids: expected ids of 0 to 99"),
        ("input_ids", [100] * LONGEST, "input_ids: expected ids of 0 to 99"),
        ("segment_ids", [1] + [0] * LONGEST, "segment_ids: expected 0s followed by 1s"),
        ("masked_lm_positions", [2**62] * 9, "masked positions: expected them ascending and"),
        ("masked_lm_positions", [-1] * 9, "masked positions: expected them ascending and inside"),
        ("masked_lm_ids", [100] * 9, "masked labels: expected ids of 0 to 99"),
        ("next_sentence_labels", [2], "next_sentence_labels: expected 0 or 1"),
        ("next_sentence_labels", [0, 1], "next_sentence_labels: expected one label"),
        ("next_sentence_labels", [1.0], "next_sentence_labels: expected a list of integers"),
    ],
)
def test_wrong_examples_are_named_when_read(tmp_path, name, values, message):
    records = [example(features_of(RAW[0])), changed(name, values)]
    path = write_records(tmp_path / "data" / "a.tfrecord", records)
    dataset = tfrecord.open_split(path, setting(tmp_path))
    check(dataset, [0])
    with pytest.raises(DamagedDataError, match=rf"a\.tfrecord: record 1: {message}"):
        dataset.batch(np.array([0, 1]))


def test_too_long_examples_are_named(tmp_path):
    folder = write_folder(tmp_path / "data")
    with pytest.raises(DamagedDataError, match=r"part-0.*: record \d+: expected at most 9 tokens"):
        tfrecord.open_split(folder, setting(tmp_path, 9))


def test_integers_of_every_size():
    rng = np.random.default_rng(derived(4))
    rows = [(rng.integers(-(2**63), 2**63 - 1, 9) >> rng.integers(0, 63, 9)).tolist() for _ in "ab"]
    rows += [[0, 1, 127, 128, 2**14 - 1, 2**14, 2**63 - 1, -1, -(2**63)], [5]]
    values, counts = integers([read_lists(example({"a": row})) for row in rows], b"a")
    assert values.tolist() == [value for row in rows for value in row]
    assert counts.tolist() == [9, 9, 9, 1]
    empty = message(1, message(1, message(1, b"a") + message(2, message(3, message(1, b"")))))
    lists = [read_lists(empty), read_lists(example({"a": [300]})), read_lists(empty)]
    values, counts = integers(lists, b"a")
    assert (values.tolist(), counts.tolist()) == ([300], [0, 1, 0])
    assert varint(300) == b"\xac\x02"


def test_files_of_tfrecord(tmp_path):
    library = pytest.importorskip("tfrecord")
    path = tmp_path / "a.tfrecord"
    writer = library.TFRecordWriter(str(path))
    for raw in RAW:
        features = features_of(raw)
        writer.write(
            {
                name: (values, "float" if isinstance(values[0], float) else "int")
                for name, values in features.items()
            }
        )
    writer.close()
    check(tfrecord.open_split(path, setting(tmp_path)), range(50))
