"""Byte pairs and unigram: training, saving, words; tokenizers of other people."""

import json
import random

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bert_unpad.data import (
    DataConfig,
    JsonTokenizer,
    TokenMasker,
    WordPieceTokenizer,
    prepare,
    train_tokenizer,
)
from bert_unpad.data.formats.sources import open_files
from bert_unpad.data.preparation.engines import InProcess
from bert_unpad.data.preparation.pipeline import Pipeline
from bert_unpad.data.text.json_tokenizer import load_tokenizer
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS
from bert_unpad.pretrain.config import ConfigError, read_config
from tests.support.prepared_text import WORDS as FEW
from tests.support.seeds import derived

KINDS = ("wordpiece", "bpe", "unigram")
WORDS = random.Random(derived(4)).sample(
    [a + b + c for a in ("ka", "lo", "mi", "tu") for b in ("so", "ra", "ne") for c in "aeiou"], 60
)
TEXTS = [" ".join(random.Random(derived(n)).choices(WORDS, k=12)) + "." for n in range(300)]
JAPANESE = ["日本語の文章です。", "東京は日本の首都です。", "猫が好きです。"] * 20


def train(kind: str, texts=TEXTS, size: int = 400, **options):
    values = {"lowercase": True, "alphabet_size": 1000} | options
    return train_tokenizer(kind, lambda: [texts[:150], texts[150:]], size, **values)


@pytest.fixture(scope="module", params=KINDS)
def trained(request):
    return train(request.param)


def test_all_kinds_have_the_same_special_tokens(trained):
    assert trained.vocabulary[:5] == SPECIAL_TOKENS
    assert (trained.pad_id, trained.unk_id, trained.cls_id) == (0, 1, 2)
    assert (trained.sep_id, trained.mask_id) == (3, 4)
    assert trained.unmaskable_ids == (0, 2, 3, 4)
    assert 60 < trained.vocab_size <= 400


def test_text_comes_back(trained):
    for text in TEXTS[:20]:
        (ids,) = trained.encode_batch([text.upper()])
        assert trained.decode(ids).replace(" .", ".").strip() == text
        assert min(ids) >= 5


def test_words_begin_where_spaces_are(trained):
    (ids,) = trained.encode_batch(["kasoa lorae; minei"])
    begins = np.flatnonzero(~trained.is_continuation[ids])
    assert 3 <= len(begins) <= 4  # WordPiece begins a word at a punctuation mark
    assert begins[0] == 0
    assert trained.decode(ids[begins[-1] :]).strip() == "minei"
    assert not trained.is_continuation[list(range(5))].any()


def test_special_tokens_in_a_text_are_ordinary(trained):
    (ids,) = trained.encode_batch(["kasoa [SEP] [MASK] lorae [CLS]"])
    assert not {trained.sep_id, trained.mask_id, trained.cls_id, trained.pad_id} & set(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_repeatable(kind):
    rng = random.Random(derived(1))
    words = ["".join(rng.choices("abcdefgh0123", k=rng.randint(1, 8))) for _ in range(400)]
    texts = [" ".join(rng.choices(words, k=9)) for _ in range(200)]
    found = [train(kind, texts, 350) for _ in range(6)]
    assert len({json.dumps(tokenizer.identity()) for tokenizer in found}) == 1
    assert found[0].vocab_size > 100  # pieces, not letters alone
    # Few words, which leave letters in no piece.
    texts = [f"N{i // 5} {' '.join(rng.choices(FEW, k=rng.randint(2, 14)))}." for i in range(600)]
    assert len({json.dumps(train(kind, texts).identity()) for _ in range(4)}) == 1


def test_saved_and_loaded(trained, tmp_path):
    trained.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(trained.files)
    again = load_tokenizer(tmp_path)
    assert type(again) is type(trained)
    assert again.identity() == trained.identity()
    assert again.encode_batch(TEXTS[:9]) == trained.encode_batch(TEXTS[:9])
    np.testing.assert_array_equal(again.is_continuation, trained.is_continuation)
    assert again.unmaskable_ids == trained.unmaskable_ids


def test_transformers_reads_it(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    trained.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs(TEXTS[0])["input_ids"]
    assert ids == [trained.cls_id, *trained.encode_batch([TEXTS[0]])[0], trained.sep_id]
    assert (theirs.mask_token_id, theirs.pad_token_id) == (trained.mask_id, trained.pad_id)


def test_whole_words_and_spans_of_any_tokenizer(trained):
    ids = [i for text in trained.encode_batch(TEXTS[:30]) for i in text]
    masker = TokenMasker(trained, mask_unit="word", masked_lm_prob=0.3)
    result = masker(np.array(ids), np.array([len(ids)]), np.array([0]), 0)
    chosen = np.zeros(len(ids), bool)
    chosen[result.positions] = True
    inside = np.flatnonzero(trained.is_continuation[ids])
    np.testing.assert_array_equal(chosen[inside], chosen[inside - 1])
    assert chosen.any()


def test_alphabet_size():
    letters = set("".join(JAPANESE))
    for kind in ("wordpiece", "unigram"):
        small = train(kind, JAPANESE, 300, lowercase=False, alphabet_size=5)
        (ids,) = small.encode_batch(["猫"])
        assert small.unk_id in ids
        known = {c for token in small.vocabulary[5:] for c in token} & letters
        assert len(known) <= 5
        whole = train(kind, JAPANESE, 300, lowercase=False, alphabet_size=100)
        assert {c for token in whole.vocabulary[5:] for c in token} >= letters - {"。"}
        assert whole.unk_id not in whole.encode_batch(["猫です"])[0]
    pairs = train("bpe", JAPANESE, 300, lowercase=False)
    (ids,) = pairs.encode_batch(["犬 é ñ"])
    assert pairs.unk_id not in ids
    assert pairs.decode(ids).strip() == "犬 é ñ"  # bytes know every letter


@pytest.mark.parametrize(("kind", "what"), [("bpe", "bytes"), ("unigram", "letters")])
def test_too_small_vocabularies_are_refused(kind, what):
    with pytest.raises(ValueError, match=rf"^vocab_size: expected at least \d+ for the .*{what}"):
        train(kind, size=12)


def test_characters(tmp_path):
    proteins = ["MKTAYIAKQR QISFVKSHFS", "MVLSPADKTN", "GATTACA"] * 9
    tokenizer = train("characters", proteins, 40, lowercase=False)
    letters = sorted(set("".join(proteins)) - {" "})
    assert tokenizer.vocabulary == (*SPECIAL_TOKENS, *letters)
    assert tokenizer.unmaskable_ids == (0, 2, 3, 4)
    (ids,) = tokenizer.encode_batch(["GATX ta"])
    g, a, t, unknown = (*(tokenizer.vocabulary.index(c) for c in "GAT"), tokenizer.unk_id)
    assert ids == [g, a, t, unknown, unknown, unknown]
    assert tokenizer.decode([tokenizer.cls_id, g, a]) == "[CLS]GA"
    assert not tokenizer.is_continuation.any()
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).identity() == tokenizer.identity()
    few = train("characters", proteins, 40, lowercase=False, alphabet_size=3)
    assert few.vocab_size == 8
    assert train("characters", proteins, 40).encode_batch(["GA"]) == [[9, 5]]  # lower case
    with pytest.raises(ValueError, match=r"^vocab_size: expected at least \d+ for the .*letters"):
        train("characters", proteins, 12)


def _foreign(tmp_path, special: list[str], kind: str = "bpe", config: dict | None = None):
    """A tokenizer.json as others write it."""
    tokenizer = Tokenizer(models.BPE())
    if kind == "bpe":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=350, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(special)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path / "tokenizer.json"


def test_names_of_special_tokens(tmp_path):
    path = _foreign(tmp_path, ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<extra>"])
    for found in (JsonTokenizer.from_file(path), JsonTokenizer.from_file(tmp_path)):
        names = [found.vocabulary[i] for i in (found.cls_id, found.sep_id, found.mask_id)]
        assert names == ["<s>", "</s>", "<mask>"]
        special = {found.vocabulary[i] for i in found.unmaskable_ids}
        assert special == {"<s>", "<pad>", "</s>", "<mask>", "<extra>"}
        (ids,) = found.encode_batch(["kasoa <mask> lorae minei"])
        assert len(ids) > 4  # no truncation, no padding
        assert found.mask_id not in ids
        # A sentence within a text: its first word is that of the middle of a sentence.
        assert found.vocabulary[ids[0]].startswith("\u0120")


def test_roles_of_the_file_beside(tmp_path):
    config = {"bos_token": "<a>", "eos_token": {"content": "<b>"}, "mask_token": "<m>"}
    path = _foreign(tmp_path, ["<a>", "<b>", "<m>"], config=config)
    found = JsonTokenizer.from_file(path)
    assert (found.pad_id, found.unk_id) == (None, None)
    names = [found.vocabulary[i] for i in (found.cls_id, found.sep_id, found.mask_id)]
    assert names == ["<a>", "<b>", "<m>"]
    (ids,) = found.encode_batch(TEXTS[:1])
    assert len(TokenMasker(found)(np.array(ids), [len(ids)], [0], 0).positions)
    found.save(tmp_path / "again")
    assert JsonTokenizer.from_file(tmp_path / "again").identity() == found.identity()


def test_ids_without_a_token_are_never_used(tmp_path):
    path = _foreign(tmp_path, ["[CLS]", "[SEP]", "[MASK]"])
    about = json.loads(path.read_text())
    gap = max(token["id"] for token in about["added_tokens"]) + 3
    about["added_tokens"].append(about["added_tokens"][0] | {"id": gap, "content": "<far>"})
    path.write_text(json.dumps(about))
    found = JsonTokenizer.from_file(path)
    if found.vocab_size == gap + 1:
        assert {gap, gap - 1, gap - 2} <= set(found.unmaskable_ids)
        assert found.vocabulary[gap - 1] == ""
    else:  # the library has closed the gap
        assert "" not in found.vocabulary


def test_without_marks_every_token_is_a_word(tmp_path):
    path = _foreign(tmp_path, ["[CLS]", "[SEP]", "[MASK]"], kind="plain")
    assert not JsonTokenizer.from_file(path).is_continuation.any()


def test_what_is_missing_is_named(tmp_path):
    path = _foreign(tmp_path, ["<s>", "</s>"])
    message = r"tokenizer.json: special tokens: expected .*; missing: mask_token \(\[MASK\], <mask>"
    with pytest.raises(ValueError, match=message):
        JsonTokenizer.from_file(path)
    with pytest.raises(
        FileNotFoundError, match=r"^tokenizer: .*nothing.*expected a tokenizer.json"
    ):
        JsonTokenizer.from_file(tmp_path / "nothing.json")
    path.write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match=r"^tokenizer: .*tokenizer.json is no tokenizer.json"):
        JsonTokenizer.from_file(path)


@pytest.fixture
def corpus(tmp_path):
    text = "\n\n".join("\n".join(TEXTS[i : i + 3]) for i in range(0, 300, 3))
    (tmp_path / "text.txt").write_text(text)
    common = {"source": str(tmp_path / "text.txt"), "cache_dir": str(tmp_path / "cache")}
    return common | {"vocab_size": 350, "max_seq_length": 32}


@pytest.mark.parametrize("kind", ["bpe", "unigram", "characters"])
def test_prepared_with_a_trained_tokenizer(corpus, kind, caplog):
    caplog.set_level("INFO")
    data = [prepare(DataConfig(**corpus, tokenizer=kind), progress=False) for _ in range(2)]
    assert data[0].path == data[1].path
    assert sum("training a vocabulary" in record.message for record in caplog.records) == 1
    tokenizer = data[1].tokenizer
    assert isinstance(tokenizer, JsonTokenizer)
    example = data[1].train.batch(np.array([0])).tokens
    assert example[0] == tokenizer.cls_id
    assert tokenizer.unk_id not in example
    inputs = data[1].collator()(np.arange(9), 0)
    assert inputs.num_masked


def test_prepared_with_a_given_tokenizer(corpus, tmp_path):
    path = _foreign(tmp_path, ["<s>", "<pad>", "</s>", "<mask>"])
    config = DataConfig(**corpus, tokenizer=str(path), objective="mlm")
    data = prepare(config, progress=False)
    assert data.tokenizer.identity() == JsonTokenizer.from_file(path).identity()
    assert data.path != prepare(DataConfig(**corpus, tokenizer="bpe"), progress=False).path
    again = prepare(config, progress=False)
    assert again.tokenizer.vocabulary == data.tokenizer.vocabulary
    (data.path / "tokenizer" / "tokenizer.json").write_text("{}")
    rebuilt = prepare(config, progress=False)  # the digest says that it was altered
    assert rebuilt.tokenizer.identity() == data.tokenizer.identity()


def test_a_sample_has_its_size(tmp_path):
    texts = [f"{n} " + "word " * random.Random(derived(n)).randint(5, 200) for n in range(3000)]
    (tmp_path / "text").write_text("\n\n".join([*texts, *texts]))  # each is there twice
    config = DataConfig(str(tmp_path / "text"), validation_share=0.2)
    work = Pipeline(
        tmp_path / "out", config, open_files(tmp_path / "text"), InProcess(), block_bytes=100_000
    )
    work.read()
    work.plan()
    build, corpus = work.build, work.build.corpus()
    every = list(build.sample(corpus, None))
    assert 2000 < len(every) < 2800
    assert list(build.sample(corpus, 1e3)) == every
    size = sum(len(sentence) + 1 for document in every for sentence in document) / 1e6
    assert size == corpus.train_size / 1e6
    for share in (0.05, 0.4):
        sample = list(build.sample(corpus, share * size))
        assert sample == list(build.sample(corpus, share * size))
        found = sum(len(sentence) + 1 for document in sample for sentence in document) / 1e6
        assert 0.7 * share * size < found < share * size + 0.002
        assert all(document in every for document in sample[:50])
        first = [int(document[0].split()[0]) for document in sample]
        assert first == sorted(first)
        assert 0.4 < np.mean(first) / 1500 < 1.4
    assert len(list(build.sample(corpus, 1e-9))) == 1


def test_a_vocabulary_of_a_sample(corpus):
    whole, part = (
        prepare(DataConfig(**corpus, vocab_sample_mb=size), progress=False).tokenizer
        for size in (None, 0.0004)
    )
    assert whole.vocabulary != part.vocabulary
    assert len(part.vocabulary) < len(whole.vocabulary)


BASE = ["--batching.global_batch_size", "8", "--schedule.total_steps", "9"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tokenizer": "wordpeice"},
            "tokenizer: expected one of wordpiece, bpe, unigram, characters, or ",
        ),
        ({"tokenizer": "bpe", "alphabet_size": 9}, "alphabet_size: expected 1000 with tokenizer b"),
        ({"tokenizer": "bpe", "vocab_file": "v.txt"}, "vocab_file: expected null with tokenizer b"),
        ({"vocab_file": "v.txt", "vocab_sample_mb": 1}, "vocab_sample_mb: expected null with the"),
        ({"vocab_file": "v.txt", "alphabet_size": 99}, "alphabet_size: expected 1000 with "),
        ({"alphabet_size": 0}, "alphabet_size: expected 1 or more, got 0"),
        ({"tokenizer": "a/b.json", "lowercase": True}, "lowercase: expected null .* got true"),
        ({"tokenizer": "a/b.json", "lowercase": False}, "lowercase: expected null .* a/b.json, wh"),
        ({"vocab_sample_mb": 0}, "vocab_sample_mb: expected more than 0, got 0"),
    ],
)
def test_settings_that_do_not_fit(given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        DataConfig(**given)
    options = [f"--data.{name}={value}" for name, value in given.items()]
    with pytest.raises(ConfigError, match=rf"^data\.{message}"):
        read_config([*BASE, *options])


def test_wordpiece_is_what_it_was():
    """The default's vocabulary does not depend on how the training is called."""
    direct = WordPieceTokenizer.train(lambda: [TEXTS], 300)
    assert train("wordpiece", TEXTS, 300).vocabulary == direct.vocabulary
