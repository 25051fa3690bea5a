"""Makes the examples of tokenized documents: what is in one depends on the objective.

For masked tokens alone, examples of one segment are made here: documents cut to pieces, each alone
or joined to the ones before it (Liu et al., 2019, arXiv:1907.11692, section 4.2, which compares the
two). Nothing of them is random. Examples are made in blocks, by array operations.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.objective import SECOND_SEGMENTS, Documents, Objective
from bert_unpad.data.text.corpus import TokenizedCorpus
from bert_unpad.data.text.pairs import BLOCK, Columns, gather_pairs, pair_examples
from bert_unpad.data.text.tokenizer import TextTokenizer

_SPECIAL = 2  # [CLS] a [SEP]


def make_examples(
    corpus: TokenizedCorpus,
    tokenizer: TextTokenizer,
    *,
    objective: Objective = "mlm_nsp",
    documents: Documents = "apart",
    max_seq_length: int,
    short_seq_prob: float,
    dupe_factor: int = 1,
    seed: int | str,
) -> Iterator[Columns]:
    """Yields blocks of examples as `gather_pairs` returns them; they depend only on the arguments.

    Args:
        corpus: the documents.
        tokenizer: knows the ids of [CLS] and [SEP] and which tokens continue a word.
        objective: says what an example is made of, see `data.objective`.
        documents: for objectives with one segment. "apart": an example is a piece of one document,
            as long as possible. "joined": all documents are one text with [SEP] between them, and
            an example is a piece of it.
        max_seq_length: length of the longest example in tokens, with special tokens.
        short_seq_prob, dupe_factor, seed: see `pair_examples`; for objectives with two segments.
    """
    second = SECOND_SEGMENTS[objective]
    if second is None:
        starts = corpus.sentence_offsets[corpus.document_offsets]
        make = _apart if documents == "apart" else _joined
        return make(corpus.tokens, starts, tokenizer, max_seq_length - _SPECIAL)
    return pair_examples(
        corpus,
        tokenizer,
        second=second,
        max_seq_length=max_seq_length,
        short_seq_prob=short_seq_prob,
        dupe_factor=dupe_factor,
        seed=seed,
    )


def _apart(
    tokens: NDArray[np.integer], starts: NDArray[np.int64], tokenizer: TextTokenizer, longest: int
) -> Iterator[Columns]:
    for first in range(0, len(starts) - 1, BLOCK):
        begins = starts[first : first + BLOCK + 1]
        lengths = np.diff(begins)
        pieces = -(-lengths // longest)
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        begin = np.repeat(begins[:-1], pieces) + number * longest
        end = np.minimum(begin + longest, np.repeat(begins[1:], pieces))
        for at in range(0, len(begin), BLOCK):
            a, b = begin[at : at + BLOCK], end[at : at + BLOCK]
            bounds = np.stack([a, b, b, b, np.full(len(a), -100)], axis=1)
            yield gather_pairs(tokens, tokenizer, bounds)


def _joined(
    tokens: NDArray[np.integer], starts: NDArray[np.int64], tokenizer: TextTokenizer, longest: int
) -> Iterator[Columns]:
    ends = starts[1:-1]  # before these tokens stands a [SEP]
    places = ends + np.arange(len(ends))  # of these [SEP] in the joined text
    total = len(tokens) + len(ends)
    for first in range(0, total, BLOCK * longest):
        last = min(first + BLOCK * longest, total)
        inside = slice(*np.searchsorted(places, [first, last]))
        before, after = first - inside.start, last - inside.stop
        text = np.insert(tokens[before:after], ends[inside] - before, tokenizer.sep_id)
        bounds = np.arange(0, len(text), longest)
        begin, end = bounds, np.minimum(bounds + longest, len(text))
        # A [SEP] at either end of an example would stand beside [CLS] or another [SEP].
        begin = begin + (text[begin] == tokenizer.sep_id)
        end = end - ((text[end - 1] == tokenizer.sep_id) & (end > begin))
        begin, end = begin[end > begin], end[end > begin]
        pairs = np.stack([begin, end, end, end, np.full(len(begin), -100)], axis=1)
        if len(pairs):
            yield gather_pairs(text, tokenizer, pairs)
