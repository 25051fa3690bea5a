"""Documents as ids: what examples are made of."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.text.tokenizer import TextTokenizer

_BATCH = 1 << 20  # characters encoded at a time; the library's own objects take 100 times as much


@dataclass(frozen=True)
class TokenizedCorpus:
    """Documents as ids, in flat arrays.

    Attributes:
        tokens: [total], ids of all documents end to end, no special tokens.
        sentence_offsets: int64 [sentences + 1], where each sentence begins in `tokens`; no sentence
            is empty.
        document_offsets: int64 [documents + 1], where each document begins among the sentences; no
            document is empty.
    """

    tokens: NDArray[np.integer]
    sentence_offsets: NDArray[np.int64]
    document_offsets: NDArray[np.int64]

    @property
    def documents(self) -> int:
        return len(self.document_offsets) - 1

    def sentence_bounds(self, document: int) -> list[int]:
        """Returns where a document's sentences begin in `tokens`, and where the last one ends."""
        first, last = self.document_offsets[document], self.document_offsets[document + 1]
        return self.sentence_offsets[first : last + 1].tolist()


def tokenize(
    documents: Iterable[Sequence[str]], tokenizer: TextTokenizer, *, longest: int
) -> TokenizedCorpus:
    """Converts documents to ids.

    Args:
        documents: lists of sentences.
        tokenizer: converts text to ids.
        longest: sentences with more tokens than this are cut into pieces of this size, because
            drawing pairs would discard most of them (text without full stops, tables).

    Returns:
        The corpus, without sentences and documents that have no tokens.
    """
    counts: list[int] = []  # sentences of each document
    tokens, cut, pieces = [np.empty(0, np.int32)], [], []
    for batch in _batches(documents, counts):
        ids, lengths = tokenizer.encode_sentences(batch)
        tokens.append(ids)
        pieces.append(-(-lengths // longest))
        some = pieces[-1] > 0
        cut.append(np.full(pieces[-1].sum(), longest))
        cut[-1][np.cumsum(pieces[-1])[some] - 1] = (lengths - (pieces[-1] - 1) * longest)[some]
    of_documents = np.diff(_offsets(pieces)[_offsets([np.array(counts, np.int64)])])
    return TokenizedCorpus(
        np.concatenate(tokens), _offsets(cut), _offsets([of_documents[of_documents > 0]])
    )


def _batches(documents: Iterable[Sequence[str]], counts: list[int]) -> Iterator[list[str]]:
    """Yields all sentences in lists of similar size; appends each document's number of them."""
    batch: list[str] = []
    size = 0
    for document in documents:
        counts.append(len(document))
        for sentence in document:
            batch.append(sentence)
            size += len(sentence)
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _offsets(lengths: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths]))])
