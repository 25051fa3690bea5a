"""From rows to what a model reads, and from its scores back to predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bert_unpad.evaluate.tasks import Row, Task

__all__ = ["answers_of", "features_of", "predictions_of"]

_MODEL_INPUTS = ("input_ids", "token_type_ids")
_BEST, _LONGEST_ANSWER = 20, 30  # starts and ends that are tried; tokens

Feature = dict[str, Any]


def features_of(
    task: Task, rows: Sequence[Row], tokenizer: Any, max_length: int, stride: int
) -> list[Feature]:
    """Tokens and labels of rows; a long text of an answer makes several, which overlap.

    Args:
        task: of the rows.
        rows: what `read_rows` returns.
        tokenizer: of transformers; for answers a fast one.
        max_length: most tokens of a feature. A question is cut to leave room for its text.
        stride: tokens that two features of a row share, for answers.

    Returns:
        A dict for each: input_ids, token_type_ids where the model has them, and labels, or
        start, end, row, and the place of each token in the text (offsets; None outside of it).

    Raises:
        ValueError: `max_length` leaves no room for a text.
    """
    texts = [[row[column] for row in rows] for column in task.columns]
    if not task.classes:
        return _answer_features(rows, texts, tokenizer, max_length, stride)
    least = tokenizer.num_special_tokens_to_add(pair=len(texts) > 1) + 1
    if max_length < least:
        raise ValueError(f"--max-length: expected at least {least}, got {max_length}")
    encoded = tokenizer(*texts, truncation=True, max_length=max_length)
    return [
        {name: encoded[name][i] for name in _MODEL_INPUTS if name in encoded}
        | {"labels": row["label"]}
        for i, row in enumerate(rows)
    ]


def _answer_features(
    rows: Sequence[Row], texts: Sequence[list[str]], tokenizer: Any, max_length: int, stride: int
) -> list[Feature]:
    # Beside the longest question: the tokens shared, one that is new, and three that mark the ends.
    longest = max_length - stride - tokenizer.num_special_tokens_to_add(pair=True) - 1
    if longest < 1:
        raise ValueError(
            f"--max-length: expected at least {max_length - longest + 1} with --stride {stride}, "
            f"got {max_length}"
        )
    questions, contexts = texts
    encoded = tokenizer(
        _shortened(questions, tokenizer, longest),
        contexts,
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    features = []
    for i, row in enumerate(encoded["overflow_to_sample_mapping"]):
        parts = encoded.sequence_ids(i)
        offsets = [
            tuple(place) if part == 1 else None
            for place, part in zip(encoded["offset_mapping"][i], parts, strict=True)
        ]
        start, end = _answer_tokens(rows[row]["answers"], offsets)
        features.append(
            {name: encoded[name][i] for name in _MODEL_INPUTS if name in encoded}
            | {"start": start, "end": end, "row": row, "offsets": offsets}
        )
    return features


def _shortened(texts: Sequence[str], tokenizer: Any, longest: int) -> list[str]:
    """Texts cut at the end where they have more tokens than `longest`."""
    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    found = []
    for text, places in zip(texts, tokenizer(texts, **options)["offset_mapping"], strict=True):
        while len(places) > longest:  # more than once where a cut changes tokens before it
            text = text[: min(places[longest - 1][1], len(text) - 1)]
            places = tokenizer(text, **options)["offset_mapping"]
        found.append(text)
    return found


def _answer_tokens(answers: Row, offsets: Sequence[tuple[int, int] | None]) -> tuple[int, int]:
    """First and last token of the first answer; 0 twice where it is not in these tokens."""
    begin = answers["answer_start"][0]
    end = begin + len(answers["text"][0])
    inside = [i for i, place in enumerate(offsets) if place and place[0] < end and place[1] > begin]
    text = [place for place in offsets if place]
    if not inside or text[0][0] > begin or text[-1][1] < end:
        return 0, 0
    return inside[0], inside[-1]


def predictions_of(task: Task, scores: NDArray) -> NDArray:
    """The classes, or numbers, that scores [N, classes] stand for."""
    return scores[:, 0] if task.classes == 1 else scores.argmax(-1)


def answers_of(
    rows: Sequence[Row], features: Sequence[Feature], scores: Sequence[NDArray]
) -> list[str]:
    """The answer of each row: the span with the highest sum of its scores, of all its features.

    Args:
        rows: with their texts.
        features: of the rows.
        scores: of each feature, float [tokens, 2]: of a start and of an end.
    """
    best: list[tuple[float, str]] = [(-np.inf, "") for _ in rows]
    for feature, score in zip(features, scores, strict=True):
        starts, ends = (np.argsort(-score[:, side], kind="stable")[:_BEST] for side in (0, 1))
        places, row = feature["offsets"], feature["row"]
        for first in starts:
            for last in ends:
                if not (places[first] and places[last] and 0 <= last - first < _LONGEST_ANSWER):
                    continue
                total = float(score[first, 0] + score[last, 1])
                if total > best[row][0]:
                    text = rows[row]["context"][places[first][0] : places[last][1]]
                    best[row] = (total, text)
    return [text for _, text in best]
