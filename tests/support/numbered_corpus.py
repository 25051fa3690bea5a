"""A corpus whose tokens are all different, so a token tells where it came from."""

from functools import cache

import numpy as np

from bert_unpad.data import WordPieceTokenizer
from bert_unpad.data.text.corpus import TokenizedCorpus
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS

FIRST = len(SPECIAL_TOKENS)  # the first token's id
VOCAB = 60_000


def corpus_of(documents: list[list[int]]) -> TokenizedCorpus:
    """Documents of sentences of the given lengths in tokens."""
    lengths = [n for document in documents for n in document]
    return TokenizedCorpus(
        FIRST + np.arange(sum(lengths), dtype=np.int32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.concatenate([[0], np.cumsum([len(d) for d in documents])]).astype(np.int64),
    )


@cache
def numbering_tokenizer() -> WordPieceTokenizer:
    """Whose words, w0, w1, ..., have the ids from FIRST on."""
    return WordPieceTokenizer([*SPECIAL_TOKENS, *(f"w{i}" for i in range(VOCAB - FIRST))])
