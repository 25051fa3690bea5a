"""HDF5 files in MLPerf's layouts: reading, checking, converting, and training from them."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from bert_unpad.data import (
    DamagedDataError,
    DataConfig,
    PackedCollator,
    ShardDataset,
    WordPieceTokenizer,
    prepare,
)
from bert_unpad.data.masking import TokenMasker, most_frequent_token_rate
from bert_unpad.data.sampler import BalancedSampler
from bert_unpad.data.tokenizer import SPECIAL_TOKENS

h5py = pytest.importorskip("h5py")

from bert_unpad.data.hdf5 import Hdf5Dataset, write_hdf5  # noqa: E402
from bert_unpad.data.hdf5.cli import main, write_shard  # noqa: E402
from bert_unpad.data.hdf5.index import find_files  # noqa: E402

VOCAB = [*SPECIAL_TOKENS, *(f"w{i}" for i in range(95))]
LONGEST, PREDICTIONS, EXAMPLES = 24, 6, 90


@pytest.fixture(scope="module")
def tokenizer():
    return WordPieceTokenizer(VOCAB)


def raw_examples(seed=0):
    """Random examples as plain lists, made without the package: (ids, segments, positions, labels,
    next sentence)."""
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(EXAMPLES):
        length = int(rng.integers(6, LONGEST + 1))
        second = int(rng.integers(3, length - 1))
        ids = rng.integers(5, 100, length)
        ids[[0, second - 1, length - 1]] = 2, 3, 3
        ordinary = [i for i in range(length) if i not in (0, second - 1, length - 1)]
        count = min(int(rng.integers(1, PREDICTIONS + 1)), len(ordinary))
        positions = np.sort(rng.choice(ordinary, count, replace=False))
        labels = rng.integers(5, 100, count)
        segments = (np.arange(length) >= second).astype(int)
        examples.append((ids, segments, positions, labels, int(rng.integers(2))))
    return examples


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
        find_files(folder),
        vocab_size=tokenizer.vocab_size,
        unmaskable_ids=tokenizer.unmaskable_ids,
        max_seq_length=LONGEST,
        cache_dir=cache,
        progress=False,
        **options,
    )


@pytest.fixture(scope="module", params=["variable", "fixed"])
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def dataset(layout, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp(layout)
    write_folder(folder / "data", raw_examples(), layout)
    return open_folder(folder / "data", tokenizer, folder / "cache", max_open=2)


def test_batches_are_the_examples_in_any_order(dataset):
    examples = raw_examples()
    assert dataset.lengths.tolist() == [len(example[0]) for example in examples]
    rng = np.random.default_rng(1)
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
    [*_, newest] = sorted((tmp_path / "hdf5").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:50])
    assert len(open_folder(folder, tokenizer, tmp_path)) == EXAMPLES - 17


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


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("segment_ids", [0, 0, 1], r"segment_ids\[3\]: expected \d+ values, got 3"),
        ("input_ids", "ids", r"input_ids: expected ids of 0 to 99 \(the vocabulary\)"),
        ("segment_ids", "falling", "segment_ids: expected 0s followed by 1s"),
        ("masked_lm_positions", [1, 2], r"masked_lm_ids\[3\]: expected 2 values"),
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


def test_too_long_examples_and_bad_arguments(tmp_path, tokenizer):
    folder = write_folder(tmp_path / "data", raw_examples(), "variable")
    about = {"vocab_size": 100, "unmaskable_ids": (), "cache_dir": tmp_path}
    files = find_files(folder)
    with pytest.raises(DamagedDataError, match=r"hdf5: expected examples of 1 to 9 tokens"):
        Hdf5Dataset(files, max_seq_length=9, **about)
    with pytest.raises(ValueError, match="max_open: expected 1 or more"):
        Hdf5Dataset(files, max_seq_length=24, max_open=0, **about)
    with pytest.raises(FileNotFoundError, match="expected an HDF5 file, or a folder with files"):
        find_files(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="vocab_file: expected the vocabulary"):
        prepare(DataConfig(source=f"hdf5:{folder}", cache_dir=str(tmp_path)))
    with pytest.raises(ValueError, match=r"expected hdf5:PATH or hdf5:PATH\?validation=PATH"):
        prepare(DataConfig(source=f"hdf5:{folder}?split=x", cache_dir=str(tmp_path)))
    with pytest.raises(FileNotFoundError, match="source: no/such does not exist"):
        prepare(DataConfig(source="hdf5:no/such", cache_dir=str(tmp_path)))


def test_round_trips_through_shards_and_both_layouts(dataset, tokenizer, tmp_path):
    everything = dataset.batch(np.arange(EXAMPLES))

    def same(batch, tokens=None):
        assert batch.lengths.tolist() == everything.lengths.tolist()
        assert batch.second_starts.tolist() == everything.second_starts.tolist()
        assert batch.next_sentence_labels.tolist() == everything.next_sentence_labels.tolist()
        assert batch.tokens.tolist() == (everything.tokens if tokens is None else tokens).tolist()
        if tokens is None:
            for name in ("counts", "positions", "labels"):
                left, right = getattr(batch.masks, name), getattr(everything.masks, name)
                assert left.tolist() == right.tolist()

    write_shard(dataset, tmp_path / "shard")
    shard = ShardDataset(tmp_path / "shard")
    assert shard.has_masks
    same(shard.batch(np.arange(EXAMPLES)))
    assert most_frequent_token_rate(shard) == most_frequent_token_rate(dataset)
    write_shard(dataset, tmp_path / "true", unmask=True)
    true = ShardDataset(tmp_path / "true")
    assert not true.has_masks
    same(true.batch(np.arange(EXAMPLES)), everything.true_tokens())
    for target in ("variable", "fixed"):
        options = {"layout": target, "max_predictions": PREDICTIONS}
        paths = write_hdf5(shard, tmp_path / target, examples_per_file=32, **options)
        assert [path.name for path in paths][-1] == "part_00002_of_00003.hdf5"
        same(open_folder(tmp_path / target, tokenizer, tmp_path).batch(np.arange(EXAMPLES)))
    with pytest.raises(FileExistsError, match="expected a folder without HDF5 files"):
        write_hdf5(shard, tmp_path / "fixed")
    with pytest.raises(ValueError, match=f"max_predictions: expected at least {PREDICTIONS}"):
        write_hdf5(shard, tmp_path / "few", layout="fixed", max_predictions=PREDICTIONS - 1)
    with pytest.raises(ValueError, match="masker: expected one"):
        write_hdf5(true, tmp_path / "bare")


def test_drawn_masks_are_those_of_the_collator(dataset, tokenizer, tmp_path):
    write_shard(dataset, tmp_path / "true", unmask=True)
    true = ShardDataset(tmp_path / "true")
    write_hdf5(true, tmp_path / "h", masker=TokenMasker(tokenizer, seed=3))
    written = open_folder(tmp_path / "h", tokenizer, tmp_path)
    indices = np.arange(0, EXAMPLES, 4)
    given = PackedCollator(written, tokenizer)(indices, epoch=5)
    drawn = PackedCollator(true, tokenizer, seed=3)(indices, epoch=0)
    for name in ("input_ids", "masked_positions", "masked_labels", "token_type_ids"):
        assert getattr(given, name).equal(getattr(drawn, name))


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


def test_generate_check_convert_and_open(tmp_path, capsys, layout):
    text = "\n\n".join(f"One w{i} two. Three w{i + 1} four five. Six w{i % 7}." for i in range(60))
    (tmp_path / "corpus.txt").write_text(text)
    cache = ["--cache-dir", str(tmp_path / "cache"), "--max-seq-length", "32"]
    source = ["--source", str(tmp_path / "corpus.txt"), "--layout", layout, "--vocab-size", "80"]
    limits = ["--max-predictions", "5", "--examples-per-file", "16"]
    assert main(["generate", str(tmp_path / "h"), *source, *cache, *limits]) == 0
    assert "train: " in capsys.readouterr().out
    given = ["--source", f"hdf5:{tmp_path / 'h'}", *cache]
    assert main(["check", *given]) == 0
    assert "validation: " in capsys.readouterr().out
    assert main(["to-shards", str(tmp_path / "s"), *given]) == 0
    config = {"max_seq_length": 32, "cache_dir": str(tmp_path / "cache")}
    files, shards = (
        prepare(DataConfig(source=f"{kind}:{tmp_path / folder}", **config))
        for kind, folder in (("hdf5", "h"), ("shards", "s"))
    )
    assert len(files.train) == len(shards.train) > 32
    assert len(files.validation) == files.statistics["validation_examples"] > 0
    for split in ("train", "validation"):
        left, right = (data.collator(split)(np.arange(5), 0) for data in (files, shards))
        assert left.input_ids.equal(right.input_ids)
        assert left.masked_labels.equal(right.masked_labels)

    [*_, last] = sorted((tmp_path / "h" / "train").iterdir())
    damage(last, "truncated")
    assert main(["check", *given]) == 1
    assert last.name in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["check", "--source", "stdlib"])
    assert stopped.value.code == 2
    assert "--source: expected hdf5:PATH" in capsys.readouterr().err


def test_a_run_trains_on_files_and_resumes(tmp_path, tokenizer, capsys):
    pytest.importorskip("jsonargparse")
    import yaml

    from bert_unpad.pretrain import main as pretrain
    from bert_unpad.pretrain.metrics import read_json_lines

    folder = write_folder(tmp_path / "data" / "train", raw_examples(), "variable").parent
    write_folder(folder / "validation", raw_examples(seed=1)[:20], "fixed")
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")
    settings = {
        "run_dir": str(tmp_path / "whole"),
        "device": "cpu",
        "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"intermediate_size": 32, "max_position_embeddings": 32},
        "data": {"source": f"hdf5:{folder}", "cache_dir": str(tmp_path), "max_seq_length": 24},
        "batching": {"global_batch_size": 12},
        "schedule": {"total_steps": 10, "warmup_steps": 0},  # more than an epoch
        "checkpoint": {"every": 4},
        "evaluation": {"examples": 20},
        "logging": {"every": 1, "plots": False, "progress": "none"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    run = ["--config", str(tmp_path / "run.yaml")]
    parted = [*run, f"--run_dir={tmp_path / 'parted'}"]
    assert pretrain([*parted, "--schedule.total_steps=6", "--schedule.power=0"]) == 0
    assert pretrain([*parted, "--schedule.power=0"]) == 0
    assert pretrain([*run, "--schedule.power=0"]) == 0
    losses = [
        [
            line["loss"]
            for line in read_json_lines(tmp_path / name / "metrics.jsonl")
            if line["kind"] == "train"
        ]
        for name in ("parted", "whole")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10
    damage(folder / "train" / "part_3.hdf5", "truncated")
    assert pretrain(["--resume=must", *run]) == 2
    assert "part_3.hdf5: expected a complete HDF5 file" in capsys.readouterr().err


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
