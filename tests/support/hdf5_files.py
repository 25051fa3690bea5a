"""HDF5 files in MLPerf's layouts as tests make them: written with h5py alone, whole or damaged."""

import os

import h5py
import numpy as np

from tests.support.masked_examples import LONGEST, PREDICTIONS, VOCAB, masked_examples

__all__ = ["LONGEST", "VOCAB", "damage", "raw_examples", "write_folder", "write_raw"]

EXAMPLES = 90
KINDS = {
    "input_ids": "i2",
    "segment_ids": "i1",
    "masked_lm_positions": "i2",
    "masked_lm_ids": "i2",
}


def raw_examples(seed=0):
    """As many random examples as the folders of these tests have."""
    return masked_examples(EXAMPLES, seed)


def write_raw(path, examples, layout):
    """A file as MLPerf's preparation writes it, with h5py alone."""
    if layout == "packed":
        return write_packed(path, examples)
    columns = list(zip(*examples, strict=True))
    with h5py.File(path, "w") as file:
        for (name, kind), rows in zip(KINDS.items(), columns, strict=False):
            if layout == "variable":
                write_rows(file, name, kind, rows)
            else:
                width = PREDICTIONS if name.startswith("masked") else LONGEST
                padded = [np.pad(row, (0, width - len(row))) for row in rows]
                file.create_dataset(name, data=np.array(padded, kind))
        if layout == "fixed":
            mask = [np.arange(LONGEST) < len(row) for row in columns[0]]
            file.create_dataset("input_mask", data=np.array(mask, "i1"))
        file.create_dataset("next_sentence_labels", data=np.array(columns[4], "i1"))


def write_rows(file, name, kind, rows):
    data = file.create_dataset(name, (len(rows),), h5py.vlen_dtype(np.dtype(kind)))
    for i, row in enumerate(rows):
        data[i] = row


def write_packed(path, examples):
    """A file whose rows have 1, 2 or 3 examples, one after another."""
    columns = {name: [] for name in KINDS}
    columns |= {name: [] for name in ("packed_input_len", "packed_masked_lm_len")}
    columns["next_sentence_labels"] = []
    while examples:
        count = len(columns["input_ids"]) % 3 + 1
        pack, examples = examples[:count], examples[count:]
        lengths = [len(ids) for ids, *_ in pack]
        begins = [sum(lengths[:i]) for i in range(len(pack))]
        columns["input_ids"].append(np.concatenate([ids for ids, *_ in pack]))
        columns["segment_ids"].append(np.concatenate([segments for _, segments, *_ in pack]))
        positions = [begin + raw[2] for begin, raw in zip(begins, pack, strict=True)]
        columns["masked_lm_positions"].append(np.concatenate(positions))
        columns["masked_lm_ids"].append(np.concatenate([raw[3] for raw in pack]))
        columns["next_sentence_labels"].append([raw[4] for raw in pack])
        columns["packed_input_len"].append(lengths)
        columns["packed_masked_lm_len"].append([len(raw[2]) for raw in pack])
    with h5py.File(path, "w") as file:
        for name, rows in columns.items():
            write_rows(file, name, "i1" if name == "next_sentence_labels" else "i2", rows)


def write_folder(folder, examples, layout, each=20):
    folder.mkdir(parents=True)
    for number, begin in enumerate(range(0, len(examples), each)):
        name = f"output_{number:05}" if layout == "packed" else f"part_{number}.hdf5"
        write_raw(folder / name, examples[begin : begin + each], layout)
    return folder


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
