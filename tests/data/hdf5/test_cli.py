"""HDF5 files in MLPerf's layouts: converting them, the command, and training from them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bert_unpad.data import (
    DataConfig,
    PackedCollator,
    ShardDataset,
    ShardWriter,
    WordPieceTokenizer,
    prepare,
)
from bert_unpad.data.masking import TokenMasker, most_frequent_token_rate

pytest.importorskip("h5py")

from bert_unpad.data.hdf5 import write, write_hdf5
from bert_unpad.data.hdf5.cli import main, write_shard
from tests.support.hdf5_files import (
    EXAMPLES,
    PREDICTIONS,
    VOCAB,
    damage,
    open_folder,
    raw_examples,
    write_folder,
)
from tests.support.prepared_text import contents
from tests.support.pretrain_runs import log_lines


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


class Killed(BaseException):
    pass


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_killed_conversion_goes_on(tmp_path, monkeypatch, capsys):
    write_folder(tmp_path / "data" / "train", raw_examples(), "variable")
    write_folder(tmp_path / "data" / "validation", raw_examples(seed=1)[:20], "fixed")
    WordPieceTokenizer(VOCAB).save(tmp_path / "data" / "tokenizer")
    cache = ["--cache-dir", str(tmp_path / "cache"), "--max-seq-length", "24"]
    given = ["--source", f"hdf5:{tmp_path / 'data'}", *cache]
    output, close = tmp_path / "out", ShardWriter.close

    def killed(writer):
        if writer.path.name == "validation":
            raise Killed
        close(writer)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "close", killed)
        with pytest.raises(Killed):
            main(["to-shards", str(output), *given])
    (output / ".validation.0123").mkdir()
    done = times(output / "train")
    with pytest.raises(SystemExit):
        main(["to-shards", str(output), *given, "--unmask"])
    assert re.search(r"begun with other settings .*unmask False, got True", capsys.readouterr().err)
    assert main(["to-shards", str(output), *given]) == 0
    assert times(output / "train") == done
    assert main(["to-shards", str(tmp_path / "whole"), *given]) == 0
    assert contents(output) == contents(tmp_path / "whole")
    names = ["tokenizer", "train", "validation"]
    assert sorted(path.name for path in output.iterdir()) == names
    with pytest.raises(SystemExit):
        main(["to-shards", str(output), *given])
    assert "expected a new folder, or one that was begun" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["variable", "fixed"])
def test_killed_writing_goes_on(tmp_path, monkeypatch, layout):
    text = "\n\n".join(f"One w{i} two. Three w{i + 1} four five. Six w{i % 7}." for i in range(60))
    (tmp_path / "corpus.txt").write_text(text)
    given = ["--source", str(tmp_path / "corpus.txt"), "--cache-dir", str(tmp_path / "cache")]
    given += ["--layout", layout, "--vocab-size", "80", "--max-seq-length", "32"]
    given += ["--max-predictions", "5", "--examples-per-file", "16"]
    output, name = tmp_path / "out", f"_write_{layout}"
    original, left = getattr(write, name), [2]

    def killed(*arguments):
        if not left[0]:
            raise Killed
        left[0] -= 1
        original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(write, name, killed)
        with pytest.raises(Killed):
            main(["generate", str(output), *given])
    (output / "train" / ".part_00002_of_00009.hdf5.01.tmp").touch()
    done = times(output / "train")
    assert main(["generate", str(output), *given]) == 0
    assert main(["generate", str(tmp_path / "whole"), *given]) == 0
    kept = times(output / "train")
    assert [path for path in done if kept.get(path) == done[path]] == sorted(kept)[:2]
    config = {"max_seq_length": 32, "cache_dir": str(tmp_path / "cache")}
    data = [
        prepare(DataConfig(source=f"hdf5:{folder}", **config))
        for folder in (output, tmp_path / "whole")
    ]
    for split in ("train", "validation"):
        one, two = (getattr(part, split) for part in data)
        assert [file.name for file in one.files] == [file.name for file in two.files]
        one, two = (dataset.batch(np.arange(len(dataset))) for dataset in (one, two))
        assert one.tokens.tolist() == two.tokens.tolist()
        assert one.masks.labels.tolist() == two.masks.labels.tolist()


def test_a_run_trains_on_files_and_resumes(tmp_path, tokenizer, capsys):
    pytest.importorskip("jsonargparse")
    import yaml

    from bert_unpad.pretrain import main as pretrain

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
        "logging": {"every": 1, "progress": "none"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    run = ["--config", str(tmp_path / "run.yaml")]
    parted = [*run, f"--run_dir={tmp_path / 'parted'}"]
    assert pretrain([*parted, "--schedule.total_steps=6", "--schedule.power=0"]) == 0
    assert pretrain([*parted, "--schedule.power=0"]) == 0
    assert pretrain([*run, "--schedule.power=0"]) == 0
    losses = [[line["loss"] for line in log_lines(tmp_path / name)] for name in ("parted", "whole")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10
    damage(folder / "train" / "part_3.hdf5", "truncated")
    assert pretrain(["--resume=must", *run]) == 2
    assert "part_3.hdf5: expected a complete HDF5 file" in capsys.readouterr().err
