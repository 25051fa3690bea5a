"""HDF5 files in MLPerf's layouts: reading and checking."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from bert_unpad.data import (
    DamagedDataError,
    DataConfig,
    PackedCollator,
    prepare,
)
from bert_unpad.data.masking import most_frequent_token_rate
from bert_unpad.data.readers import detect, find_files
from bert_unpad.data.sampling.balanced_sampler import BalancedSampler

h5py = pytest.importorskip("h5py")

from bert_unpad.data.hdf5 import Hdf5Dataset
from bert_unpad.data.hdf5.index import length_index
from tests.support.hdf5_files import (
    EXAMPLES,
    LONGEST,
    VOCAB,
    damage,
    open_folder,
    raw_examples,
    write_folder,
    write_raw,
)
from tests.support.seeds import derived


def test_batches_are_the_examples_in_any_order(dataset):
    examples = raw_examples()
    assert dataset.lengths.tolist() == [len(example[0]) for example in examples]
    rng = np.random.default_rng(derived(1))
    for indices in (rng.permutation(EXAMPLES), np.array([7, 7, 3, 89]), np.empty(0, np.int64)):
        batch = dataset.batch(indices)
        ids, segments, positions, labels, following = (
            zip(*(examples[i] for i in indices), strict=True) if len(indices) else ([],) * 5
        )
        assert batch.ids.tolist() == indices.tolist()
        assert batch.tokens.tolist() == [t for row in ids for t in row]
        assert batch.second_starts.tolist() == [int((row == 0).sum()) for row in segments]
        assert batch.masks.counts.tolist() == [len(row) for row in positions]
        assert batch.masks.positions.tolist() == [p for row in positions for p in row]
        assert batch.masks.labels.tolist() == [t for row in labels for t in row]
        assert batch.next_sentence_labels.tolist() == list(following)
    assert len(dataset._open) <= 2


def test_given_masks_are_kept_in_every_epoch(dataset, tokenizer):
    collator = PackedCollator(dataset, tokenizer, seed=1)
    examples = raw_examples()
    first, second = (collator(np.array([4, 9]), epoch) for epoch in (0, 1))
    order = sorted([4, 9], key=lambda i: -len(examples[i][0]))
    assert first.input_ids.tolist() == [t for i in order for t in examples[i][0]]
    assert first.masked_labels.tolist() == [t for i in order for t in examples[i][3]]
    begins = [0, len(examples[order[0]][0])]
    assert first.masked_positions.tolist() == [
        b + p for b, i in zip(begins, order, strict=True) for p in examples[i][2]
    ]
    for name in ("input_ids", "masked_positions", "masked_labels"):
        assert getattr(first, name).equal(getattr(second, name))
    labels = np.concatenate([example[3] for example in examples])
    expected = np.bincount(labels).max() / len(labels)
    assert most_frequent_token_rate(dataset) == pytest.approx(expected)


def test_pickled_by_its_files(dataset):
    copy = pickle.loads(pickle.dumps(dataset))
    dataset.close()
    np.testing.assert_array_equal(
        copy.batch(np.arange(9)).tokens, dataset.batch(np.arange(9)).tokens
    )


def test_index_is_cached_until_a_file_changes(tmp_path, tokenizer, monkeypatch):
    folder = write_folder(tmp_path / "data", raw_examples(), "variable")
    first = open_folder(folder, tokenizer, tmp_path)
    monkeypatch.setattr("bert_unpad.data.hdf5.index.index_file", None)  # must not be called
    again = open_folder(folder, tokenizer, tmp_path)
    np.testing.assert_array_equal(again.lengths, first.lengths)
    monkeypatch.undo()
    write_raw(folder / "part_1.hdf5", raw_examples(seed=5)[:3], "variable")
    assert len(open_folder(folder, tokenizer, tmp_path)) == EXAMPLES - 17
    newest = max((tmp_path / "hdf5-2").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    cut(newest / "lengths.npy", 50)
    assert len(open_folder(folder, tokenizer, tmp_path)) == EXAMPLES - 17


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
def test_wrong_files_are_named_when_indexed(how, message, tmp_path, tokenizer):
    folder = write_folder(tmp_path / "data", raw_examples(), "variable")
    damage(folder / "part_2.hdf5", how)
    with pytest.raises(DamagedDataError, match=rf"part_2\.hdf5: .*{message}"):
        open_folder(folder, tokenizer, tmp_path)


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
def test_values_in_other_files_are_refused(tmp_path, tokenizer, monkeypatch, name, how):
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
        open_folder(folder, tokenizer, tmp_path)
    # A file that was exchanged after it was indexed is looked at again when it is opened.
    monkeypatch.setattr(
        "bert_unpad.data.hdf5.dataset.length_index",
        lambda files, *_: (
            np.full(20 * len(files), 6, np.uint16),
            np.tile(np.arange(20, dtype=np.int32), len(files)),
            np.arange(len(files) + 1) * 20,
        ),
    )
    with pytest.raises(DamagedDataError, match=message):
        open_folder(folder, tokenizer, tmp_path).batch(np.array([3]))


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
def test_absurd_datasets_are_named(layout, how, message, tmp_path, tokenizer):
    folder = write_folder(tmp_path / "data", raw_examples(), layout)
    damage(folder / "part_0.hdf5", how)
    with pytest.raises(DamagedDataError, match=rf"part_0\.hdf5: .*{message}"):
        open_folder(folder, tokenizer, tmp_path)


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
def test_absurd_values_are_named(name, data, tmp_path, tokenizer):
    folder = write_folder(tmp_path / "data", raw_examples(), "fixed")
    damage(folder / "part_0.hdf5", replace(name, data))
    dataset = open_folder(folder, tokenizer, tmp_path)
    with pytest.raises(DamagedDataError, match=r"part_0\.hdf5: "):
        dataset.batch(np.arange(20))


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
def test_wrong_examples_are_named_when_read(name, row, message, tmp_path, tokenizer):
    folder = write_folder(tmp_path / "data", raw_examples(), "variable")
    with h5py.File(folder / "part_1.hdf5", "r+") as file:
        size = len(file[name][3]) if name != "next_sentence_labels" else 0
        made = {
            "ids": np.full(size, 100),
            "falling": np.arange(size)[::-1] > size // 2,
            "outside": np.full(size, 300),
        }
        file[name][3] = made[row] if isinstance(row, str) else row
    dataset = open_folder(folder, tokenizer, tmp_path)
    dataset.batch(np.arange(20))
    with pytest.raises(DamagedDataError, match=rf"part_1\.hdf5: {message}"):
        dataset.batch(np.array([5, 23]))


def test_fixed_layout_is_checked(tmp_path, tokenizer):
    folder = write_folder(tmp_path / "data", raw_examples(), "fixed")
    with h5py.File(folder / "part_0.hdf5", "r+") as file:
        mask = file["input_mask"][0]
        mask[1] = 0
        mask[-1] = 1
        file["input_mask"][0] = mask
    with pytest.raises(DamagedDataError, match=r"part_0\.hdf5: expected padding at the end"):
        open_folder(folder, tokenizer, tmp_path).batch(np.array([0]))
    damage(folder / "part_0.hdf5", replace("masked_lm_ids", np.zeros((20, 3), "i2")))
    with pytest.raises(DamagedDataError, match=r"masked_lm_ids: expected the shape of masked_lm_p"):
        open_folder(folder, tokenizer, tmp_path)


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
def test_wrong_packed_files_are_named_when_indexed(change, message, tmp_path, tokenizer):
    folder = write_folder(tmp_path / "data", raw_examples(), "packed")
    damage(folder / "output_00001", change)
    with pytest.raises(DamagedDataError, match=rf"output_00001: .*{message}"):
        open_folder(folder, tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("input_ids", [5] * 7, r"input_ids: expected \d+ values, got 7"),
        ("segment_ids", [0], r"segment_ids: expected \d+ values, got 1"),
        ("masked_lm_positions", [1], r"masked_lm_positions: expected \d+ values, got 1"),
        ("masked_lm_ids", [], r"masked_lm_ids: expected \d+ values, got 0"),
        ("next_sentence_labels", [1], "next_sentence_labels: expected 2 values, got 1"),
        ("packed_masked_lm_len", [2, 2, 2], "packed_masked_lm_len: expected 2 values, got 3"),
    ],
)
def test_wrong_packs_are_named_when_read(name, values, message, tmp_path, tokenizer):
    folder = write_folder(tmp_path / "data", raw_examples(), "packed")
    damage(folder / "output_00001", change_rows(name, 1, values))
    dataset = open_folder(folder, tokenizer, tmp_path)
    dataset.batch(np.array([20, 23]))  # the rows beside it
    with pytest.raises(DamagedDataError, match=rf"output_00001: row 1: {message}"):
        dataset.batch(np.array([20, 22]))


def test_masks_that_reach_into_another_example_of_a_pack(tmp_path, tokenizer):
    folder = write_folder(tmp_path / "data", raw_examples(), "packed")
    with h5py.File(folder / "output_00000", "r+") as file:
        file["packed_masked_lm_len"][1] += np.array([-1, 1], "i2")
    with pytest.raises(DamagedDataError, match="masked positions: expected them"):
        open_folder(folder, tokenizer, tmp_path).batch(np.array([1, 2]))


def test_too_long_examples_and_bad_arguments(tmp_path, tokenizer):
    folder = write_folder(tmp_path / "data", raw_examples(), "variable")
    about = {"vocab_size": 100, "unmaskable_ids": (), "cache_dir": tmp_path}
    files = find_files(folder, "hdf5")
    with pytest.raises(DamagedDataError, match=r"hdf5: expected examples of 1 to 9 tokens"):
        Hdf5Dataset(files, max_seq_length=9, **about)
    with pytest.raises(ValueError, match="max_open: expected 1 or more"):
        Hdf5Dataset(files, max_seq_length=24, max_open=0, **about)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="vocab_file: expected the vocabulary"):
        prepare(DataConfig(source=f"hdf5:{folder}", cache_dir=str(tmp_path)))
    with pytest.raises(ValueError, match=r"expected hdf5:PATH or hdf5:PATH\?validation=PATH"):
        prepare(DataConfig(source=f"hdf5:{folder}?split=x", cache_dir=str(tmp_path)))
    with pytest.raises(FileNotFoundError, match="source: no/such does not exist"):
        prepare(DataConfig(source="hdf5:no/such", cache_dir=str(tmp_path)))


def test_sampler_resumes_over_files(dataset):
    def sampler():
        return BalancedSampler(dataset.lengths, 2, 1, 4, seed=2)

    whole = sampler()
    steps = [dataset.batch(indices).tokens.tolist() for indices in whole]
    first = sampler()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    second = sampler()
    second.load_state_dict(first.state_dict())
    assert [dataset.batch(indices).tokens.tolist() for indices in second] == steps[3:]


def test_data_without_held_out_examples(tmp_path, tokenizer):
    folder = write_folder(tmp_path / "data", raw_examples(), "fixed")
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(VOCAB) + "\n")
    common = {"cache_dir": str(tmp_path), "vocab_file": str(vocab), "max_seq_length": LONGEST}
    data = prepare(DataConfig(source=f"hdf5:{folder}", **common))
    assert (len(data.train), len(data.validation)) == (EXAMPLES, 0)
    assert most_frequent_token_rate(data.validation) == 0
    assert data.collator("validation")(np.empty(0, np.int64), 0).batch.total == 0
    one = folder / "part_0.hdf5"
    data = prepare(DataConfig(source=f"hdf5:{folder}?validation={one}", **common))
    assert len(data.validation) == 20


def save(folder, **arrays):
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


TWO = {"lengths": np.ones(2, np.uint16), "rows": np.zeros(2, np.int32)}


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: cut(folder / "lengths.npy", 0),
        lambda folder: cut(folder / "begins.npy", -3),
        lambda folder: (folder / "lengths.npy").unlink(),
        lambda folder: save(folder, **TWO, begins=np.array([0.0, 2.0])),
        lambda folder: save(folder, **TWO, begins=np.array([1, 2])),
        lambda folder: save(folder, **TWO, begins=np.array([0, 3, 2])),
        lambda folder: save(folder, lengths=TWO["lengths"], begins=np.array([0, 2])),
        lambda folder: save(folder, begins=np.array(5)),
    ],
)
def test_a_damaged_index_of_lengths_is_made_again(tmp_path, damage, monkeypatch, caplog):
    source = tmp_path / "x.hdf5"
    source.touch()
    made = np.array([3, 4, 5], np.uint16), np.array([0, 0, 1], np.int32)
    monkeypatch.setattr("bert_unpad.data.hdf5.index.index_file", lambda *_: made)
    length_index([source], 9, tmp_path, progress=False)
    (stored,) = (tmp_path / "hdf5-2").iterdir()
    damage(stored)
    found = length_index([source], 9, tmp_path, progress=False)
    assert [column.tolist() for column in found] == [[3, 4, 5], [0, 0, 1], [0, 3]]
    assert "which is damaged" in caplog.text


def test_files_are_found_as_those_of_other_formats(tmp_path, tokenizer):
    examples = raw_examples()
    write_folder(tmp_path / "data" / "sub" / "deep", examples, "variable")
    (tmp_path / "data" / "._part_0.hdf5").write_bytes(b"of another system")
    held_out = tmp_path / "data" / "sub" / "deep" / "part_1.hdf5"
    tokenizer.save(tmp_path)
    config = DataConfig(
        source=f"hdf5:{tmp_path / 'data'}?validation={held_out}",
        cache_dir=str(tmp_path / "cache"),
        vocab_file=str(tmp_path / "vocab.txt"),
        max_seq_length=24,
    )
    assert detect(tmp_path / "data") == "hdf5"
    data = prepare(config)
    assert (len(data.train), len(data.validation)) == (len(examples) - 20, 20)
    alone = tmp_path / "alone"
    write_folder(alone, examples[:20], "fixed")
    alone = dataclasses.replace(config, source=f"hdf5:{alone}?validation={alone / 'part_0.hdf5'}")
    with pytest.raises(FileNotFoundError, match=r"folder with files \*\.hdf5 or \*\.h5 .*, at"):
        prepare(alone)
