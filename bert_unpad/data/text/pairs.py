"""Tokenized documents to pairs of segments with next-sentence labels.

Follows the procedure of BERT (Devlin et al. 2018, arXiv:1810.04805, section 3.1 and appendix A.2;
`create_pretraining_data.py` in google-research/bert). Masks are not made here but anew for every
epoch (masking.py), and nothing is padded. Because a segment is always a run of neighbouring tokens
of one document, an example is planned as five integers and the tokens are gathered afterwards in
blocks: planning is the only Python loop, and it runs over examples, not tokens.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from bert_unpad.data.store.shards import ShardWriter
from bert_unpad.data.text.corpus import TokenizedCorpus
from bert_unpad.data.text.tokenizer import WordPieceTokenizer

MIN_SEQ_LENGTH = 5  # [CLS] a [SEP] b [SEP] with one token each
SPECIAL_PER_PAIR = 3
Plan = tuple[int, int, int, int, int]  # see `PairPlanner.plan`
_BLOCK = 4096  # examples gathered at a time: about 1 MB of tokens at length 128


class PairPlanner:
    """Chooses the segments of sentence pairs; deterministic from its arguments.

    Sentences of a document are taken until `max_seq_length` is reached (with `short_seq_prob` until
    a random shorter length, so that the model sees such lengths). A random number of them is
    segment a; b is the rest, or, half of the time, sentences of another document, and then the
    unused ones begin the next pair. What is too long is cut token by token from the longer segment,
    from either end at random.

    One thing differs from Google's script, which gives every single-sentence chunk a random next
    sentence: here, when the coin says "is next", such a sentence is cut in two between words. So
    documents of one sentence give both labels, and the label does not betray itself by a's length.
    A sentence of one word can only get a random next; if there is no other document either, it
    becomes an example without b, label -100.

    Args:
        corpus: the documents.
        is_continuation: bool [vocab_size], pieces that continue a word.
        max_seq_length: longest example in tokens, special tokens included, at least 5.
        short_seq_prob: probability that a document aims at a shorter length.
        seed: of the pseudo-random choices (as for `random.Random`).
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        is_continuation: NDArray[np.bool_],
        *,
        max_seq_length: int,
        short_seq_prob: float,
        seed: int | str,
    ) -> None:
        self.corpus = corpus
        self.is_continuation = is_continuation
        self.max_tokens = max_seq_length - SPECIAL_PER_PAIR
        self.short_seq_prob = short_seq_prob
        self.random = random.Random(seed)

    def plan(self, document: int) -> Iterator[Plan]:
        """Yield (a begin, a end, b begin, b end, label) for each pair of a document.

        Begins and ends are places in `corpus.tokens`.
        """
        rng = self.random
        bounds = self.corpus.sentence_bounds(document)
        target = self.max_tokens
        if rng.random() < self.short_seq_prob:
            target = rng.randint(2, self.max_tokens)
        first, sentences = 0, len(bounds) - 1
        while first < sentences:
            end = min(bisect_left(bounds, bounds[first] + target, first + 1), sentences)
            if end - first > 1:
                middle = rng.randint(first + 1, end - 1)
                cut, is_next = bounds[middle], rng.random() < 0.5
            else:
                middle, cut = end, self._cut_between_words(bounds[first], bounds[end])
                is_next = cut is not None and rng.random() < 0.5
            a_begin = bounds[first]
            if not is_next:
                random_next = self._random_segment(document, target - (bounds[middle] - a_begin))
                if random_next is not None:
                    yield (*self._truncate(a_begin, bounds[middle], *random_next), 1)
                    first = middle
                    continue
            if cut is None:  # one word and no other document: no second segment
                a_end = min(bounds[end], a_begin + self.max_tokens + 1)
                yield a_begin, a_end, a_end, a_end, -100
            else:
                yield (*self._truncate(a_begin, cut, cut, bounds[end]), 0)
            first = end

    def _cut_between_words(self, begin: int, end: int) -> int | None:
        continues = self.is_continuation[self.corpus.tokens[begin + 1 : end]]
        cuts = np.flatnonzero(~continues)
        return begin + 1 + int(cuts[self.random.randrange(len(cuts))]) if len(cuts) else None

    def _random_segment(self, document: int, target: int) -> tuple[int, int] | None:
        """Sentences of another document, from a random one on, to about `target` tokens."""
        documents = self.corpus.documents
        if documents == 1:
            return None
        other = self.random.randrange(documents - 1)
        other += other >= document
        bounds = self.corpus.sentence_bounds(other)
        first = self.random.randrange(len(bounds) - 1)
        end = bisect_left(bounds, bounds[first] + target, first + 1)
        return bounds[first], bounds[min(end, len(bounds) - 1)]

    def _truncate(self, a: int, a_end: int, b: int, b_end: int) -> tuple[int, int, int, int]:
        excess = (a_end - a) + (b_end - b) - self.max_tokens
        if excess <= 0:
            return a, a_end, b, b_end
        # One token at a time from the longer segment (from b if equal), in closed form: first the
        # difference goes, then both shrink in turn.
        difference = (a_end - a) - (b_end - b)
        in_turn = max(excess - abs(difference), 0)
        from_longer = excess - in_turn
        a_cut = (from_longer if difference > 0 else 0) + in_turn // 2
        b_cut = (from_longer if difference <= 0 else 0) + (in_turn + 1) // 2
        a_front = self.random.getrandbits(a_cut).bit_count() if a_cut else 0
        b_front = self.random.getrandbits(b_cut).bit_count() if b_cut else 0
        return a + a_front, a_end - (a_cut - a_front), b + b_front, b_end - (b_cut - b_front)


def write_examples(
    corpus: TokenizedCorpus,
    tokenizer: WordPieceTokenizer,
    writer: ShardWriter,
    *,
    max_seq_length: int,
    short_seq_prob: float,
    dupe_factor: int,
    seed: int | str,
    advance: Callable[[int], object] = lambda documents: None,
) -> int:
    """Plan the pairs of all documents `dupe_factor` times over and append them to a shard.

    Args:
        corpus, max_seq_length, short_seq_prob, seed: see `PairPlanner`.
        tokenizer: gives the ids of [CLS] and [SEP] and where words begin.
        writer: the shard to append to.
        dupe_factor: passes over the documents, each with its own random choices.
        advance: called with the number of documents done, now and then.

    Returns:
        The number of examples.
    """
    planner = PairPlanner(
        corpus,
        tokenizer.is_continuation,
        max_seq_length=max_seq_length,
        short_seq_prob=short_seq_prob,
        seed=seed,
    )
    plans: list[Plan] = []
    written = pending = 0
    for document in (d for _ in range(dupe_factor) for d in range(corpus.documents)):
        plans.extend(planner.plan(document))
        pending += 1
        if len(plans) >= _BLOCK:
            writer.append(*gather_pairs(corpus.tokens, tokenizer, plans))
            advance(pending)
            written, pending, plans = written + len(plans), 0, []
    if plans:
        writer.append(*gather_pairs(corpus.tokens, tokenizer, plans))
    advance(pending)
    return written + len(plans)


def gather_pairs(
    tokens: NDArray[np.integer],
    tokenizer: WordPieceTokenizer,
    plans: list[Plan],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Gather the tokens of planned pairs and lay special tokens around them.

    Args:
        tokens: of the corpus that was planned for.
        tokenizer: gives the ids of [CLS] and [SEP].
        plans: B pairs, at least one, from `PairPlanner.plan`.

    Returns:
        Tokens of all examples end to end [sum of lengths]; lengths, index of the second segment's
        first token, next-sentence label [B].
    """
    a, a_end, b, b_end, labels = np.array(plans, np.int64).T
    second_starts = a_end - a + 2
    has_b = b_end > b
    lengths = second_starts + np.where(has_b, b_end - b + 1, 0)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    packed = np.full(ends[-1], tokenizer.sep_id, np.int64)  # what is not overwritten is [SEP]
    packed[begins] = tokenizer.cls_id
    for source, source_end, target in ((a, a_end, begins + 1), (b, b_end, begins + second_starts)):
        sizes = source_end - source
        step = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        packed[np.repeat(target, sizes) + step] = tokens[np.repeat(source, sizes) + step]
    return packed, lengths, second_starts, labels
