"""Splitting documents into sentences by regular expressions, to compare the C++ with."""

import re

# A sentence ends at .!? (and closing quotes) before white space and something that can begin a
# sentence, or at a CJK full stop (escaped: full-width characters are easily misread in source).
_SENTENCE_END = re.compile(
    r"""[.!?]["')\]]*\s+(?=["'(\[`*<-]*[^\W_a-z])|[\u3002\uff01\uff1f]["'\u201d\u300d\uff09]*"""
)
_ABBREVIATION = re.compile(
    r"(?i)al|approx|cf|dr|e\.g|eq|figs?|i\.e|inc|jr|mrs?|ms|no|prof|resp|sec|sr|st|vol|vs"
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a document."""
    sentences = []
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = " ".join(paragraph.split())
        start = 0
        for match in _SENTENCE_END.finditer(paragraph):
            if match[0][0] == "." and _is_abbreviation(paragraph, match.start()):
                continue
            sentences.append(paragraph[start : match.end()].strip())
            start = match.end()
        sentences.append(paragraph[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _is_abbreviation(text: str, end: int) -> bool:
    word = text[text.rfind(" ", 0, end) + 1 : end].lstrip("\"'([")
    initial = len(word) == 1 and word.isupper() and word != "I"
    return initial or _ABBREVIATION.fullmatch(word) is not None
