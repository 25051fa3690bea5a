"""Batches of equal cost: what they hold, and how the trainers of Hugging Face use them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from bert_unpad import hf
from bert_unpad.data.sampling.balanced_sampler import efficiency
from tests.support.hf_models import VOCAB, clone, make, transformers
from tests.support.seeds import derived

WORK = hf.WorkModel.for_hidden(64)
"""With this one attention counts: more than half at 512 tokens."""


def drawn(seed: int, count: int) -> np.ndarray:
    """Lengths of 1 to 600 tokens, few long."""
    rng = np.random.default_rng(derived(seed))
    return np.clip(np.exp(rng.normal(rng.uniform(2, 5), 0.8, count)), 1, 600).astype(np.int64)


def costs_of(lengths: np.ndarray, work: hf.WorkModel | None) -> np.ndarray:
    return lengths.astype(float) if work is None else np.array([work(n) for n in lengths])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("work", [None, WORK])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_has_batches_of_equal_cost(ranks, work, drop_last):
    lengths = drawn(ranks, 400)
    costs = costs_of(lengths, work)
    budget = 6 * costs.mean()
    options = {"work": work, "num_replicas": ranks, "seed": 3, "drop_last": drop_last}
    samplers = [hf.CostSampler(lengths, budget, rank=rank, **options) for rank in range(ranks)]
    whole = hf.CostSampler(lengths, budget, **options)
    for epoch in range(2):
        for sampler in (whole, *samplers):
            sampler.set_epoch(epoch)
        of_rank = [list(sampler) for sampler in samplers]
        assert {len(batches) for batches in of_rank} == {len(samplers[0])}
        batches = [batch for step in zip(*of_rank, strict=True) for batch in step]
        assert list(whole) == batches
        assert len(whole) == len(batches)
        used = sorted(index for batch in batches for index in batch)
        assert all(type(index) is int for index in used)
        if drop_last:
            assert len(set(used)) == len(used)
        else:
            assert used == list(range(400))
        check_costs(lengths, work, budget, batches)


def check_costs(lengths, work, budget, batches) -> None:
    """No batch exceeds the budget, or another batch by more than its own shortest example."""
    costs = costs_of(lengths, work)
    rounded = costs_of(lengths + max(int(lengths.mean()) // 16, 1) - 1, work)
    most = min(rounded[batch].sum() for batch in batches) * (1 + 1e-6)
    for batch in batches:
        cost = costs[batch].sum()
        if len(batch) > 1:
            assert cost <= budget * (1 + 1e-6)
            assert cost <= most + rounded[batch].min()
    # An example above the budget is alone.
    assert all(len(batch) == 1 for batch in batches if costs[batch].max() > budget)


def test_ranks_wait_for_each_other_less_than_with_random_batches():
    lengths = np.minimum(drawn(0, 8000), 512)
    ranks = 8
    sampler = hf.CostSampler(lengths, 32 * lengths.mean() + 512, num_replicas=ranks)
    cost = np.array([lengths[batch].sum() for batch in sampler], float).reshape(-1, ranks)
    order = np.random.default_rng(derived(1)).permutation(8000)
    random = lengths[order].reshape(-1, ranks, 25).sum(2)
    assert efficiency(cost).mean() > 0.97 > efficiency(random.astype(float)).mean()


def test_batches_follow_from_seed_and_epoch_and_every_epoch_has_others():
    lengths = np.random.default_rng(derived(0)).permutation(np.arange(50, 650))  # all different

    def batches(seed: int, epoch: int) -> list[list[int]]:
        sampler = hf.CostSampler(lengths, 20 * lengths.mean() + 600, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    def pairs(found: list[list[int]]) -> set[frozenset[int]]:
        return {frozenset((a, b)) for batch in found for a in batch for b in batch if a != b}

    assert batches(1, 0) == batches(1, 0)
    first = pairs(batches(1, 0))
    for other in (batches(2, 0), batches(1, 1)):
        assert len(first & pairs(other)) < 0.5 * len(first)


def test_what_does_not_fill_a_step_is_refused_or_dropped():
    with pytest.raises(ValueError, match="lengths: expected examples for batches within"):
        hf.CostSampler([9, 9, 9], 10, num_replicas=2)
    sampler = hf.CostSampler([9, 9, 9], 10, num_replicas=2, drop_last=True)
    assert len(sampler) == 2
    used = set()
    for epoch in range(40):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len({index for (index,) in batches}) == 2
        used |= {index for (index,) in batches}
    assert used == {0, 1, 2}
    assert sorted(map(len, hf.CostSampler([5, 5, 5, 90], 10, num_replicas=3))) == [1, 1, 2]


@pytest.mark.parametrize("work", [None, WORK, hf.WorkModel(0.1, 0.003)])
def test_whole_sequences_fill_the_budget_exactly(work):
    """Sums of work are rounded, which must not cost a batch its last example."""
    for length in range(490, 513):
        budget = 12 * costs_of(np.array([length]), work)[0]
        sampler = hf.CostSampler([length] * 60, budget, work=work)
        assert [len(batch) for batch in sampler] == [12] * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": []}, "lengths: expected at least one example"),
        ({"lengths": [3, 0]}, "lengths: expected at least one example, each of 1 token or more"),
        ({"lengths": [70_000]}, "lengths: expected 0 to 65535 tokens"),
        ({"budget": 0}, "budget: expected a number > 0, got 0"),
        ({"budget": float("nan")}, "budget: expected a number > 0, got nan"),
        ({"num_replicas": 0}, "num_replicas: expected 1 or more"),
        ({"rank": 1}, "rank: expected 0 to 0, got 1"),
        ({"seed": -1}, "seed: expected 0 or more"),
        ({"num_replicas": 3, "drop_last": True}, "got 2 examples; set a larger budget"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        hf.CostSampler(**{"lengths": [3, 4], "budget": 9} | changes)


def test_refuses_other_epochs_and_lengths_of_other_types():
    with pytest.raises(ValueError, match="epoch: expected 0 or more"):
        hf.CostSampler([3], 9).set_epoch(-1)
    with pytest.raises(TypeError, match="lengths: expected integers"):
        hf.CostSampler([0.5], 9)


class Examples(torch.utils.data.Dataset):
    """Examples of drawn lengths; notes which were asked for."""

    def __init__(self, count: int) -> None:
        rng = np.random.default_rng(derived(2))
        self.lengths = rng.integers(3, 21, count)
        self.made = [
            {"input_ids": rng.integers(2, VOCAB, n).tolist(), "label": int(rng.integers(3))}
            for n in self.lengths
        ]
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> dict:
        self.asked.append(index)
        return self.made[index]


def test_accelerate_deals_each_rank_its_own_batches():
    pytest.importorskip("accelerate")
    from accelerate.data_loader import prepare_data_loader

    data, ranks = Examples(60), 2
    own = [hf.CostSampler(data.lengths, 90, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    for rank in range(ranks):
        loader = prepare_data_loader(
            DataLoader(
                data,
                batch_sampler=hf.CostSampler(data.lengths, 90, num_replicas=ranks),
                collate_fn=lambda features: torch.tensor([len(f["input_ids"]) for f in features]),
            ),
            num_processes=ranks,
            process_index=rank,
            even_batches=False,
        )
        assert len(loader) == len(own[rank])
        for epoch in range(2):  # which accelerate sets by itself
            own[rank].set_epoch(epoch)
            got = [lengths.tolist() for lengths in loader]
            assert got == [data.lengths[batch].tolist() for batch in own[rank]]


class CostTrainer(transformers.Trainer):
    """As in docs/huggingface.md."""

    def get_train_dataloader(self) -> DataLoader:
        sampler = hf.CostSampler(
            self.train_dataset.lengths, 120, num_replicas=self.args.world_size, seed=self.args.seed
        )
        loader = DataLoader(
            self.train_dataset,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )
        self.accelerator.even_batches = False
        return self.accelerator.prepare(loader)


def test_trainer_takes_batches_by_cost(tmp_path: Path):
    pytest.importorskip("accelerate")
    data = Examples(40)
    model = make("BertForSequenceClassification", hidden_size=32, intermediate_size=48)
    trainer = CostTrainer(
        model=hf.unpad(model),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=3, report_to="none", use_cpu=True,
            save_strategy="no", disable_tqdm=True, seed=5,
        ),
        train_dataset=data,
        data_collator=hf.DataCollatorForPackedClassification(),
    )  # fmt: skip
    data.asked.clear()
    trainer.train()
    sampler = hf.CostSampler(data.lengths, 120, seed=5)
    want = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        want += [index for batch in sampler for index in batch]
    assert trainer.state.global_step == 3 * len(sampler)
    assert data.asked == want


def test_sentence_transformers_takes_batches_by_cost(tmp_path: Path):
    package = pytest.importorskip("sentence_transformers", minversion="6.0")
    datasets = pytest.importorskip("datasets")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "model"
    make("BertModel", hidden_size=32, intermediate_size=48).save_pretrained(path)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w1", unk_token="w0", model_max_length=24
    ).save_pretrained(path)

    rng = np.random.default_rng(derived(3))
    lengths = rng.integers(1, 20, (50, 2))
    texts = [[" ".join(f"w{i}" for i in rng.integers(2, VOCAB, n)) for n in row] for row in lengths]
    pairs = datasets.Dataset.from_dict(
        {"anchor": [a for a, _ in texts], "positive": [b for _, b in texts]}
    )
    sampler = hf.CostSampler(lengths.sum(1), 150)
    stock = package.SentenceTransformer(str(path), device="cpu")
    losses = {}
    for name, model in (("stock", clone(stock)), ("unpad", hf.unpad(clone(stock)))):
        trainer = package.SentenceTransformerTrainer(
            model=model,
            args=package.SentenceTransformerTrainingArguments(
                output_dir=str(tmp_path / name), num_train_epochs=2, learning_rate=1e-4,
                batch_sampler=lambda dataset, **options: sampler, logging_steps=1, report_to=[],
                use_cpu=True, save_strategy="no", disable_tqdm=True,
            ),
            train_dataset=pairs,
            loss=MultipleNegativesRankingLoss(model),
        )  # fmt: skip
        trainer.train()
        assert sampler.epoch == 1
        losses[name] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses["stock"]) == 2 * len(sampler)
    assert losses["unpad"] == pytest.approx(losses["stock"], rel=1e-2)
