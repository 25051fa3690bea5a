"""SQuAD: from questions and texts to features, and from scores back to answers and measures.

Exact match and F1 over words (Rajpurkar et al., 2016, arXiv:1606.05250, 6.1) are of answers in
lower case without punctuation and articles, against the best of the given ones.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad.evaluate.tasks import Row

Feature = dict[str, Any]

_BEST, _LONGEST_ANSWER = 20, 30  # starts and ends that are tried; tokens


def answer_features(
    rows: Sequence[Row], tokenizer: Any, max_length: int, stride: int
) -> list[Feature]:
    """Tokens of questions and texts; a long text makes several features, which overlap.

    Args:
        rows: with question, context and answers.
        tokenizer: of transformers, a fast one.
        max_length: most tokens of a feature. A question is cut to leave room for its text.
        stride: tokens that two features of a row share.

    Returns:
        A dict for each: input_ids, attention_mask, token_type_ids where the model has them,
        start_positions and end_positions (0 where the answer is elsewhere), row, and the place of
        each token in the text (offsets; None outside of it).

    Raises:
        ValueError: `max_length` leaves no room for a text.
    """
    # Beside the longest question: the tokens shared, one that is new, and three that mark the ends.
    longest = max_length - stride - tokenizer.num_special_tokens_to_add(pair=True) - 1
    if longest < 1:
        raise ValueError(
            f"--max-length: expected at least {max_length - longest + 1} with --stride {stride}, "
            f"got {max_length}"
        )
    encoded = tokenizer(
        [_shortened(row["question"], tokenizer, longest) for row in rows],
        [row["context"] for row in rows],
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    features = []
    places, of_rows = encoded.pop("offset_mapping"), encoded.pop("overflow_to_sample_mapping")
    for i, row in enumerate(of_rows):
        parts = encoded.sequence_ids(i)
        offsets = [
            place if part == 1 else None for place, part in zip(places[i], parts, strict=True)
        ]
        start, end = _answer_tokens(rows[row]["answers"], offsets)
        features.append(
            {name: values[i] for name, values in encoded.items()}
            | {"start_positions": start, "end_positions": end, "row": row, "offsets": offsets}
        )
    return features


def _shortened(text: str, tokenizer: Any, longest: int) -> str:
    """The text, cut at the end where it has more tokens than `longest`."""
    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    while len(places := tokenizer(text, **options)["offset_mapping"]) > longest:
        # More than once where a cut changes the tokens before it.
        text = text[: min(places[longest - 1][1], len(text) - 1)]
    return text


def _answer_tokens(answers: Row, offsets: Sequence[tuple[int, int] | None]) -> tuple[int, int]:
    """First and last token of the first answer; 0 twice where it is not in these tokens."""
    begin = answers["answer_start"][0]
    end = begin + len(answers["text"][0])
    inside = [i for i, place in enumerate(offsets) if place and place[0] < end and place[1] > begin]
    text = [place for place in offsets if place]
    if not inside or text[0][0] > begin or text[-1][1] < end:
        return 0, 0
    return inside[0], inside[-1]


def answers_of(
    rows: Sequence[Row], features: Sequence[Feature], starts: NDArray, ends: NDArray
) -> list[str]:
    """The answer of each row: the span with the highest sum of its scores, of all its features.

    Args:
        rows: with their texts.
        features: F of the rows.
        starts: scores of each token as the first of the answer, float [F, S].
        ends: the same, as the last.
    """
    best: list[tuple[float, str]] = [(-np.inf, "") for _ in rows]
    for feature, *scores in zip(features, starts, ends, strict=True):
        places, row = feature["offsets"], feature["row"]
        start, end = (score[: len(places)] for score in scores)
        firsts, lasts = (np.argsort(-score, kind="stable")[:_BEST] for score in (start, end))
        for first in firsts:
            for last in lasts:
                if not (places[first] and places[last] and 0 <= last - first < _LONGEST_ANSWER):
                    continue
                total = float(start[first] + end[last])
                if total > best[row][0]:
                    text = rows[row]["context"][places[first][0] : places[last][1]]
                    best[row] = (total, text)
    return [text for _, text in best]


def measures(found: Sequence[str], rows: Sequence[Row]) -> dict[str, float]:
    """Means of exact match and F1 of the answers found, each against the best of its row's."""
    pairs = [
        [(_words(text), _words(answer)) for answer in row["answers"]["text"]]
        for text, row in zip(found, rows, strict=True)
    ]
    return {
        "exact_match": float(np.mean([any(a == b for a, b in pair) for pair in pairs])),
        "answer_f1": float(np.mean([max(_f1(a, b) for a, b in pair) for pair in pairs])),
    }


def _words(answer: str) -> list[str]:
    kept = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def _f1(found: list[str], answer: list[str]) -> float:
    common = sum((Counter(found) & Counter(answer)).values())
    return 2 * common / (len(found) + len(answer)) if common else 0.0
