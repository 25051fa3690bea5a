"""TFRecord files of BERT examples: real and independent writers, damaged and hostile files."""

import gzip
import struct

import numpy as np
import pytest

from bert_unpad.data import DamagedDataError
from bert_unpad.data.formats import tfrecord
from bert_unpad.data.formats.tfrecord import integers, read_lists
from tests.support.imported import as_lists, raw_of, read
from tests.support.masked_examples import LONGEST, masked_examples
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

RAW = as_lists(masked_examples(50))


def write_folder(folder, each=20, **options):
    for number, begin in enumerate(range(0, len(RAW), each)):
        records = [example(features_of(raw, **options)) for raw in RAW[begin : begin + each]]
        write_records(folder / f"part-{number:05}-of-00003", records)
    return folder


@pytest.mark.parametrize("without", [(), ("input_mask",), ("input_mask", "masked_lm_weights")])
def test_examples_are_those_of_the_files(tmp_path, without):
    folder = write_folder(tmp_path / "data", without=without)
    assert raw_of(read(folder, "tfrecord")) == RAW


def test_files_of_several_kinds_in_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecord, "_BLOCK", 7)
    records = [
        example(features_of(raw, ("input_mask",) * (i % 2)), packed=i % 3 > 0)
        for i, raw in enumerate(RAW)
    ]
    write_records(tmp_path / "data" / "a.tfrecord", records[:33])
    write_records(tmp_path / "data" / "b.tfrecords", records[33:])
    write_records(tmp_path / "data" / "empty.tfrecord", [])
    assert raw_of(read(tmp_path / "data", "tfrecord")) == RAW


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
        read(path, "tfrecord")


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
        (changed("input_mask", [0, 0]), "input_mask: expected 1 to 24 tokens .*, got 0 to 0"),
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
def test_wrong_records_are_named(tmp_path, record, message):
    records = [example(features_of(RAW[0])), record, example(features_of(RAW[2]))]
    path = write_records(tmp_path / "data" / "a.tfrecord", records)
    with pytest.raises(DamagedDataError, match=rf"a\.tfrecord: record 1: .*{message}"):
        read(path, "tfrecord")


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
def test_wrong_examples_are_named(tmp_path, name, values, message):
    records = [example(features_of(RAW[0])), changed(name, values)]
    path = write_records(tmp_path / "data" / "a.tfrecord", records)
    with pytest.raises(DamagedDataError, match=rf"a\.tfrecord: record 1: {message}"):
        read(path, "tfrecord")


def test_too_long_examples_are_named(tmp_path):
    folder = write_folder(tmp_path / "data")
    with pytest.raises(DamagedDataError, match=r"part-0.*: record \d+: .*: expected 1 to 9 tokens"):
        read(folder, "tfrecord", 9)


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
    assert raw_of(read(path, "tfrecord")) == RAW
