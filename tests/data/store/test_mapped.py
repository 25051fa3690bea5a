"""Mapped files that become shorter while they are read are named; a process would end by SIGBUS."""

import os

import numpy as np
import pytest

from bert_unpad.data import DamagedDataError, ShardDataset
from bert_unpad.data.store import mapped
from tests.data.store.test_shards import write

SOME = np.arange(3)


@pytest.mark.parametrize("name", ["tokens", "lengths", "offsets", "second_starts"])
def test_a_shard(tmp_path, name):
    write(tmp_path / "shard", count=5000)
    dataset = ShardDataset(tmp_path / "shard", verify=False)
    dataset.batch(SOME)
    file = tmp_path / "shard" / f"{name}.bin"
    size = file.stat().st_size
    os.truncate(file, 100)
    with pytest.raises(DamagedDataError, match=rf"^{file} has become shorter: expected {size:,} "):
        dataset.batch(SOME)
    file.unlink()
    file.write_bytes(b"another file")
    mapped.check_mapped(*dataset._columns, *dataset._token_files)  # what is mapped stays


def test_nothing_is_known_of_files_that_are_unmapped(tmp_path):
    (tmp_path / "file").write_bytes(bytes(8192))
    before = len(mapped._mapped)
    array = mapped.map_file(tmp_path / "file", np.dtype(np.uint8), 8192)
    assert len(mapped._mapped) == before + 1
    os.truncate(tmp_path / "file", 1)
    with pytest.raises(DamagedDataError):
        mapped.check_mapped(array[5:][::2])
    del array
    assert len(mapped._mapped) == before
    mapped.check_mapped(np.zeros(3), np.empty(0))
