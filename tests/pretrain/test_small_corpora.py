"""Corpora of one document, and of many short ones: what the log says of them."""

import pytest
import yaml

from tests.support.pretrain_runs import WORDS, finish, run, start, tiny_settings

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path):
    values = tiny_settings(
        tmp_path,
        data={"vocab_size": 120, "objective": "mlm"},
        evaluation={"examples": 10_000},  # the default
        schedule={"total_steps": 2},
        batching={"global_batch_size": 4},
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def test_one_document_is_trained_on_without_evaluation(folder):
    text = "".join(f"{' '.join(WORDS)} {n}.\n" for n in range(60))
    (folder / "corpus.txt").write_text(text)
    output = run(folder, "run", 1)
    assert "no example is held out (data.validation_share of two documents" in output
    assert "training without evaluation" in output
    assert "mean example" not in output
    codes, output = finish(folder, "asked", start(folder, "asked", 1, "--evaluation.examples", "5"))
    assert codes == [2]
    assert "evaluation.examples: expected 0 or held-out examples" in output


def test_short_examples_are_reported_with_what_joins_them(folder):
    text = "".join(f"{WORDS[n % 8]} {WORDS[n % 7]} {n}.\n\n" for n in range(60))
    (folder / "corpus.txt").write_text(text)
    output = run(folder, "run", 1, "--data.max_seq_length", "32")
    assert "of 32 tokens (data.max_seq_length): most documents are short; in text files a" in output
    assert "unless data.source is PATH?file_per_document=true; data.documents joined" in output
    assert "mean example" not in run(folder, "joined", 1, "--data.documents", "joined")
