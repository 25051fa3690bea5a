"""WordPiece: special ids, training, vocabulary files, whole-word information."""

import random

import numpy as np
import pytest

from bert_unpad.data import WordPieceTokenizer
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS
from tests.support.seeds import derived

TEXTS = ["The cat sat on the mat.", "A cat sits; the dogs sat, sitting.", "Cats and mats and dogs"]


@pytest.fixture(scope="module")
def trained():
    return WordPieceTokenizer.train(lambda: [TEXTS] * 3, 80)


def test_ids_round_trip_and_continuations_are_marked(trained):
    (ids,) = trained.encode_batch(["The  cats SAT"])
    assert trained.decode(ids) == "the cats sat"
    pieces = [trained.vocabulary[i] for i in ids]
    assert [p.startswith("##") for p in pieces] == trained.is_continuation[ids].tolist()


def test_rare_letters_are_left_out():
    texts = [["aab aac aad"] * 3, ["bbe"]]
    limited = WordPieceTokenizer.train(lambda: texts, 80, limit_alphabet=2)
    assert {t for t in limited.vocabulary[5:] if len(t) == 1} == {"a", "b"}
    assert limited.encode_batch(["e"]) == [[limited.unk_id]]


def test_words_of_more_than_100_characters_are_not_learned_from():
    """They become [UNK]; to learn from one takes time in proportion to its length squared."""
    long = "xy" * 50  # 100 characters
    longer = f"z{'qw' * 50}"  # 101
    texts = [f"a cat {long}. a cat, {longer}.{longer}"] * 3
    tokenizer = WordPieceTokenizer.train(lambda: [texts], 300)
    assert long in tokenizer.vocabulary
    assert not set("zqw") & set("".join(tokenizer.vocabulary[5:]))
    x, unknown = tokenizer.vocabulary.index(long), tokenizer.unk_id
    assert tokenizer.encode_batch([long, f"{long}x", longer]) == [[x], [unknown], [unknown]]
    # Accents are stripped before the letters are counted.
    accents = "e\u0301" * 100
    assert "e" * 100 in WordPieceTokenizer.train(lambda: [[accents] * 3], 300).vocabulary


def test_case_is_kept_if_asked():
    cased = WordPieceTokenizer.train(lambda: [TEXTS] * 3, 80, lowercase=False)
    assert cased.decode(cased.encode_batch(["The cat"])[0]) == "The cat"


def test_vocab_file_may_hold_special_tokens_anywhere(tmp_path):
    path = tmp_path / "vocab.txt"
    tokens = ["[PAD]", "[unused0]", "a", "b", "##b", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2028"]
    # No line end after the last one; one odd token; a byte-order mark.
    path.write_text("\n".join(tokens), "utf-8-sig")
    tokenizer = WordPieceTokenizer.from_vocab_file(path)
    assert tokenizer.vocabulary[0] == "[PAD]"
    assert tokenizer.vocab_size == 10
    assert tokenizer.encode_batch(["a ab q"]) == [[2, 2, 4, 5]]
    assert tokenizer.mask_id == 8
    assert np.flatnonzero(tokenizer.is_continuation).tolist() == [4]


def test_bad_vocabularies_are_named(tmp_path):
    path = tmp_path / "vocab.txt"
    with pytest.raises(FileNotFoundError, match=r"vocab_file: .*vocab\.txt does not exist"):
        WordPieceTokenizer.from_vocab_file(path)
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    with pytest.raises(ValueError, match=r"vocab_file: .*vocab\.txt.*missing: \[MASK\]"):
        WordPieceTokenizer.from_vocab_file(path)
    path.write_bytes(b"[PAD]\n\xff\n")
    with pytest.raises(ValueError, match=r"vocab_file: .*vocab\.txt: .*can't decode byte"):
        WordPieceTokenizer.from_vocab_file(path)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": "no"}')
    with pytest.raises(ValueError, match=r"config\.json: do_lower_case: expected true or false"):
        WordPieceTokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="'a' is there twice"):
        WordPieceTokenizer([*SPECIAL_TOKENS, "a", "a"])
    with pytest.raises(ValueError, match="vocab_size: expected at least"):
        WordPieceTokenizer.train(lambda: [TEXTS], 10)


def test_sentences_together_are_what_they_are_alone():
    rng = random.Random(derived(0))
    letters = "abAB\u00e9\u0130\u03a3\u0301\u4e00 .!?-'##\x00\u00ad\t"
    vocabulary = [*SPECIAL_TOKENS, *["a", "b", "##a", "##b", "e", "##e", ".", "!", "一", "i", "ab"]]
    for extra, mark in (([], ""), ([], "\u2e2e"), (["\u2e2e"], ""), (["\u2e2e"], "\u2e2e")):
        for lowercase in (True, False):
            tokenizer = WordPieceTokenizer([*vocabulary, *extra], lowercase)
            sentences = [
                "".join(rng.choices(letters + mark, k=rng.randint(0, 30))) for _ in range(220)
            ]
            expected = tokenizer.encode_batch(sentences)
            ids, lengths = tokenizer.encode_sentences(sentences)
            assert lengths.tolist() == [len(one) for one in expected]
            assert ids.tolist() == [i for one in expected for i in one]
            assert ids.dtype == np.int32
    ids, lengths = WordPieceTokenizer(vocabulary).encode_sentences([])
    assert len(ids) == len(lengths) == 0
