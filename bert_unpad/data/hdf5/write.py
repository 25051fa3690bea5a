"""Writes examples as HDF5 files in MLPerf's layouts, with their own masks or with drawn ones.

Files are not compressed: training reads single rows in random order, and would have to unpack a
whole chunk for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
from numpy.typing import NDArray

from bert_unpad._files import replacing
from bert_unpad.data.hdf5.layout import COLUMNS
from bert_unpad.data.masking import TokenMasker
from bert_unpad.data.store.dataset import ExampleDataset
from bert_unpad.data.store.example_batch import ExampleBatch, Masks

_MAX_ID = np.iinfo(np.int16).max


def masked_batch(
    dataset: ExampleDataset, indices: NDArray[np.int64], masker: TokenMasker | None
) -> ExampleBatch:
    """Returns examples with masks: their own, or else masks drawn as for epoch 0.

    Raises:
        ValueError: the examples have no masks, and there is no masker.
    """
    batch = dataset.batch(indices)
    if batch.masks is not None:
        return batch
    if masker is None:
        raise ValueError("masker: expected one, as the examples bring no masks")
    masked = masker(batch.tokens.astype(np.int64), batch.lengths, batch.ids, epoch=0)
    ends = np.cumsum(batch.lengths)
    owner = np.searchsorted(ends, masked.positions, side="right")
    masks = Masks(
        np.bincount(owner, minlength=len(batch)),
        masked.positions - (ends - batch.lengths)[owner],
        masked.labels,
    )
    return ExampleBatch(
        batch.ids,
        batch.lengths,
        batch.second_starts,
        batch.next_sentence_labels,
        masked.input_ids,
        masks,
    )


def write_hdf5(
    dataset: ExampleDataset,
    folder: str | Path,
    *,
    layout: Literal["variable", "fixed"] = "variable",
    examples_per_file: int = 4096,
    masker: TokenMasker | None = None,
    max_predictions: int = 76,
    resume: bool = False,
) -> list[Path]:
    """Writes all examples of a data set to files `part_00000_of_00010.hdf5` and so on.

    Args:
        dataset: the examples, each with a second segment.
        folder: the folder to write to; created if missing, and must not hold HDF5 files.
        layout: "variable" or "fixed"; `bert_unpad.data.hdf5` shows them.
        examples_per_file: number of examples per file; the last file may have fewer.
        masker: draws masks of examples that have none.
        max_predictions: width of the mask columns in the fixed layout (MLPerf: 76).
        resume: keep the files that are there, of a call with the same arguments that was killed.

    Returns:
        The files.

    Raises:
        FileExistsError: the folder holds HDF5 files.
        ValueError: the vocabulary does not fit int16, an example has no next-sentence label or more
            than `max_predictions` masks (fixed layout), or an argument is out of range.
    """
    if layout not in ("variable", "fixed"):
        raise ValueError(f"layout: expected 'variable' or 'fixed', got {layout!r}")
    if examples_per_file < 1:
        raise ValueError(f"examples_per_file: expected 1 or more, got {examples_per_file}")
    if max_predictions < 1:
        raise ValueError(f"max_predictions: expected 1 or more, got {max_predictions}")
    if dataset.vocab_size > _MAX_ID + 1:
        raise ValueError(
            f"vocab_size: HDF5 files hold ids as int16, expected at most {_MAX_ID + 1} of them, "
            f"got {dataset.vocab_size}"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not resume and any(folder.glob("*.hdf5")):
        raise FileExistsError(f"{folder}: expected a folder without HDF5 files")
    for old in folder.glob(".part_*.tmp") if resume else ():
        old.unlink()
    count = -(-len(dataset) // examples_per_file)
    paths = []
    for number, indices in enumerate(_pieces(len(dataset), examples_per_file)):
        paths.append(folder / f"part_{number:05}_of_{count:05}.hdf5")
        if paths[-1].exists():
            continue
        batch = masked_batch(dataset, indices, masker)
        if (batch.next_sentence_labels < 0).any():
            raise ValueError(
                "next_sentence_labels: expected 0 or 1 in every example, but example "
                f"{indices[batch.next_sentence_labels < 0][0]} has no second segment"
            )
        with replacing(paths[-1]) as temporary, h5py.File(temporary, "w") as file:
            if layout == "fixed":
                _write_fixed(file, batch, dataset.max_seq_length, max_predictions)
            else:
                _write_variable(file, batch)
            file.create_dataset(COLUMNS[4], data=batch.next_sentence_labels.astype(np.int8))
    return paths


def _pieces(examples: int, size: int) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, examples, size):
        yield np.arange(begin, min(begin + size, examples))


def _segment_ids(batch: ExampleBatch) -> NDArray[np.int8]:
    begins = np.cumsum(batch.lengths) - batch.lengths
    second = np.repeat(begins + batch.second_starts, batch.lengths)
    return (np.arange(len(second)) >= second).astype(np.int8)


def _columns(batch: ExampleBatch) -> list[tuple[str, NDArray, NDArray[np.int64]]]:
    """Returns (name, values end to end, number per example) of columns with several values."""
    masks = batch.masks
    assert masks is not None
    return [
        ("input_ids", batch.tokens.astype(np.int16), batch.lengths),
        ("segment_ids", _segment_ids(batch), batch.lengths),
        ("masked_lm_positions", masks.positions.astype(np.int16), masks.counts),
        ("masked_lm_ids", masks.labels.astype(np.int16), masks.counts),
    ]


def _write_variable(file: h5py.File, batch: ExampleBatch) -> None:
    for name, values, sizes in _columns(batch):
        rows = np.empty(len(batch), object)
        for i, row in enumerate(np.split(values, np.cumsum(sizes)[:-1])):
            rows[i] = row  # a single assignment would turn rows of equal length into a matrix
        file.create_dataset(name, data=rows, dtype=h5py.vlen_dtype(values.dtype))


def _write_fixed(
    file: h5py.File, batch: ExampleBatch, max_seq_length: int, max_predictions: int
) -> None:
    assert batch.masks is not None
    most = int(batch.masks.counts.max())
    if most > max_predictions:
        raise ValueError(f"max_predictions: expected at least {most}, got {max_predictions}")
    mask = np.arange(max_seq_length) < batch.lengths[:, None]
    file.create_dataset("input_mask", data=mask.astype(np.int8))
    for name, values, sizes in _columns(batch):
        width = max_seq_length if sizes is batch.lengths else max_predictions
        rows = np.zeros((len(batch), width), values.dtype)
        rows[np.arange(width) < sizes[:, None]] = values
        file.create_dataset(name, data=rows)
