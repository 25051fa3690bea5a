"""The tokenizer of numbered corpora."""

import pytest

from bert_unpad.data import WordPieceTokenizer
from tests.support.numbered_corpus import numbering_tokenizer


@pytest.fixture
def tokenizer() -> WordPieceTokenizer:
    return numbering_tokenizer()
