"""MLPerf's HDF5 files; see `bert_unpad.data.hdf5`."""

from __future__ import annotations

from pathlib import Path

from bert_unpad.data.hdf5.dataset import Hdf5Dataset
from bert_unpad.data.readers import Setting, find_files


def open_split(path: Path, setting: Setting) -> Hdf5Dataset:
    """See `bert_unpad.data.readers.open_split`."""
    return Hdf5Dataset(
        find_files(path, "hdf5", setting.without),
        vocab_size=setting.vocab_size,
        unmaskable_ids=setting.unmaskable_ids,
        max_seq_length=setting.max_seq_length,
        cache_dir=setting.cache_dir,
        progress=setting.progress,
    )
