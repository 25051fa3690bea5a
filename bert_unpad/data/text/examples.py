"""Makes the examples of tokenized documents: what is in one depends on the objective."""

from __future__ import annotations

from collections.abc import Iterator

from bert_unpad.data.objective import SECOND_SEGMENTS, Objective
from bert_unpad.data.text.corpus import TokenizedCorpus
from bert_unpad.data.text.documents import Documents, document_examples
from bert_unpad.data.text.pairs import Columns, pair_examples
from bert_unpad.data.text.tokenizer import TextTokenizer


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
        documents: see `document_examples`; for objectives with one segment.
        max_seq_length: length of the longest example in tokens, with special tokens.
        short_seq_prob, dupe_factor, seed: see `pair_examples`; for objectives with two segments.
    """
    second = SECOND_SEGMENTS[objective]
    if second is None:
        return document_examples(
            corpus, tokenizer, documents=documents, max_seq_length=max_seq_length
        )
    return pair_examples(
        corpus,
        tokenizer,
        second=second,
        max_seq_length=max_seq_length,
        short_seq_prob=short_seq_prob,
        dupe_factor=dupe_factor,
        seed=seed,
    )
