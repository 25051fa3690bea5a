"""A full disk is named by the file that had no room, whatever has written it."""

import errno
import pickle

import numpy as np
import pytest
import torch

from bert_unpad._files import replacing
from bert_unpad._full_disk import FullDiskError, named_if_full


def write_text(file):
    file.write(b"text")
    file.flush()


WRITERS = {
    "Python": write_text,
    "numpy": lambda file: np.save(file, np.zeros(100_000)),
    "PyTorch": lambda file: torch.save(torch.zeros(100_000), file),
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_the_file_is_named(tmp_path, writer):
    path = tmp_path / "folder" / "file"
    with (
        pytest.raises(FullDiskError) as failed,
        named_if_full(path, 2**60),
        open("/dev/full", "wb") as file,
    ):
        writer(file)
    assert failed.value.errno == errno.ENOSPC
    told = rf"^{path}: expected room for {2**60:,} bytes, got [\d,]+ bytes free \(No space left on"
    for error in (failed.value, pickle.loads(pickle.dumps(failed.value))):
        with pytest.raises(FullDiskError, match=told):
            raise error


class CheckpointException(BaseException):
    """As PyTorch's: it has the errors of ranks, which have lost what led to them."""

    def __init__(self):
        self.failures = {3: (RuntimeError("[enforce fail] . unexpected pos 704 vs 598"), None)}


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        CheckpointException(),
        ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_errors_that_come_from_a_full_disk(tmp_path, error):
    told = rf"^{tmp_path / 'file'}: expected more room, got "
    with pytest.raises(FullDiskError, match=told), replacing(tmp_path / "file"):
        raise error
    assert not list(tmp_path.iterdir())


def test_the_innermost_file_is_named_also_through_other_errors(tmp_path):
    def write():
        try:
            with named_if_full(tmp_path / "inner"):
                raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise ValueError(f"data: {error}") from error

    told = rf"^{tmp_path / 'inner'}: "
    with pytest.raises(FullDiskError, match=told), named_if_full(tmp_path / "outer"):
        write()
    for error in (OSError(errno.EIO, "Input/output error"), ValueError("No space left on device")):
        with pytest.raises(type(error)) as failed, named_if_full(tmp_path):
            raise error
        assert failed.value is error
