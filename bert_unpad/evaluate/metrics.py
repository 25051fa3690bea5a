"""What is measured, from predictions and labels; each of them is 1 at best.

Matthews (1975) for CoLA, Pearson and Spearman for STS-B (ties get their mean rank), F1 of class 1
for MRPC and QQP; exact match and F1 over words for SQuAD (Rajpurkar et al., 2016, arXiv:1606.05250,
6.1), on answers in lower case without punctuation and articles, against the best of the given ones.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["METRICS"]


def _accuracy(found: NDArray, labels: NDArray) -> float:
    return float((found == labels).mean())


def _f1(found: NDArray, labels: NDArray) -> float:
    both = float(((found == 1) & (labels == 1)).sum())
    total = float((found == 1).sum() + (labels == 1).sum())
    return 2 * both / total if total else 0.0


def _matthews(found: NDArray, labels: NDArray) -> float:
    return _pearson(found, labels)  # the same, of values 0 and 1


def _pearson(found: NDArray, labels: NDArray) -> float:
    x, y = (np.asarray(values, np.float64) for values in (found, labels))
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / scale if scale else 0.0


def _ranks(values: NDArray) -> NDArray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[places]


def _spearman(found: NDArray, labels: NDArray) -> float:
    return _pearson(_ranks(found), _ranks(labels))


def _words(answer: str) -> list[str]:
    kept = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def _answer_f1_of(found: str, answer: str) -> float:
    ours, theirs = _words(found), _words(answer)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def _best(score: Callable[[str, str], float]) -> Callable[..., float]:
    def mean(found: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
        best = [
            max(score(text, answer) for answer in given)
            for text, given in zip(found, answers, strict=True)
        ]
        return sum(best) / len(best)

    return mean


METRICS: dict[str, Callable[..., float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
    "exact_match": _best(lambda found, answer: float(_words(found) == _words(answer))),
    "answer_f1": _best(_answer_f1_of),
}
"""Functions of predictions and labels, in the order of the examples."""
