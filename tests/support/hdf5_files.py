"""HDF5 files in MLPerf's layouts as tests make them: written with h5py alone, whole or damaged."""

from __future__ import annotations

import os

import h5py
import numpy as np

from bert_unpad.data.hdf5 import Hdf5Dataset
from bert_unpad.data.readers import find_files
from tests.support.masked_examples import LONGEST, PREDICTIONS, VOCAB, masked_examples

__all__ = ["LONGEST", "VOCAB", "damage", "open_folder", "raw_examples", "write_folder", "write_raw"]

EXAMPLES = 90


def raw_examples(seed=0):
    """As many random examples as the folders of these tests have."""
    return masked_examples(EXAMPLES, seed)


def write_raw(path, examples, layout):
    """A file as MLPerf's preparation writes it, with h5py alone."""
    columns = list(zip(*examples, strict=True))
    kinds = {"input_ids": "i2", "segment_ids": "i1", "masked_lm_positions": "i2"}
    kinds |= {"masked_lm_ids": "i2"}
    with h5py.File(path, "w") as file:
        for (name, kind), rows in zip(kinds.items(), columns, strict=False):
            if layout == "variable":
                data = file.create_dataset(name, (len(rows),), h5py.vlen_dtype(np.dtype(kind)))
                for i, row in enumerate(rows):
                    data[i] = row
            else:
                width = PREDICTIONS if name.startswith("masked") else LONGEST
                padded = [np.pad(row, (0, width - len(row))) for row in rows]
                file.create_dataset(name, data=np.array(padded, kind))
        if layout == "fixed":
            mask = [np.arange(LONGEST) < len(row) for row in columns[0]]
            file.create_dataset("input_mask", data=np.array(mask, "i1"))
        file.create_dataset("next_sentence_labels", data=np.array(columns[4], "i1"))


def write_folder(folder, examples, layout, each=20):
    folder.mkdir(parents=True)
    for number, begin in enumerate(range(0, len(examples), each)):
        write_raw(folder / f"part_{number}.hdf5", examples[begin : begin + each], layout)
    return folder


def open_folder(folder, tokenizer, cache, **options):
    return Hdf5Dataset(
        find_files(folder, "hdf5"),
        vocab_size=tokenizer.vocab_size,
        unmaskable_ids=tokenizer.unmaskable_ids,
        max_seq_length=LONGEST,
        cache_dir=cache,
        progress=False,
        **options,
    )


def damage(path, how):
    if how == "truncated":
        os.truncate(path, os.path.getsize(path) // 2)
    elif how == "no HDF5":
        path.write_bytes(b"x" * 1000)
    elif how == "gone":
        path.unlink()
        path.mkdir()  # the name is still found
    else:
        with h5py.File(path, "r+") as file:
            how(file)
