"""Megatron's .bin and .idx: files of the real writers, and damaged and hostile ones."""

import struct

import numpy as np
import pytest

from bert_unpad.data import DamagedDataError, DataConfig, prepare
from tests.support.imported import imported
from tests.support.masked_examples import LONGEST
from tests.support.token_files import (
    megatron_index,
    random_sequences,
    read_sequences,
    write_megatron,
)

SEQUENCES = random_sequences(50)


def open_all(path, *args, **options):
    return read_sequences(path, "megatron", *args, **options)


def joined(sequences):
    return [token for ids in sequences for token in ids]


@pytest.mark.parametrize("code", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("modes", [False, True])
def test_every_type_of_ids(tmp_path, code, modes):
    write_megatron(tmp_path / "data", SEQUENCES, code=code, modes=modes)
    assert open_all(tmp_path) == SEQUENCES
    source = imported(f"megatron:{tmp_path / 'data.bin'}", tmp_path / "out")
    data = prepare(DataConfig(source, objective="mlm", max_seq_length=LONGEST))
    assert data.train.tokens.tolist() == joined(SEQUENCES)
    assert open_all(tmp_path / "data.idx") == SEQUENCES


def test_documents_of_several_sentences(tmp_path):
    sentences = random_sequences(7, 6, special=False)
    write_megatron(tmp_path / "data", sentences, documents=[0, 2, 2, 3, 7])
    documents = [joined(sentences[a:b]) for a, b in ((0, 2), (2, 3), (3, 7))]
    assert open_all(tmp_path, add="none") == documents
    assert open_all(tmp_path, add="none", unit="sequence") == sentences


def test_no_sequences(tmp_path):
    write_megatron(tmp_path / "data", [])
    assert open_all(tmp_path) == []


def change(at, kind, value):
    def changed(data):
        size = struct.calcsize(kind)
        return data[:at] + struct.pack(kind, value) + data[at + size :]

    return changed


S = len(SEQUENCES)
LENGTHS, BEGINS, DOCUMENTS = 34, 34 + 4 * S, 34 + 12 * S


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", r"data\.idx: expected an index of Megatron"),
        (lambda data: data[:33], r"data\.idx: expected an index of Megatron"),
        (lambda data: b"x" + data[1:], r"data\.idx: expected an index of Megatron"),
        (lambda data: data[:-1], r"data\.idx: expected 1,042 bytes for 50 sequences"),
        (lambda data: data + b"\0", r"data\.idx: expected 1,042 bytes for 50 sequences"),
        (change(9, "<Q", 2), r"expected version 1 .*, got version 2 and type 8"),
        (change(17, "<B", 0), r"ids of an integer type \(1, 2, 3, 4, 5, 8\), got .* type 0"),
        (change(17, "<B", 7), r"ids of an integer type .* type 7"),
        (change(17, "<B", 5), r"data\.idx: expected sequences one after another"),
        (change(18, "<Q", 2**63), r"data\.idx: expected \S+ bytes for 9,223,372,036,854,775,808"),
        (change(18, "<Q", 2**64 - 1), r"data\.idx: expected \S+ bytes for"),
        (change(26, "<Q", 2**61), r"data\.idx: expected \S+ bytes for 50 sequences and"),
        (change(LENGTHS, "<i", -1), r"data\.idx: expected lengths of 0 or more, got -1"),
        (change(LENGTHS + 8, "<i", 2**31 - 1), "expected sequences one after another"),
        (change(DOCUMENTS - 8, "<q", 2**62), "expected sequences one after another"),
        (change(BEGINS, "<q", -2), "expected sequences one after another"),
        (change(DOCUMENTS, "<q", 1), "borders of documents that rise from 0 to 50"),
        (change(DOCUMENTS + 8, "<q", 2**62), "borders of documents that rise from 0 to 50"),
        (change(DOCUMENTS + 8 * S, "<q", S - 1), "borders of documents that rise from 0 to 50"),
    ],
)
def test_damaged_indexes_are_named(tmp_path, damage, message):
    index = write_megatron(tmp_path / "data", SEQUENCES).with_suffix(".idx")
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(DamagedDataError, match=message):
        open_all(tmp_path)


@pytest.mark.parametrize("damage", [lambda data: data[:-2], lambda data: data + b"\0\0"])
def test_ids_of_another_size_than_the_index_says(tmp_path, damage):
    ids = write_megatron(tmp_path / "data", SEQUENCES).with_suffix(".bin")
    ids.write_bytes(damage(ids.read_bytes()))
    with pytest.raises(DamagedDataError, match=r"data\.bin: expected .* bytes, as data\.idx says"):
        open_all(tmp_path)


def test_mixed_up_and_missing_files(tmp_path):
    write_megatron(tmp_path / "a", SEQUENCES)
    write_megatron(tmp_path / "b", SEQUENCES[:-1])
    (tmp_path / "a.idx").replace(tmp_path / "c.idx")
    (tmp_path / "b.bin").replace(tmp_path / "c.bin")
    (tmp_path / "b.idx").unlink()
    with pytest.raises(DamagedDataError, match=r"c\.bin: expected .* do not belong together"):
        open_all(tmp_path)
    (tmp_path / "c.bin").unlink()
    with pytest.raises(DamagedDataError, match=r"c\.idx: expected its ids in .*c\.bin, which does"):
        open_all(tmp_path)
    (tmp_path / "c.idx").unlink()
    with pytest.raises(FileNotFoundError, match=r"expected a file, or a folder with files \*\.idx"):
        open_all(tmp_path)


def test_an_index_whose_lengths_add_up_beyond_the_file(tmp_path):
    """Lengths and places that fit each other, of which a sum in 32 bits would wrap around."""
    (tmp_path / "data.idx").write_bytes(megatron_index([2**31 - 1] * 4, range(5), 4, 4))
    (tmp_path / "data.bin").write_bytes(bytes(12))
    with pytest.raises(DamagedDataError, match=r"data\.bin: expected 34,359,738,352 bytes"):
        open_all(tmp_path)


def test_files_of_datatrove(tmp_path):
    module = pytest.importorskip("datatrove.pipeline.tokens.megatron_tokenizer")
    file = module.MegatronTokenizedFile(str(tmp_path / "data"), "part_00000_tokens")
    for ids in SEQUENCES:
        file.write(ids)
    file.close()
    assert open_all(tmp_path / "data") == SEQUENCES


def test_files_of_megatron(tmp_path):
    module = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    for dtype in (np.uint16, np.int32):
        folder = tmp_path / dtype.__name__
        folder.mkdir()
        builder = module.IndexedDatasetBuilder(str(folder / "data.bin"), dtype=dtype)
        for number, ids in enumerate(SEQUENCES):
            builder.add_item(torch.tensor(ids))
            if number % 3 == 2 or number == S - 1:
                builder.end_document()
        builder.finalize(str(folder / "data.idx"))
        assert open_all(folder, unit="sequence") == SEQUENCES
        documents = [joined(SEQUENCES[a : a + 3]) for a in range(0, S, 3)]
        assert open_all(folder, 80, add="none") == documents
