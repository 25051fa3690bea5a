"""Whole runs on a mixture of token ids: resumed, also on another number of ranks."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from bert_unpad.data import Mixture, prepare
from bert_unpad.pretrain.config import read_config
from bert_unpad.pretrain.output.metrics import read_json_lines
from tests.support.imported import imported
from tests.support.masked_examples import LONGEST
from tests.support.pretrain_runs import go_back, run, tiny_settings
from tests.support.token_files import random_sequences, write_megatron

STEPS, GLOBAL_BATCH, SAVED = 12, 12, 7  # an epoch has 5 steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of two ranks, and what it leaves after a step within its second epoch."""
    path = tmp_path_factory.mktemp("mixture")
    for seed, name in enumerate(("web", "books")):
        write_megatron(path / f"{name}_ids" / "data", random_sequences(30, seed=seed))
        imported(f"megatron:{path / f'{name}_ids'}", path / name)
    values = tiny_settings(
        path,
        seed=3,
        # What else differs between numbers of ranks.
        model={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        clip={"mode": "after"},
        data={
            "source": "stdlib",
            "mixture": {f"shards:{path / 'web'}": 0.75, f"shards:{path / 'books'}": 0.25},
            "objective": "mlm",
            "max_seq_length": LONGEST,
        },
        batching={"strategy": "random", "global_batch_size": GLOBAL_BATCH},
        optimizer={"lr": 1e-2},
        schedule={"total_steps": STEPS},
        checkpoint={"every": SAVED, "keep_last": 3},
        evaluation={"examples": 0},
        logging={"examples": True},
    )
    (path / "run.yaml").write_text(yaml.safe_dump(values))
    run(path, "whole", 2)
    return path


def by_step(run_dir: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for path in sorted(run_dir.glob("examples.rank*.jsonl")):
        for line in read_json_lines(path):
            found.setdefault(line["step"], []).extend(line["examples"])
    return {step: sorted(found[step]) for step in sorted(found)}


def logged(run_dir: Path) -> list[tuple[float, float]]:
    lines = read_json_lines(run_dir / "metrics.jsonl")
    return [(x["loss"], x["gradient_norm"]) for x in lines if x["kind"] == "train"]


def test_epochs_have_their_shares(folder):
    config, _ = read_config(["--config", str(folder / "run.yaml")])
    mixture = prepare(config.data, progress=False).train
    assert isinstance(mixture, Mixture)
    assert mixture.draws == [15, 45]  # books, web
    steps = list(by_step(folder / "whole").values())
    for epoch in (0, 1):
        used = [i for step in steps[5 * epoch : 5 * epoch + 5] for i in step]
        assert sorted(used) == mixture.epoch_examples(3, epoch).tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_resumed_run_goes_on_in_the_same_order(folder, ranks):
    copy = go_back(folder, "whole", SAVED, f"{ranks} ranks")
    run(folder, copy, ranks)
    assert by_step(folder / copy) == by_step(folder / "whole")
    ours, whole = (np.array(logged(folder / name)) for name in (copy, "whole"))
    np.testing.assert_allclose(ours, whole, atol=0 if ranks == 2 else 1e-4, rtol=0)
