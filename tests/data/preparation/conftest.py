"""A corpus, and what one worker makes of it."""

import random

import pytest

from bert_unpad.data import DataConfig
from tests.support.pipelines import pipeline
from tests.support.prepared_text import write_corpus
from tests.support.seeds import derived


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """How a corpus of some hundred documents is prepared, and its documents."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = write_corpus(folder / "text", random.Random(derived(0)))
    config = DataConfig(
        str(folder / "text"), max_seq_length=48, vocab_size=200, validation_share=0.1
    )
    return config, texts


@pytest.fixture(scope="session")
def expected(corpus, tmp_path_factory):
    """What one worker makes without an interruption."""
    output = tmp_path_factory.mktemp("expected") / "out"
    pipeline(corpus, output).run()
    return output
