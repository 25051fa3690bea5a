"""Mixtures of sources: exact shares, an order that depends on seed and epoch alone, resuming."""

from collections import Counter

import numpy as np
import pytest

from bert_unpad.data import (
    BalancedSampler,
    DataConfig,
    Mixture,
    PackedCollator,
    ShardStream,
    WordPieceTokenizer,
    prepare,
)
from bert_unpad.data.mixture import Joined
from bert_unpad.pretrain.config import ConfigError, read_config
from tests.support.imported import imported
from tests.support.masked_examples import CLS, LONGEST, SEP, VOCAB, masked_examples
from tests.support.seeds import derived
from tests.support.tf_records import example, features_of, write_records
from tests.support.token_files import random_sequences, write_megatron

SIZES, WEIGHTS = (60, 17, 200), (0.5, 0.3, 0.2)


def open_ids(folder, vocabulary=VOCAB):
    source = imported(f"megatron:{folder}", folder.with_suffix(".shards"), vocabulary=vocabulary)
    return prepare(DataConfig(source, objective="mlm", max_seq_length=LONGEST)).train


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Three sources; the second token of an example is its source, the third its number."""
    folder = tmp_path_factory.mktemp("mixture")
    rng = np.random.default_rng(derived(0))
    opened = []
    for source, size in enumerate(SIZES):
        rows = [
            [CLS, 5 + source, 10 + i % 80, 10 + i // 80, *rng.integers(5, 99, rng.integers(20))]
            for i in range(size)
        ]
        write_megatron(folder / str(source) / "data", rows)
        opened.append(open_ids(folder / str(source)))
    return opened


def origin(mixture, indices):
    """The (source, number) of examples, by their tokens."""
    batch = mixture.batch(np.asarray(indices, np.int64))
    assert batch.ids.tolist() == list(indices)
    begins = np.cumsum(batch.lengths) - batch.lengths
    source, low, high = (batch.tokens[begins + i].tolist() for i in (1, 2, 3))
    return [(a - 5, b - 10 + 80 * (c - 10)) for a, b, c in zip(source, low, high, strict=True)]


@pytest.mark.parametrize(
    ("weights", "draws"),
    [
        (WEIGHTS, [139, 83, 55]),
        ((1, 1, 1), [93, 92, 92]),
        (SIZES, list(SIZES)),
        ((1e-9, 1e-9, 5), [1, 1, 275]),
    ],
)
def test_every_epoch_has_its_shares_and_sources_are_used_evenly(parts, weights, draws):
    mixture = Mixture(parts, weights)
    assert (mixture.draws, mixture.epoch_size) == (draws, sum(SIZES))
    used = Counter()
    for epoch in range(7):
        indices = mixture.epoch_examples(3, epoch)
        assert indices.dtype == np.uint32
        assert (np.diff(indices.astype(np.int64)) > 0).all()
        here = origin(mixture, indices.tolist())
        assert mixture.lengths[indices].tolist() == mixture.batch(indices).lengths.tolist()
        assert Counter(source for source, _ in here) == dict(enumerate(draws))
        used.update(here)
        for source, size in enumerate(SIZES):
            counts = [used[source, number] for number in range(size)]
            assert max(counts) - min(counts) <= 1


def test_an_epoch_is_a_function_of_seed_and_epoch(parts):
    first, second = (Mixture(parts, WEIGHTS) for _ in "ab")
    chosen = {}
    for seed in (0, 2**63 - 1):
        for epoch in (0, 5, 1):
            indices = first.epoch_examples(seed, epoch).tolist()
            assert indices == second.epoch_examples(seed, epoch).tolist()
            chosen[seed, epoch] = sorted(origin(first, indices))
    assert len({str(values) for values in chosen.values()}) == len(chosen)


def test_copies_of_an_example_have_their_own_masks(parts):
    mixture = Mixture(parts, (1, 50, 1))
    indices = mixture.epoch_examples(0, 0)
    places = {}
    for index, where in zip(indices.tolist(), origin(mixture, indices.tolist()), strict=True):
        places.setdefault(where, []).append(index)
    longest = max(places, key=lambda where: (len(places[where]), mixture.lengths[places[where][0]]))
    copies = np.array(places[longest])
    assert len(copies) > 10
    collator = PackedCollator(mixture, WordPieceTokenizer(VOCAB), masked_lm_prob=0.4)
    masked = {str(collator(copies[i : i + 1], 0).masked_positions) for i in range(len(copies))}
    assert len(masked) > 1


def samplers(parts, ranks, strategy, **options):
    mixture = Mixture(parts, options.pop("weights", WEIGHTS))
    return [
        BalancedSampler(
            mixture.lengths, ranks, rank, 12 // ranks, 5, strategy, population=mixture, pool_steps=4
        )
        for rank in range(ranks)
    ]


def global_batches(some, steps):
    """The next steps, each as the sorted examples of all ranks."""
    iterators = [iter(sampler) for sampler in some]
    batches = [np.concatenate([next(i) for i in iterators]) for _ in range(steps)]
    return [sorted(batch.tolist()) for batch in batches]


STEPS = -(-sum(SIZES) // 12)


def test_the_order_is_the_same_on_any_number_of_ranks(parts):
    """Also where a run goes on with another number of ranks."""
    wanted = global_batches(samplers(parts, 1, "random"), STEPS)
    mixture = Mixture(parts, WEIGHTS)
    assert sorted(i for b in wanted for i in b) == mixture.epoch_examples(5, 0).tolist()
    for ranks in (2, 3):
        assert global_batches(samplers(parts, ranks, "random"), STEPS) == wanted
    before = samplers(parts, 3, "random")
    assert global_batches(before, 9) == wanted[:9]
    after = samplers(parts, 2, "random")
    for sampler in after:
        sampler.load_state_dict(before[2].state_dict())
    assert global_batches(after, STEPS - 9) == wanted[9:]


@pytest.mark.parametrize("ranks", [2, 3])
def test_balanced_steps_resume_exactly_and_on_other_ranks_lose_nothing(parts, ranks):
    def steps(some, count):
        iterators = [iter(sampler) for sampler in some]
        return [[next(i).tolist() for i in iterators] for _ in range(count)]

    wanted = steps(samplers(parts, 2, "stratified"), STEPS)
    before = samplers(parts, 2, "stratified")
    for sampler in before:
        sampler.set_epoch(0)
    done = steps(before, 10)
    assert done == wanted[:10]
    after = samplers(parts, ranks, "stratified")
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict())
    assert after[0].steps_left == STEPS - 10
    rest = steps(after, STEPS - 10)
    if ranks == 2:
        assert rest == wanted[10:]
    used = sorted(i for step in done + rest for batch in step for i in batch)
    assert used == Mixture(parts, WEIGHTS).epoch_examples(5, 0).tolist()
    assert after[0].steps_left == 0 or after[0].epoch == 1


def test_steps_have_like_shares_and_like_work(parts):
    some = samplers(parts, 2, "stratified")
    mixture = Mixture(parts, WEIGHTS)
    iterators, efficiencies, first = [iter(s) for s in some], [], Counter()
    for step in range(STEPS - 1):
        batches = [next(i) for i in iterators]
        efficiencies.append(some[0].straggler_efficiency())
        if step < STEPS // 2:
            first.update(source for source, _ in origin(mixture, np.concatenate(batches).tolist()))
    assert np.mean(efficiencies) > 0.9
    total = sum(first.values())
    for source, weight in enumerate(WEIGHTS):  # 4 standard deviations of a random draw
        assert abs(first[source] / total - weight) < 4 * (weight * (1 - weight) / total) ** 0.5


def test_a_position_belongs_to_its_weights(parts):
    before = samplers(parts, 2, "random")[0]
    (other, _) = samplers(parts, 2, "random", weights=(0.5, 0.31, 0.19))
    with pytest.raises(ValueError, match="state: saved with other data"):
        other.load_state_dict(before.state_dict())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_streams_share_an_epoch_out(parts, ranks):
    mixture = Mixture(parts, WEIGHTS)
    options = {"seed": 5, "shuffle_buffer": 16}
    streams = [ShardStream(mixture, rank, ranks, **options) for rank in range(ranks)]
    used = []
    for stream in streams:
        ids = np.concatenate([batch.ids for batch in stream.batches(1, 0, 7)])
        part = ids[: 90 // ranks].tolist()  # its beginning has all sources
        assert {source for source, _ in origin(mixture, part)} == {0, 1, 2}
        again = np.concatenate([batch.ids for batch in stream.batches(1, 40, 7)])
        assert again.tolist() == ids[40:].tolist()
        used += ids.tolist()
    assert sorted(used) == mixture.epoch_examples(5, 1).tolist()
    assert streams[0].identity()["mixture"] == mixture.identity()
    # Two other ranks have used 30 and 20 examples of the epoch.
    past = [(30, 20)]
    old = [ShardStream(mixture, rank, 2, **options) for rank in range(2)]
    done = [
        np.concatenate([batch.ids for batch in stream.batches(1, 0, 7)])[:count].tolist()
        for stream, count in zip(old, past[0], strict=True)
    ]
    rest = []
    for stream in streams:
        stream.continue_after(1, past)
        ids = np.concatenate([batch.ids for batch in stream.batches(1, 0, 7)])
        assert {source for source, _ in origin(mixture, ids[: 90 // ranks].tolist())} == {0, 1, 2}
        rest += ids.tolist()
    assert sorted(sum(done, rest)) == mixture.epoch_examples(5, 1).tolist()


def test_joined_examples(parts, tmp_path):
    whole = Joined(parts)
    assert len(whole) == sum(SIZES)
    order = np.random.default_rng(derived(1)).permutation(len(whole)).tolist()
    wanted = [(source, i) for source, size in enumerate(SIZES) for i in range(size)]
    assert origin(whole, order) == [wanted[i] for i in order]
    assert len(whole.batch(np.empty(0, np.int64))) == 0
    total = sum(part.target_counts() for part in parts)
    assert whole.target_counts().tolist() == total.tolist()


def test_parts_that_do_not_go_together(parts, tmp_path, monkeypatch):
    write_megatron(tmp_path / "other" / "data", [[CLS, 7, SEP]])
    other = open_ids(tmp_path / "other", [*VOCAB, "more"])
    with pytest.raises(ValueError, match=r"mixture: expected sources with one .* \(101,"):
        Mixture([*parts, other], [1, 1, 1, 1])
    monkeypatch.setattr("bert_unpad.data.mixture._MAX_EXAMPLES", 500)
    with pytest.raises(ValueError, match=r"mixture: expected at most 500 examples, .* got "):
        Mixture(parts, [1, 99, 1])


@pytest.fixture
def sources(tmp_path):
    """A text, token ids and examples with masks, with one vocabulary."""
    WordPieceTokenizer(VOCAB).save(tmp_path / "tokenizer")
    for name, seed in (("web", 1), ("books", 2)):
        files = tmp_path / f"{name}_ids"
        write_megatron(files / "train" / "data", random_sequences(30, seed=seed))
        write_megatron(files / "validation" / "data", random_sequences(5, seed=seed + 9))
        imported(f"megatron:{files}", tmp_path / name)
    text = "\n\n".join(f"W{i} w{i + 1} w{i + 2}. W{i + 3} w7." for i in range(60))
    (tmp_path / "text.txt").write_text(text)
    write_records(
        tmp_path / "masked.tfrecord", [example(features_of(r)) for r in masked_examples(9)]
    )
    imported(f"tfrecord:{tmp_path / 'masked.tfrecord'}", tmp_path / "masked")
    return tmp_path


def config(folder, mixture, **options):
    names = {name if ":" in name else str(folder / name): w for name, w in mixture.items()}
    names = {name.replace(":", f":{folder}/", 1): w for name, w in names.items()}
    vocab = str(folder / "tokenizer" / "vocab.txt")
    options = {"objective": "mlm", "vocab_file": vocab, "max_seq_length": LONGEST} | options
    return DataConfig(mixture=names, cache_dir=str(folder / "cache"), **options)


def test_a_mixture_of_token_ids_and_text(sources):
    mixture = {"shards:web": 2.0, "shards:books": 1.0, "text.txt": 1.0}
    data = prepare(config(sources, mixture))
    texts = len(data.train.parts[0])  # sources are in the order of their names
    assert texts > 40
    assert abs(data.train.draws[2] - (60 + texts) / 2) < 1
    assert data.statistics["train_examples"] == 60 + texts
    assert len(data.validation) == 10 + len(data.validation.parts[0])
    assert data.config.segments == 1
    again = prepare(config(sources, dict(reversed(mixture.items()))))
    assert again.train.identity() == data.train.identity()
    inputs = data.collator()(data.train.epoch_examples(0, 0)[:9].astype(np.int64), 0)
    assert len(inputs.batch.lengths) == 9


@pytest.mark.parametrize(
    ("mixture", "options", "message"),
    [
        ({}, {}, "mixture: expected sources with weights, got none"),
        ({"shards:web": 0.0}, {}, "mixture: expected weights > 0, got 0.0"),
        ({"shards:web": float("inf")}, {}, "mixture: expected weights > 0, got inf"),
        ({"stream:x": 1.0}, {}, "mixture: expected sources whose number of examples is known"),
        ({"shards:web": 1.0}, {"source": "x"}, r"source: expected stdlib .* with mixture, got x"),
        ({"text.txt": 1.0}, {"vocab_file": None}, "vocab_file: expected one vocabulary"),
        (
            {"shards:web": 1.0, "shards:masked": 1.0},
            {},
            "mixture: expected sources with one vocabulary that all bring masks, or none",
        ),
    ],
)
def test_mixtures_that_cannot_be(sources, mixture, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(config(sources, mixture, **options))


def test_vocabularies_that_differ_name_the_sources(sources):
    imported(
        f"megatron:{sources / 'books_ids'}", sources / "other", vocabulary=[*VOCAB[:-1], "other"]
    )
    mixture = {"shards:web": 1.0, "shards:other": 1.0}
    with pytest.raises(ValueError, match=r"got another with shards:\S+web than .*other"):
        prepare(config(sources, mixture, vocab_file=None))


def test_the_option_of_a_run(tmp_path):
    needed = ["--batching.global_batch_size", "8", "--schedule.total_steps", "10"]
    given = ["--data.mixture", '{"shards:/a b": 0.7, "shards:/c?validation=/d": 0.3}']
    read, text = read_config([*needed, *given])
    assert read.data.mixture == {"shards:/a b": 0.7, "shards:/c?validation=/d": 0.3}
    (tmp_path / "run.yaml").write_text(text)
    assert read_config(["--config", str(tmp_path / "run.yaml")])[0].data == read.data
    with pytest.raises(ConfigError, match=r"batching\.strategy: expected another than packed"):
        read_config([*needed, *given, "--batching.strategy", "packed"])
