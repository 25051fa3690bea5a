"""The texts of the embedding benchmark: random words, as many as texts of published data sets have.

Lengths are modelled: log-normals, since only means and extremes are published. Characters become
tokens at CHARACTERS_A_TOKEN, which is our assumption for English in a vocabulary of 30,000 pieces.
Where the longest text is published too, the spread is such that the longest of as many draws is
about that. All words have the same number of characters, so that sorting texts by their characters,
as sentence-transformers does, sorts them by their tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BATCH_SIZE = 32  # the default of sentence-transformers' `encode` and `predict`
CHARACTERS_A_TOKEN = 4.5
# Tokens that a reranker's question adds to each text: a [SEP] and 10 words, for those of NQ have 48
# characters on average.
QUESTION = 11
SHORTEST = 4  # tokens of a text, with the special ones
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MTEB = "https://github.com/embeddings-benchmark/mteb"


@dataclass(frozen=True)
class Lengths:
    """A distribution of a text's tokens."""

    like: str
    """What it resembles."""
    mean: float
    """Tokens, without the special ones, before texts are cut at the model's longest."""
    spread: float
    """Standard deviation of the logarithm."""
    source: str
    """What is published of the data set, and where."""
    sorted_call: int | None = None
    """Texts of the large call that the drawn ones are batches of; None where they are the call."""
    alone: bool = False
    """Each text is a call of its own."""


_NQ = Lengths(
    "NQ passages",
    493 / CHARACTERS_A_TOKEN,
    0.77,
    f"2,681,468 passages, 493 characters on average, 17,008 at most ([MTEB]({_MTEB}))",
)
LENGTHS = {
    "queries": Lengths(
        "NQ questions, one a call",
        48 / CHARACTERS_A_TOKEN,
        0.3,
        f"3,452 questions, 48 characters on average ([MTEB]({_MTEB})); the spread is assumed",
        alone=True,
    ),
    "short": Lengths(
        "STS benchmark sentences",
        53.6 / CHARACTERS_A_TOKEN,
        0.44,
        f"2,758 sentences, 53.6 characters on average, 215 at most ([MTEB]({_MTEB}))",
    ),
    "mixed": _NQ,
    "bulk": Lengths(_NQ.like, _NQ.mean, _NQ.spread, _NQ.source, sorted_call=2048),
    "long": Lengths(
        "IMDB reviews",
        1310 / CHARACTERS_A_TOKEN,
        0.63,
        f"50,000 reviews, 1,310 characters on average, 13,704 at most ([MTEB]({_MTEB}))",
    ),
    "proteins": Lengths(
        "Swiss-Prot",
        367.0,
        0.7,
        "release 41 has 44,986,459 amino acids in 122,564 entries; the spread is assumed",
    ),
    "antibodies": Lengths(
        "antibody sequences of OAS",
        120.0,
        0.25,
        "about 120 amino acids on average, 250 at most in the 256 of esm-cpp's own benchmark",
        sorted_call=256,
    ),
}


def sample_tokens(name: str, count: int, longest: int, seed: int) -> NDArray[np.int64]:
    """Draws the tokens of `count` texts, special ones included, in random order.

    Texts of a larger sorted call are whole batches of it, evenly spaced: `encode` sorts all texts
    of a call before it cuts batches, so texts of a large call have little padding.
    """
    lengths = LENGTHS[name]
    rng = np.random.default_rng(seed)
    size = max(count, lengths.sorted_call or 0)
    mu = math.log(lengths.mean) - lengths.spread**2 / 2
    drawn = np.rint(rng.lognormal(mu, lengths.spread, size)).astype(np.int64) + 2
    drawn = np.clip(drawn, SHORTEST, longest)
    if size > count:
        batches = np.sort(drawn)[: size // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE)
        number = max(count // BATCH_SIZE, 1)
        places = (np.arange(number) + 0.5) / number * len(batches)
        drawn = batches[places.astype(np.int64)].ravel()[:count]
    return rng.permutation(drawn)


def fill_of_sorted_batches(tokens: NDArray[np.int64]) -> float:
    """Real tokens among those of batches that are sorted by length and padded to their longest."""
    order, padded = iter(sorted(tokens.tolist(), reverse=True)), 0
    while batch := list(islice(order, BATCH_SIZE)):
        padded += batch[0] * len(batch)
    return float(tokens.sum() / padded)


def _word(number: int) -> str:
    return f"w{number:06d}"


def make_texts(tokens: NDArray[np.int64], vocab_size: int, seed: int) -> list[str]:
    """Random words; with [CLS] and [SEP] a text has as many tokens as asked for."""
    rng = np.random.default_rng(seed)
    return [
        " ".join(map(_word, rng.integers(len(SPECIAL), vocab_size, int(number) - 2)))
        for number in tokens
    ]


def make_pairs(tokens: NDArray[np.int64], vocab_size: int, seed: int) -> list[tuple[str, str]]:
    """One question with each text; `tokens` are those of the pairs, with `QUESTION` of them its."""
    (query,) = make_texts(np.array([QUESTION + 1]), vocab_size, seed + 1)
    return [(query, text) for text in make_texts(tokens - QUESTION, vocab_size, seed)]


def make_tokenizer(vocab_size: int, longest: int, token_types: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of these words, with [CLS] before a text and [SEP] after each part of it."""
    words = [*SPECIAL, *(_word(number) for number in range(len(SPECIAL), vocab_size))]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", SPECIAL.index("[CLS]")), ("[SEP]", SPECIAL.index("[SEP]"))],
    )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if token_types else [])]
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=longest,
        model_input_names=names,
        **{f"{token[1:-1].lower()}_token": token for token in SPECIAL},
    )
