"""Random examples in the formats whose feed rates are compared: shards, HDF5 and TFRecord."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from bert_unpad._crc32c import masked_crc32c
from bert_unpad._protobuf import write_message, write_varint
from bert_unpad.data import ShardWriter, TokenMasker, WordPieceTokenizer
from bert_unpad.data.hdf5.write import masked_batch, write_hdf5
from bert_unpad.data.readers import Setting, open_split
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS

VOCABULARY = 30_522
CONTINUATIONS = 6000  # of BERT's vocabulary
PREDICTIONS = 76  # of an example, in MLPerf's files
_PER_FILE = 4096  # examples


def tokenizer() -> WordPieceTokenizer:
    """A vocabulary of BERT's size, with as many continuations of words."""
    words = [f"w{number}" for number in range(VOCABULARY - len(SPECIAL_TOKENS) - CONTINUATIONS)]
    return WordPieceTokenizer([*SPECIAL_TOKENS, *words, *(f"##{n}" for n in range(CONTINUATIONS))])


def setting(length: int, cache: Path) -> Setting:
    """What readers have to know."""
    made = tokenizer()
    return Setting(
        vocab_size=made.vocab_size,
        unmaskable_ids=made.unmaskable_ids,
        cls_id=made.cls_id,
        sep_id=made.sep_id,
        pad_id=made.pad_id,
        max_seq_length=length,
        cache_dir=cache,
        progress=False,
    )


def write_shards(folder: Path, length: int, count: int) -> None:
    """Random pairs of segments, all of one length."""
    made, rng = tokenizer(), np.random.default_rng(0)
    tokens = rng.integers(len(SPECIAL_TOKENS), VOCABULARY, (count, length))
    seconds = rng.integers(2, length - 1, count)
    tokens[:, 0] = made.cls_id
    tokens[np.arange(count), seconds - 1] = tokens[:, -1] = made.sep_id
    with ShardWriter(
        folder,
        vocab_size=VOCABULARY,
        unmaskable_ids=made.unmaskable_ids,
        max_seq_length=length,
    ) as writer:
        labels = rng.integers(0, 2, count)
        writer.append(tokens.ravel(), np.full(count, length), seconds, labels)


def write_all(folder: Path, length: int, count: int) -> dict[str, ExampleDataset]:
    """Writes the same examples in all formats, and opens them."""
    about = setting(length, folder / "cache")
    write_shards(folder / "shards", length, count)
    shards = open_split("shards", folder / "shards", about)
    masker = TokenMasker(tokenizer(), max_predictions_per_seq=PREDICTIONS)
    for layout in ("variable", "fixed"):
        write_hdf5(shards, folder / layout, layout=layout, masker=masker)
    write_tfrecords(shards, folder / "tfrecord", masker)
    return {
        "shards": shards,
        "HDF5, variable length": open_split("hdf5", folder / "variable", about),
        "HDF5, fixed length": open_split("hdf5", folder / "fixed", about),
        "TFRecord": open_split("tfrecord", folder / "tfrecord", about),
    }


def write_tfrecords(dataset: ExampleDataset, folder: Path, masker: TokenMasker) -> None:
    """Writes all examples as `bert_unpad/data/readers/tfrecord.py` shows, padded, with masks."""
    folder.mkdir(parents=True)
    files = -(-len(dataset) // _PER_FILE)
    for number in range(files):
        last = min((number + 1) * _PER_FILE, len(dataset))
        with (folder / f"part-{number:05}-of-{files:05}").open("wb") as file:
            for at in range(number * _PER_FILE, last):
                record = _example(dataset, at, masker)
                size = struct.pack("<Q", len(record))
                for part in (size, record):
                    file.write(part + struct.pack("<I", masked_crc32c(part)))


def _example(dataset: ExampleDataset, at: int, masker: TokenMasker) -> bytes:
    one = masked_batch(dataset, np.array([at]), masker)
    ids, masks, length = one.tokens, one.masks, int(one.lengths[0])
    places = np.arange(length)

    def padded(values: np.ndarray, size: int) -> np.ndarray:
        return np.pad(values, (0, size - len(values)))

    longest = dataset.max_seq_length
    features = {
        "input_ids": padded(ids, longest),
        "input_mask": padded(np.ones(length, np.int64), longest),
        "segment_ids": padded((places >= one.second_starts[0]).astype(np.int64), longest),
        "masked_lm_positions": padded(masks.positions, PREDICTIONS),
        "masked_lm_ids": padded(masks.labels, PREDICTIONS),
        "next_sentence_labels": one.next_sentence_labels,
    }
    lists = {
        name: write_message(3, write_message(1, b"".join(map(write_varint, values.tolist()))))
        for name, values in features.items()
    }
    weights = padded(np.ones(len(masks.labels), np.float32), PREDICTIONS)
    lists["masked_lm_weights"] = write_message(2, write_message(1, weights.tobytes()))
    entries = (
        write_message(1, write_message(1, name.encode()) + write_message(2, values))
        for name, values in lists.items()
    )
    return write_message(1, b"".join(entries))
