"""Draws pairs of segments, with labels of the second one, from tokenized documents.

The procedure is that of BERT (Devlin et al. 2018, arXiv:1810.04805, section 3.1 and appendix A.2;
`create_pretraining_data.py` in google-research/bert). Masks are drawn later, in every epoch again
(masking.py), and nothing is padded. A segment is always a run of adjacent tokens of one document.
So a pair is drawn as five integers, and tokens are gathered afterwards in blocks. Drawing is the
only Python loop, and it runs over examples instead of tokens.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bert_unpad._text import gather
from bert_unpad.data.objective import SecondSegment
from bert_unpad.data.text.corpus import TokenizedCorpus
from bert_unpad.data.text.tokenizer import TextTokenizer

MIN_SEQ_LENGTH = 5  # [CLS] a [SEP] b [SEP] with one token each
SPECIAL_PER_PAIR = 3
PairBounds = tuple[int, int, int, int, int]  # see `PairDrawer.draw`
Columns = tuple[NDArray[np.integer], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
BLOCK = 4096  # examples gathered at a time: about 1 MB of tokens at length 128


class PairDrawer:
    """Draws the segments of sentence pairs; the result depends only on the arguments.

    Sentences of a document are collected until `max_seq_length` is reached (with probability
    `short_seq_prob` until a random shorter length, so that the model sees such lengths). A random
    number of them is segment a. Segment b is the rest, or, half of the time, sentences of another
    document; the rest then begins the next pair. Segments that are too long are cut token by token:
    the longer segment loses one from either end at random.

    One thing differs from Google's script, which gives every single-sentence chunk a random next
    sentence. Here half of these sentences are cut in two between words instead. So documents of one
    sentence give both labels, and the length of a does not reveal the label. A sentence of one word
    always gets a random next sentence. Where there is no other document, no pair gets one: such a
    sentence becomes an example without b and with the label -100, and all other labels are 0.

    With sentence order (ALBERT; Lan et al., 2020, arXiv:1909.11942, section 3.1) both segments are
    of one document: half of the time in order, otherwise swapped.

    Args:
        corpus: the documents.
        is_continuation: bool [vocab_size], whether a token continues a word.
        second: "next_or_random": the label is 0 if segment b follows a, 1 if it is from another
            document. "in_order_or_swapped": 0 if segment b follows a, 1 if a follows b.
        max_seq_length: length of the longest example in tokens, at least 5, with special tokens.
        short_seq_prob: probability that the target length of a document is shorter.
        seed: seed of the random choices (as for `random.Random`).
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        is_continuation: NDArray[np.bool_],
        *,
        second: SecondSegment = "next_or_random",
        max_seq_length: int,
        short_seq_prob: float,
        seed: int | str,
    ) -> None:
        self.corpus = corpus
        self.is_continuation = is_continuation
        self.max_tokens = max_seq_length - SPECIAL_PER_PAIR
        self.short_seq_prob = short_seq_prob
        self.swaps = second == "in_order_or_swapped"
        self.random = random.Random(seed)

    def draw(self, document: int) -> Iterator[PairBounds]:
        """Yields (a begin, a end, b begin, b end, label) for each pair of a document.

        Begins and ends are indices into `corpus.tokens`.
        """
        rng = self.random
        bounds = self.corpus.sentence_bounds(document)
        target = self.max_tokens
        if rng.random() < self.short_seq_prob:
            target = rng.randint(2, self.max_tokens)
        first, sentences = 0, len(bounds) - 1
        while first < sentences:
            end = min(bisect_left(bounds, bounds[first] + target, first + 1), sentences)
            if end - first == 1:
                middle, cut = end, self._cut_between_words(bounds[first], bounds[end])
                is_next = cut is not None and rng.random() < 0.5
            else:
                middle = rng.randint(first + 1, end - 1)
                cut, is_next = bounds[middle], rng.random() < 0.5
            a_begin = bounds[first]
            if not is_next and not self.swaps:
                random_next = self._random_segment(document, target - (bounds[middle] - a_begin))
                if random_next is not None:
                    yield (*self._truncate(a_begin, bounds[middle], *random_next), 1)
                    first = middle
                    continue
            if cut is None:  # one word and no other document: no second segment
                a_end = min(bounds[end], a_begin + self.max_tokens + 1)
                yield a_begin, a_end, a_end, a_end, -100
            else:
                a, a_end, b, b_end = self._truncate(a_begin, cut, cut, bounds[end])
                swapped = self.swaps and not is_next
                yield (b, b_end, a, a_end, 1) if swapped else (a, a_end, b, b_end, 0)
            first = end

    def _cut_between_words(self, begin: int, end: int) -> int | None:
        continues = self.is_continuation[self.corpus.tokens[begin + 1 : end]]
        cuts = np.flatnonzero(~continues)
        return begin + 1 + int(cuts[self.random.randrange(len(cuts))]) if len(cuts) else None

    def _random_segment(self, document: int, target: int) -> tuple[int, int] | None:
        """Draws sentences of another document, about `target` tokens, from a random one on."""
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
        # The result of removing one token at a time from the longer segment (from b if equal): the
        # longer one loses the difference first, then both lose tokens in turn.
        difference = (a_end - a) - (b_end - b)
        in_turn = max(excess - abs(difference), 0)
        from_longer = excess - in_turn
        a_cut = (from_longer if difference > 0 else 0) + in_turn // 2
        b_cut = (from_longer if difference <= 0 else 0) + (in_turn + 1) // 2
        a_front = self.random.getrandbits(a_cut).bit_count() if a_cut else 0
        b_front = self.random.getrandbits(b_cut).bit_count() if b_cut else 0
        return a + a_front, a_end - (a_cut - a_front), b + b_front, b_end - (b_cut - b_front)


def pair_examples(
    corpus: TokenizedCorpus,
    tokenizer: TextTokenizer,
    *,
    second: SecondSegment = "next_or_random",
    max_seq_length: int,
    short_seq_prob: float,
    dupe_factor: int = 1,
    seed: int | str,
) -> Iterator[Columns]:
    """Yields the pairs of all documents, in blocks of examples as `gather_pairs` returns them.

    Args:
        corpus, second, max_seq_length, short_seq_prob, seed: see `PairDrawer`.
        tokenizer: knows the ids of [CLS] and [SEP] and which tokens continue a word.
        dupe_factor: number of passes over the documents, each with its own random choices.
    """
    drawer = PairDrawer(
        corpus,
        tokenizer.is_continuation,
        second=second,
        max_seq_length=max_seq_length,
        short_seq_prob=short_seq_prob,
        seed=seed,
    )
    pairs: list[PairBounds] = []
    for document in (d for _ in range(dupe_factor) for d in range(corpus.documents)):
        pairs.extend(drawer.draw(document))
        if len(pairs) >= BLOCK:
            yield gather_pairs(corpus.tokens, tokenizer, np.array(pairs, np.int64))
            pairs = []
    if pairs:
        yield gather_pairs(corpus.tokens, tokenizer, np.array(pairs, np.int64))


def gather_pairs(
    tokens: NDArray[np.integer], tokenizer: TextTokenizer, pairs: NDArray[np.int64]
) -> Columns:
    """Gathers the tokens of pairs and adds special tokens around the segments.

    Args:
        tokens: tokens of the corpus that the pairs were drawn from.
        tokenizer: knows the ids of [CLS] and [SEP].
        pairs: [B, 5], at least one, from `PairDrawer.draw`.

    Returns:
        Tokens of all examples end to end, [sum of lengths], in the dtype of `tokens`; and the
        lengths, the index of the second segment's first token within each example, and the labels
        of the pairs, [B] each.
    """
    a, a_end, b, b_end, labels = pairs.T
    zero, one, has_b = np.zeros_like(a), np.ones_like(a), (b_end > b).astype(np.int64)
    # [CLS] a [SEP] b [SEP]: parts of two arrays, where an example without b lacks the last two.
    arrays = [tokens, np.array([tokenizer.cls_id, tokenizer.sep_id], tokens.dtype)]
    begins = np.stack([zero, a, one, b, one], axis=1)
    sizes = np.stack([one, a_end - a, one, b_end - b, has_b], axis=1)
    packed = gather(arrays, np.tile([1, 0, 1, 0, 1], len(pairs)), begins.ravel(), sizes.ravel())
    return packed, sizes.sum(axis=1), a_end - a + 2, labels
