"""Examples of one segment, and of two segments in order or swapped."""

import numpy as np
import pytest

from bert_unpad.data import DataConfig, ShardDataset, ShardWriter, prepare
from bert_unpad.data.text.corpus import TokenizedCorpus
from bert_unpad.data.text.examples import make_examples
from bert_unpad.data.text.pairs import BLOCK
from bert_unpad.pretrain.config import ConfigError, read_config
from tests.support.numbered_corpus import FIRST, corpus_of
from tests.support.seeds import derived


def _examples(corpus, tokenizer, longest: int, seed: int = 0, **what) -> list[tuple]:
    """(ids, second start, label) of each example."""
    found = []
    for tokens, lengths, second, labels in make_examples(
        corpus, tokenizer, max_seq_length=longest, short_seq_prob=0.1, seed=seed, **what
    ):
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        found += zip([p.tolist() for p in parts], second.tolist(), labels.tolist(), strict=True)
    return found


def _random_documents(seed: int, count: int = 200) -> list[list[int]]:
    rng = np.random.default_rng(derived(seed))
    return [rng.integers(1, 30, rng.integers(1, 9)).tolist() for _ in range(count)]


@pytest.mark.parametrize("longest", [5, 16, 128])
def test_documents_apart(tokenizer, longest):
    documents = _random_documents(1)
    corpus = corpus_of(documents)
    found = iter(_examples(corpus, tokenizer, longest, objective="mlm", documents="apart"))
    token = FIRST
    for document in documents:
        left = sum(document)
        while left:
            size = min(left, longest - 2)
            ids, second, label = next(found)
            assert ids == [tokenizer.cls_id, *range(token, token + size), tokenizer.sep_id]
            assert (second, label) == (len(ids), -100)
            left, token = left - size, token + size
    assert next(found, None) is None


@pytest.mark.parametrize("longest", [5, 16, 128])
def test_documents_joined(tokenizer, longest):
    documents = _random_documents(2)
    text: list[int] = []
    token = FIRST
    for document in documents:
        text += [tokenizer.sep_id] * bool(text) + list(range(token, token + sum(document)))
        token += sum(document)
    expected = []
    for begin in range(0, len(text), longest - 2):
        piece = text[begin : begin + longest - 2]
        if piece[0] == tokenizer.sep_id:
            piece = piece[1:]
        if piece and piece[-1] == tokenizer.sep_id:
            piece = piece[:-1]
        if piece:
            expected.append([tokenizer.cls_id, *piece, tokenizer.sep_id])
    corpus = corpus_of(documents)
    found = _examples(corpus, tokenizer, longest, objective="mlm", documents="joined")
    assert [ids for ids, _, _ in found] == expected
    assert all((second, label) == (len(ids), -100) for ids, second, label in found)


@pytest.mark.parametrize("documents", ["apart", "joined"])
def test_blocks_hold_every_token_once(tokenizer, documents):
    """More examples and more documents than a block has."""
    corpus = corpus_of([[7], [1]] * (BLOCK // 2 + 100) + [[3, 2]])
    found = _examples(corpus, tokenizer, 5, objective="mlm", documents=documents)
    assert len(found) > BLOCK
    ordinary = [t for ids, _, _ in found for t in ids if t >= FIRST]
    assert ordinary == corpus.tokens.tolist()


@pytest.mark.parametrize("documents", ["apart", "joined"])
def test_no_document_and_one_token(tokenizer, documents):
    none = TokenizedCorpus(np.empty(0, np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert _examples(none, tokenizer, 8, objective="mlm", documents=documents) == []
    one = _examples(corpus_of([[1]]), tokenizer, 8, objective="mlm", documents=documents)
    assert one == [([tokenizer.cls_id, FIRST, tokenizer.sep_id], 3, -100)]


def test_sentence_order(tokenizer):
    documents = _random_documents(3, 400)
    corpus = corpus_of(documents)
    ends = corpus.sentence_offsets[corpus.document_offsets[1:]] + FIRST
    labels, covered = [], 0
    for ids, second, label in _examples(corpus, tokenizer, 64, objective="mlm_sop"):
        assert len(ids) <= 64
        if label == -100:
            assert second == len(ids) == 3  # a document of one word
            continue
        a, b = np.array(ids[1 : second - 1]), np.array(ids[second:-1])
        assert np.searchsorted(ends, a[0], "right") == np.searchsorted(ends, b[-1], "right")
        first, last = (a, b) if label == 0 else (b, a)
        assert first[-1] < last[0]
        for segment in (a, b):
            np.testing.assert_array_equal(np.diff(segment), 1)
        labels.append(label)
        covered += len(a) + len(b)
    assert abs(np.mean(labels) - 0.5) < 4 * 0.5 / np.sqrt(len(labels))
    assert covered > 0.9 * len(corpus.tokens)  # the rest was cut off


def test_sentence_order_depends_on_its_seed(tokenizer):
    corpus = corpus_of(_random_documents(4, 50))
    first, again, other = (
        _examples(corpus, tokenizer, 64, seed, objective="mlm_sop") for seed in (1, 1, 2)
    )
    assert first == again != other


def test_written_as_made(tokenizer, tmp_path):
    corpus = corpus_of(_random_documents(5, 40))
    about = {"vocab_size": tokenizer.vocab_size, "unmaskable_ids": tokenizer.unmaskable_ids}
    what = {"objective": "mlm", "documents": "joined"}
    with ShardWriter(tmp_path / "shard", max_seq_length=32, **about) as writer:
        for columns in make_examples(
            corpus, tokenizer, **what, max_seq_length=32, short_seq_prob=0, dupe_factor=1, seed=0
        ):
            writer.append(*columns)
    dataset = ShardDataset(tmp_path / "shard")
    made = _examples(corpus, tokenizer, 32, **what)
    assert [example.input_ids.tolist() for example in dataset] == [ids for ids, _, _ in made]


def test_each_objective_has_its_own_cache(tmp_path):
    text = "\n\n".join(f"Some text of number {i}. It has two sentences." for i in range(40))
    (tmp_path / "text.txt").write_text(text)
    common = {"source": str(tmp_path / "text.txt"), "cache_dir": str(tmp_path / "cache")}
    common |= {"vocab_size": 200, "max_seq_length": 24}
    data = {
        (objective, documents): prepare(
            DataConfig(**common, objective=objective, documents=documents), progress=False
        )
        for objective, documents in (
            ("mlm_nsp", "apart"),
            ("mlm", "apart"),
            ("mlm", "joined"),
            ("mlm_sop", "apart"),
        )
    }
    assert len({prepared.path for prepared in data.values()}) == 4
    joined, apart = data["mlm", "joined"], data["mlm", "apart"]
    assert len(joined.train) < len(apart.train)
    assert joined.train.lengths[:-1].min() >= 22
    for (objective, _), prepared in data.items():
        labels = prepared.train.batch(np.arange(len(prepared.train))).next_sentence_labels
        assert set(labels.tolist()) == ({-100} if objective == "mlm" else {0, 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"objective": "clm"}, "objective: expected one of mlm_nsp, mlm, mlm_sop, rtd, got 'clm'"),
        ({"documents": "mixed", "objective": "mlm"}, "documents: expected one of apart, joined, "),
        ({"documents": "joined"}, "documents: expected apart with objective mlm_nsp"),
        ({"dupe_factor": 2, "objective": "mlm"}, "dupe_factor: expected 1 with objective mlm"),
        (
            {"source": "shards:/tmp", "objective": "mlm_sop"},
            "objective: expected mlm_nsp, mlm or rtd with source shards:",
        ),
        (
            {"source": "shards:/tmp", "objective": "mlm", "documents": "joined"},
            "documents: expected apart with source shards:",
        ),
    ],
)
def test_settings_that_do_not_fit(given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        prepare(DataConfig(**given))


def test_settings_that_do_not_fit_a_run():
    base = ["--batching.global_batch_size", "8", "--schedule.total_steps", "9"]
    for given, message in (
        (
            ["--data.objective", "clm"],
            r"data\.objective: expected one of mlm_nsp, mlm, mlm_sop, rtd, g",
        ),
        (["--data.documents", "joined"], r"data\.documents: expected apart with objective mlm_nsp"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            read_config([*base, *given])
