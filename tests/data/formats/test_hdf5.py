"""HDF5 files in MLPerf's layouts: reading and checking."""

import numpy as np
import pytest

from bert_unpad.data import DamagedDataError

h5py = pytest.importorskip("h5py")

from bert_unpad.data.formats import hdf5
from tests.support.hdf5_files import LONGEST, damage, raw_examples, write_folder, write_raw
from tests.support.imported import as_lists, raw_of, read


@pytest.mark.parametrize("layout", ["variable", "fixed", "packed"])
@pytest.mark.parametrize("rows", [4096, 7])
def test_examples_are_those_of_the_files(tmp_path, layout, rows, monkeypatch):
    monkeypatch.setattr(hdf5, "_BLOCK", rows)
    folder = write_folder(tmp_path / "data", raw_examples(), layout)
    assert raw_of(read(folder, "hdf5")) == as_lists(raw_examples())


def replace(name, data, **options):
    def change(file):
        del file[name]
        file.create_dataset(name, data=data, **options)

    return change


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "expected a complete HDF5 file"),
        ("no HDF5", "expected a complete HDF5 file"),
        (lambda file: file.pop("masked_lm_ids"), "there is no masked_lm_ids"),
        (replace("segment_ids", np.zeros((20, 9), "i1")), r"segment_ids: expected shape \[N\]"),
        (replace("next_sentence_labels", np.zeros(7, "i1")), r"with N = \[20\], got \(7,\)"),
        (replace("next_sentence_labels", np.zeros(20)), "expected integers, got float64"),
        (replace("input_ids", np.zeros(20, "i2")), "input_ids: expected integers of variable len"),
    ],
)
def test_wrong_files_are_named(how, message, tmp_path):
    folder = write_folder(tmp_path / "data", raw_examples(), "variable")
    damage(folder / "part_2.hdf5", how)
    with pytest.raises(DamagedDataError, match=rf"part_2\.hdf5: .*{message}"):
        read(folder, "hdf5")


def link(name, target):
    def change(file):
        del file[name]
        file[name] = target

    return change


def virtual(name, path):
    def change(file):
        shape, dtype = file[name].shape, file[name].dtype
        layout = h5py.VirtualLayout(shape, dtype)
        layout[:] = h5py.VirtualSource(path, name, shape)
        del file[name]
        file.create_virtual_dataset(name, layout)

    return change


def raw(name, path):
    def change(file):
        shape, dtype = file[name].shape, file[name].dtype
        del file[name]
        file.create_dataset(name, shape, dtype, external=[(path, 0, h5py.h5f.UNLIMITED)])

    return change


def through_a_group(name, path):
    def change(file):
        del file[name]
        file["group"] = h5py.ExternalLink(path, "/")
        file[name] = h5py.SoftLink(f"/group/{name}")

    return change


@pytest.mark.parametrize("name", ["input_ids", "input_mask", "next_sentence_labels"])
@pytest.mark.parametrize("how", ["link", "through a group", "raw", "virtual"])
def test_values_in_other_files_are_refused(tmp_path, name, how):
    folder = write_folder(tmp_path / "data", raw_examples(), "fixed")
    other = tmp_path / "other.hdf5"
    if how == "raw":
        with h5py.File(folder / "part_0.hdf5") as file:
            other.write_bytes(file[name][()].tobytes())
    else:
        write_raw(other, raw_examples()[:20], "fixed")
    path = str(other)
    change = {
        "link": link(name, h5py.ExternalLink(path, name)),
        "through a group": through_a_group(name, path),
        "raw": raw(name, path),
        "virtual": virtual(name, path),
    }[how]
    damage(folder / "part_0.hdf5", change)
    message = rf"part_0\.hdf5: {name}: expected (a dataset of|values in) this file"
    with pytest.raises(DamagedDataError, match=message):
        read(folder, "hdf5")


def declared(rows, chunks=None):
    """Replaces all datasets by such as declare many rows, of which none is written."""

    def change(file):
        for name in list(file):
            shape, kind = (rows, *file[name].shape[1:]), file[name].dtype
            if isinstance(chunks, tuple):
                shape = tuple(max(pair) for pair in zip(shape, chunks, strict=False))
            fill = None if h5py.check_vlen_dtype(kind) else 1
            parts = chunks[: len(shape)] if isinstance(chunks, tuple) else chunks
            del file[name]
            file.create_dataset(name, shape, kind, chunks=parts, fillvalue=fill)

    return change


@pytest.mark.parametrize(
    ("layout", "how", "message"),
    [
        ("fixed", declared(10**12), r"not all were written"),
        ("fixed", declared(10**12, chunks=True), r"not all were written"),
        ("fixed", replace("input_mask", h5py.Empty("i1")), "input_mask: expected values, got none"),
        ("fixed", replace("input_ids", np.zeros((20, 70_000), "i1")), "rows of at most 65,535"),
        ("fixed", lambda file: link("input_ids", np.dtype("i4"))(file), "got a datatype"),
        ("fixed", declared(2**15, chunks=(2**15, 2**14)), "expected chunks of at most"),
        ("variable", replace("input_ids", ["text"] * 20), "input_ids: expected integers, got"),
        ("variable", declared(10**12, chunks=(4096,)), "not all were written"),
    ],
)
def test_absurd_datasets_are_named(layout, how, message, tmp_path):
    folder = write_folder(tmp_path / "data", raw_examples(), layout)
    damage(folder / "part_0.hdf5", how)
    with pytest.raises(DamagedDataError, match=rf"part_0\.hdf5: .*{message}"):
        read(folder, "hdf5")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("masked_lm_positions", np.full((20, 6), -1, "i8")),
        ("masked_lm_positions", np.full((20, 6), 2**64 - 1, "u8")),
        ("masked_lm_positions", np.full((20, 6), 2**62, "i8")),
        ("masked_lm_ids", np.full((20, 6), 2**64 - 1, "u8")),
        ("input_ids", np.full((20, LONGEST), 2**64 - 1, "u8")),
        ("segment_ids", np.full((20, LONGEST), -(2**63), "i8")),
        ("next_sentence_labels", np.full(20, 2**63, "u8")),
    ],
)
def test_absurd_values_are_named(name, data, tmp_path):
    folder = write_folder(tmp_path / "data", raw_examples(), "fixed")
    damage(folder / "part_0.hdf5", replace(name, data))
    with pytest.raises(DamagedDataError, match=r"part_0\.hdf5: "):
        read(folder, "hdf5")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("segment_ids", [0, 0, 1], r"segment_ids\[3\]: expected \d+ values, got 3"),
        ("input_ids", "ids", r"input_ids: expected ids of 0 to 99 \(the vocabulary\)"),
        ("segment_ids", "falling", "segment_ids: expected 0s followed by 1s"),
        ("masked_lm_positions", [1] * 7, r"masked_lm_ids\[3\]: expected 7 values"),  # of 1 to 6
        ("masked_lm_positions", "outside", "masked positions: expected them ascending and inside"),
        ("masked_lm_ids", "outside", "masked labels: expected ids of 0 to 99"),
        ("next_sentence_labels", 2, "next_sentence_labels: expected 0 or 1"),
    ],
)
def test_wrong_examples_are_named(name, row, message, tmp_path):
    folder = write_folder(tmp_path / "data", raw_examples(), "variable")
    with h5py.File(folder / "part_1.hdf5", "r+") as file:
        size = len(file[name][3]) if name != "next_sentence_labels" else 0
        made = {
            "ids": np.full(size, 100),
            "falling": np.arange(size)[::-1] > size // 2,
            "outside": np.full(size, 300),
        }
        file[name][3] = made[row] if isinstance(row, str) else row
    with pytest.raises(DamagedDataError, match=rf"part_1\.hdf5: {message}"):
        read(folder, "hdf5")


def test_fixed_layout_is_checked(tmp_path):
    folder = write_folder(tmp_path / "data", raw_examples(), "fixed")
    with h5py.File(folder / "part_0.hdf5", "r+") as file:
        mask = file["input_mask"][0]
        mask[1] = 0
        mask[-1] = 1
        file["input_mask"][0] = mask
    with pytest.raises(DamagedDataError, match=r"part_0\.hdf5: expected padding at the end"):
        read(folder, "hdf5")
    damage(folder / "part_0.hdf5", replace("masked_lm_ids", np.zeros((20, 3), "i2")))
    with pytest.raises(DamagedDataError, match=r"masked_lm_ids: expected the shape of masked_lm_p"):
        read(folder, "hdf5")


def change_rows(name, row, values):
    def change(file):
        file[name][row] = values

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_rows("packed_input_len", 1, [0, 9]), r"expected examples of 1 to 24 tokens .* 0 "),
        (change_rows("packed_input_len", 1, [9, -1]), r"expected examples of 1 to 24 tokens .* -1"),
        (change_rows("packed_input_len", 1, [9, 25]), r"examples of 1 to 24 .* to 25"),
        (lambda file: file.pop("packed_masked_lm_len"), "there is no packed_masked_lm_len"),
        (replace("packed_input_len", np.zeros((9, 3), "i2")), r"expected shape \[N\] with N = "),
        (replace("next_sentence_labels", np.zeros(11, "i1")), "expected integers of variable len"),
    ],
)
def test_wrong_packed_files_are_named(change, message, tmp_path):
    folder = write_folder(tmp_path / "data", raw_examples(), "packed")
    damage(folder / "output_00001", change)
    with pytest.raises(DamagedDataError, match=rf"output_00001: .*{message}"):
        read(folder, "hdf5")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("input_ids", [5] * 7, r"input_ids\[1\]: expected \d+ values, got 7"),
        ("segment_ids", [0], r"segment_ids\[1\]: expected \d+ values, got 1"),
        ("masked_lm_positions", [1], r"masked_lm_positions\[1\]: expected \d+ values, got 1"),
        ("masked_lm_ids", [], r"masked_lm_ids\[1\]: expected \d+ values, got 0"),
        ("next_sentence_labels", [1], r"next_sentence_labels\[1\]: expected 2 values, got 1"),
        ("packed_masked_lm_len", [2, 2, 2], r"packed_masked_lm_len\[1\]: expected 2 values, got 3"),
    ],
)
def test_wrong_packs_are_named(name, values, message, tmp_path):
    folder = write_folder(tmp_path / "data", raw_examples(), "packed")
    damage(folder / "output_00001", change_rows(name, 1, values))
    with pytest.raises(DamagedDataError, match=rf"output_00001: {message}"):
        read(folder, "hdf5")


def test_masks_that_reach_into_another_example_of_a_pack(tmp_path):
    folder = write_folder(tmp_path / "data", raw_examples(), "packed")
    with h5py.File(folder / "output_00000", "r+") as file:
        file["packed_masked_lm_len"][1] += np.array([-1, 1], "i2")
    with pytest.raises(DamagedDataError, match="masked positions: expected them"):
        read(folder, "hdf5")


def test_too_long_examples_are_named(tmp_path):
    folder = write_folder(tmp_path / "data", raw_examples(), "variable")
    with pytest.raises(DamagedDataError, match=r"hdf5: expected examples of 1 to 9 tokens"):
        read(folder, "hdf5", 9)
