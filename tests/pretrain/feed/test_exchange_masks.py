"""Whole runs that exchange examples which bring their masks, as MLPerf's do."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn import BertForPreTraining
from bert_unpad.pretrain.config import read_config
from bert_unpad.pretrain.model import build_model
from bert_unpad.pretrain.output.metrics import read_json_lines
from tests.support.pretrain_runs import log_lines, losses, run_in_turn, tiny_settings, uses

pytest.importorskip("h5py")

from tests.support.hdf5_files import EXAMPLES, LONGEST, VOCAB, raw_examples, write_folder
from tests.support.imported import imported

STEPS = 14
GLOBAL_BATCH = 8  # so an epoch ends within the run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two ranks that train on all exchanges, and one run whose model never changes."""
    path = tmp_path_factory.mktemp("masks")
    write_folder(path / "data", raw_examples(), "variable")
    values = tiny_settings(
        path,
        seed=3,
        model={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        data={
            "source": imported(f"hdf5:{path / 'data'}", path / "shards"),
            "max_seq_length": LONGEST,
        },
        batching={
            "strategy": "exchange",
            "global_batch_size": GLOBAL_BATCH,
            "shuffle_buffer": 16,
        },
        optimizer={"lr": 1e-2},
        schedule={"total_steps": STEPS},
        evaluation={"examples": 0},
        logging={"examples": True},
    )
    (path / "run.yaml").write_text(yaml.safe_dump(values))
    runs = {how: ["--batching.scope", how] for how in ("world", "two_level", "none")}
    run_in_turn(path, 2, runs | {"still": ["--optimizer.lr", "0"]}, node_size=1)
    return path


def _examples_of_steps(run_dir: Path) -> list[list[int]]:
    steps: dict[int, list[int]] = {}
    for path in sorted(run_dir.glob("examples.rank*.jsonl")):
        for line in read_json_lines(path):
            steps.setdefault(line["step"], []).extend(line["examples"])
    return [steps[step] for step in sorted(steps)]


def _masked_loss(model: BertForPreTraining, examples: list[tuple]) -> float:
    """The mean loss of the masked tokens that the files give."""
    examples = sorted(examples, key=lambda example: -len(example[0]))
    ids, segments, positions, labels, following = zip(*examples, strict=True)
    begins = np.cumsum([0, *(len(row) for row in ids[:-1])])
    inputs = PackedInputs.build(
        VarlenBatch.from_lengths([len(row) for row in ids]),
        torch.from_numpy(np.concatenate(ids)),
        torch.from_numpy(np.concatenate(segments)),
        torch.from_numpy(np.concatenate([b + p for b, p in zip(begins, positions, strict=True)])),
        torch.from_numpy(np.concatenate(labels)),
        torch.tensor(following),
    )
    with torch.no_grad():
        return float(model(inputs).mlm_loss_sum) / inputs.num_masked


def test_the_masks_of_the_files_are_trained_on(folder):
    config, _ = read_config(["--config", str(folder / "run.yaml")])
    model = build_model(config, len(VOCAB), LONGEST)
    files, others = raw_examples(), raw_examples(seed=1)
    logged = [x[1] for x in losses(folder / "still").values()]
    steps = _examples_of_steps(folder / "still")
    wanted = [_masked_loss(model, [files[i] for i in step]) for step in steps]
    assert len(logged) == STEPS
    assert logged == pytest.approx(wanted, abs=1e-5)
    elsewhere = [_masked_loss(model, [others[i] for i in step]) for step in steps]
    assert elsewhere != pytest.approx(wanted, abs=1e-3)  # what is compared says something


def test_who_trains_on_what_changes_nothing_else(folder):
    """Every scope has the same global batches, so the same losses; masks travel or stay."""
    kept = losses(folder / "none")
    for how in ("world", "two_level"):
        assert sum(line["exchange_bytes"] for line in log_lines(folder / how)) > 0
        shared = losses(folder / how)
        torch.testing.assert_close(
            torch.tensor([shared[step][:3] for step in shared]),
            torch.tensor([kept[step][:3] for step in kept]),
            atol=1e-4,
            rtol=0,
        )
        ours, theirs = (_examples_of_steps(folder / name) for name in (how, "none"))
        assert [sorted(step) for step in ours] == [sorted(step) for step in theirs]
        assert uses(folder / how)[0] == dict.fromkeys(range(EXAMPLES), 1)
    assert kept[STEPS][0] < kept[1][0]
