"""Masked-token accuracy as MLPerf's reference counts it: over all masks that the files bring."""

from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("h5py")
transformers = pytest.importorskip("transformers")

from tests.support.masked_examples import LONGEST, PREDICTIONS
from tests.support.mlperf_files import toy_settings, write_benchmark_data
from tests.support.pretrain_runs import log_lines, run_in_turn


def _reference_accuracy(model_dir: Path, examples: list) -> float:
    """On padded sequences and padded predictions with weights of 0 and 1, as the reference does.

    accuracy = sum(weights * (argmax(logits) == ids)) / sum(weights), over all examples.
    """
    model = transformers.BertForPreTraining.from_pretrained(model_dir, dtype=torch.float64).eval()
    batch = len(examples)
    ids, mask, segments = (torch.zeros(batch, LONGEST, dtype=torch.long) for _ in range(3))
    positions, labels = (torch.zeros(batch, PREDICTIONS, dtype=torch.long) for _ in range(2))
    weights = torch.zeros(batch, PREDICTIONS, dtype=torch.float64)
    for row, (tokens, second, places, words, _) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        segments[row, : len(tokens)] = torch.tensor(second)
        mask[row, : len(tokens)] = 1
        positions[row, : len(places)] = torch.tensor(places)
        labels[row, : len(places)] = torch.tensor(words)
        weights[row, : len(places)] = 1
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, token_type_ids=segments).prediction_logits
    found = logits.gather(1, positions[..., None].expand(-1, -1, logits.shape[-1])).argmax(-1)
    return float(((found == labels) * weights).sum() / weights.sum())


@pytest.mark.parametrize("layouts", [("fixed", "variable"), ("tfrecord", "tfrecord")])
def test_accuracy_is_that_of_the_reference(tmp_path, layouts):
    examples = write_benchmark_data(tmp_path, *layouts)
    # So few updates that the model does not predict one token only.
    values = toy_settings(
        tmp_path, seed=5, optimizer={"lr": 6e-3}, schedule={"total_steps": 9, "warmup_steps": 0}
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    run_in_turn(tmp_path, 2, {"run": ["--evaluation.target_accuracy", "null"]})
    found = [line["mlm_accuracy"] for line in log_lines(tmp_path / "run", "evaluation")]
    assert len(found) == 5  # after 2, 4, 6 and 8 updates, and at the end
    expected = _reference_accuracy(tmp_path / "run" / "model", examples)
    assert 0 < expected < 0.9
    assert found[-1] == pytest.approx(expected, abs=1e-12)
