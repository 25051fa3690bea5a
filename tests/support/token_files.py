"""Files of token ids as tests make them, without the libraries that usually write them."""

import struct

import numpy as np

from tests.support.imported import read
from tests.support.masked_examples import CLS, LONGEST, SEP, VOCAB
from tests.support.seeds import derived


def random_sequences(count, longest=LONGEST, seed=0, special=True):
    """Lists of ids of random lengths, with [CLS] and [SEP] around each."""
    rng = np.random.default_rng(derived(seed))
    sizes = rng.integers(3, longest + 1, count)
    bodies = [rng.integers(5, len(VOCAB), size).tolist() for size in sizes]
    return [[CLS, *body[2:], SEP] for body in bodies] if special else bodies


def megatron_index(sizes, documents, code, width, version=1):
    """The bytes of a NAME.idx, after Megatron-LM's indexed_dataset.py."""
    begins = np.cumsum([0, *sizes])[:-1] * width
    return (
        struct.pack("<9sQBQQ", b"MMIDIDX", version, code, len(sizes), len(documents))
        + np.array(sizes, "<i4").tobytes()
        + np.array(begins, "<i8").tobytes()
        + np.array(documents, "<i8").tobytes()
    )


def write_megatron(prefix, sequences, documents=None, code=8, modes=False):
    """Writes NAME.bin and NAME.idx; each sequence is a document unless borders are given."""
    dtype = np.dtype({1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code])
    sizes = [len(ids) for ids in sequences]
    documents = range(len(sizes) + 1) if documents is None else documents
    prefix.parent.mkdir(parents=True, exist_ok=True)
    ids = [token for sequence in sequences for token in sequence]
    prefix.with_suffix(".bin").write_bytes(np.array(ids, dtype).tobytes())
    index = megatron_index(sizes, documents, code, dtype.itemsize)
    prefix.with_suffix(".idx").write_bytes(index + bytes(len(sizes)) * modes)
    return prefix


def read_sequences(path, kind, *args, **options):
    """The ids of all examples, as lists, after checking what all files of ids have in common."""
    batch = read(path, kind, *args, **options)
    assert batch.second_starts.tolist() == batch.lengths.tolist()
    assert set(batch.next_sentence_labels.tolist()) <= {-100}
    assert batch.masks is None
    parts = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    return [ids.tolist() for ids in parts if len(batch)]
