"""Trains a vocabulary of byte pairs, of a unigram model or of characters on a corpus.

With the `tokenizers` library. The special tokens and their ids are those of a trained WordPiece
vocabulary, so examples look the same whatever made them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from bert_unpad.data.text.json_tokenizer import JsonTokenizer
from bert_unpad.data.text.tokenizer import (
    SPECIAL_TOKENS,
    LetterCounts,
    TextTokenizer,
    WordPieceTokenizer,
)

Read = Callable[[], Iterable[Sequence[str]]]


def train_tokenizer(
    kind: str, read: Read, vocab_size: int, lowercase: bool, alphabet_size: int
) -> TextTokenizer:
    """Trains at most `vocab_size` tokens on texts.

    Memory grows with the text for unigram, with its distinct words for the others.

    Args:
        kind: "wordpiece" (see `WordPieceTokenizer.train`), "bpe" (byte pairs: Sennrich et al.,
            2016, arXiv:1508.07909; on bytes: Radford et al., 2019), "unigram" (Kudo, 2018,
            arXiv:1804.10959, on text with marked spaces, arXiv:1808.06226) or "characters" (each
            letter is a token, spaces are dropped: amino acids, nucleotides).
        read: called once or twice; returns an iterable of lists of texts.
        vocab_size: largest number of tokens, with special tokens and letters or bytes.
        lowercase: convert the text to lower case and strip accents.
        alphabet_size: letters to keep, the most frequent ones; others become [UNK]. Byte pairs know
            all.

    Raises:
        ValueError: `vocab_size` is too small for the special tokens and the letters.
    """
    if kind == "wordpiece":
        return WordPieceTokenizer.train(read, vocab_size, lowercase, alphabet_size)
    if kind == "bpe":
        return _train_bpe(read, vocab_size, lowercase)
    train = _train_unigram if kind == "unigram" else _find_characters
    return train(read, vocab_size, lowercase, alphabet_size)


def _train_bpe(read: Read, vocab_size: int, lowercase: bool) -> JsonTokenizer:
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    _check_size(vocab_size, len(bytes_), "bytes")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = _normalizer(lowercase, normalizers.NFC())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=bytes_,
        show_progress=False,
    )
    tokenizer.train_from_iterator(read(), trainer)
    return _finished(tokenizer)


def _train_unigram(
    read: Read, vocab_size: int, lowercase: bool, alphabet_size: int
) -> JsonTokenizer:
    normalizer = _normalizer(lowercase, normalizers.NFKC())
    letters = _count_letters(read, normalizer)
    kept = letters.most_frequent(alphabet_size)
    _check_size(vocab_size, len(kept) + 1, "letters")  # and the mark of a space
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        unk_token="[UNK]",
        show_progress=False,
    )
    # The trainer has no bound on letters, so words with others are left out of what it sees.
    other = {ord(letter): None for letter in letters.all() - kept}

    def known() -> Iterator[Sequence[str]]:
        for texts in read():
            words = (normalizer.normalize_str(text).split(" ") for text in texts)
            yield [" ".join(w for w in text if w.translate(other) == w) for text in words]

    tokenizer.train_from_iterator(known() if other else read(), trainer)
    # The trainer adds probabilities up in an order that changes from run to run: without their last
    # digits, and sorted by them, two runs give the same.
    first = len(SPECIAL_TOKENS)
    scores = [(token, round(score, 6)) for token, score in _scores(tokenizer)]
    pieces = _letters_in_order(scores[first:])
    tokenizer.model = models.Unigram([*scores[:first], *pieces], SPECIAL_TOKENS.index("[UNK]"))
    return _finished(tokenizer)


def _letters_in_order(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Sorts pieces by falling scores, with the scores of unused letters in the letters' order.

    To letters that are in no other way left, the trainer gives the lowest score, and 0.0001 more to
    each than to the one before, in an order that changes from run to run.
    """
    pieces = sorted(pieces, key=lambda x: (-x[1], x[0]))
    unused: list[int] = []
    lowest = pieces[-1][1] if pieces else 0.0
    for place in reversed(range(len(pieces))):
        token, score = pieces[place]
        if score - lowest > 1e-4 * len(unused) + 1e-5:
            break
        if len(token) == 1:
            unused.append(place)
    letters = sorted(pieces[place][0] for place in unused)
    for place, letter in zip(reversed(unused), letters, strict=True):
        pieces[place] = letter, pieces[place][1]
    return sorted(pieces, key=lambda x: (-x[1], x[0]))


def _find_characters(
    read: Read, vocab_size: int, lowercase: bool, alphabet_size: int
) -> JsonTokenizer:
    normalizer = _normalizer(lowercase, normalizers.NFC())
    kept = _count_letters(read, normalizer).most_frequent(alphabet_size)
    _check_size(vocab_size, len(kept), "letters")
    tokens = (*SPECIAL_TOKENS, *sorted(kept))
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    tokenizer.decoder = decoders.Fuse()
    return _finished(tokenizer)


def _count_letters(read: Read, normalizer: normalizers.Normalizer) -> LetterCounts:
    letters = LetterCounts()
    for texts in read():
        letters.add(normalizer.normalize_str(" ".join(texts)))
    return letters


def _scores(tokenizer: Tokenizer) -> list[tuple[str, float]]:
    return json.loads(tokenizer.to_str())["model"]["vocab"]


def _normalizer(lowercase: bool, form: normalizers.Normalizer) -> normalizers.Normalizer:
    parts = [normalizers.NFKD(), normalizers.Lowercase(), normalizers.StripAccents()]
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    return normalizers.Sequence([*(parts if lowercase else [form]), spaces])


def _check_size(vocab_size: int, letters: int, what: str) -> None:
    least = len(SPECIAL_TOKENS) + letters
    if vocab_size < least:
        raise ValueError(
            f"vocab_size: expected at least {least} for the special tokens and the {what} of this "
            f"corpus, got {vocab_size}"
        )


def _finished(tokenizer: Tokenizer) -> JsonTokenizer:
    """Adds what `transformers` puts around a text, and segments."""
    cls, sep = ((token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[cls, sep]
    )
    return JsonTokenizer(tokenizer)
