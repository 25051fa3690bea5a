"""Packed batches of classification, regression and token classification, against padded stock."""

import pickle

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from bert_unpad import hf
from tests.support.hf_models import VOCAB, assert_same_step, clone, make, run, transformers
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_values

pytestmark = pytest.mark.filterwarnings("error::bert_unpad.hf.StockFallbackWarning")

CLASSES = hf.DataCollatorForPackedClassification()
TOKENS = hf.DataCollatorForPackedTokenClassification()
PAD = {"input_ids": 1, "token_type_ids": 0, "labels": -100}
MANY = {"problem_type": "multi_label_classification"}


def examples(count: int, kind: str, seed: int = 0) -> list[dict]:
    """Examples of 1 to 20 tokens with token types and labels of a kind."""
    rng = np.random.default_rng(derived(seed))
    found = []
    for length in [1, 20, *rng.integers(1, 21, count - 2)]:
        labels = {
            "class": lambda: int(rng.integers(3)),
            "number": lambda: float(rng.normal()),
            "several": lambda: rng.integers(2, size=3).astype(float).tolist(),
            "tokens": lambda: [0, *rng.integers(-1, 3, length - 1).tolist()],  # noqa: B023
        }[kind]()
        if kind == "tokens":
            labels = [-100 if label < 0 else label for label in labels]
        ids = rng.integers(2, VOCAB, length).tolist()  # no padding token
        types = rng.integers(2, size=length).tolist()
        found.append({"input_ids": ids, "token_type_ids": types, "labels": labels})
    return found


def padded(features: list[dict]) -> dict[str, torch.Tensor]:
    """The batch that a stock model takes."""
    batch = {}
    for key in features[0]:
        values = [torch.tensor(feature[key]) for feature in features]
        per_token = values[0].dim() == 1 and not values[0].is_floating_point()
        batch[key] = (
            pad_sequence(values, batch_first=True, padding_value=PAD[key])
            if per_token
            else torch.stack(values)
        )
    lengths = torch.tensor([len(feature["input_ids"]) for feature in features])
    columns = torch.arange(int(lengths.max()))
    return batch | {"attention_mask": (columns < lengths[:, None]).long()}


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("BertForSequenceClassification", "class", {}),
        ("BertForSequenceClassification", "number", {"num_labels": 1}),
        ("BertForSequenceClassification", "several", MANY),
        ("BertForTokenClassification", "tokens", {}),
        ("RobertaForTokenClassification", "tokens", {"type_vocab_size": 2}),
        ("ElectraForTokenClassification", "tokens", {}),
        ("DistilBertForTokenClassification", "tokens", {}),
    ],
)
def test_a_packed_step_equals_the_padded_stock_one(name, kind, changes):
    features = examples(6, kind)
    if name.startswith("DistilBert"):
        features = [{k: v for k, v in f.items() if k != "token_type_ids"} for f in features]
    stock = make(name, **changes)
    collator = type(TOKENS if kind == "tokens" else CLASSES)(
        position_ids_start=2 if name.startswith("Roberta") else 0
    )
    call, packed = padded(features), collator(features)
    want, got = run(stock, call), run(hf.unpad(clone(stock)), packed)
    if kind == "tokens":
        assert got[0]["logits"].shape == (1, packed["input_ids"].shape[1], 3)
        want[0]["logits"] = want[0]["logits"][call["attention_mask"].bool()][None]
    assert_same_step(got, want, None)


def test_heads_that_read_first_tokens_themselves_refuse_packed_batches():
    packed = hf.DataCollatorForPackedClassification(position_ids_start=2)(examples(4, "class"))
    ours = hf.unpad(make("RobertaForSequenceClassification"))
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected none, because this model's head"):
        ours(**packed)


def test_a_batch_has_every_label_and_token_type():
    features = examples(9, "tokens")
    batch = TOKENS(features)
    for key in ("input_ids", "token_type_ids", "labels"):
        assert batch[key].tolist() == [[value for feature in features for value in feature[key]]]
        assert batch[key].dtype == torch.int64
    lengths = [len(feature["input_ids"]) for feature in features]
    assert batch["cu_seq_lens_q"].tolist() == [0, *np.cumsum(lengths)]
    assert batch["cu_seq_lens_q"].dtype == batch["cu_seq_lens_k"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 20
    positions = [place for length in lengths for place in range(length)]
    assert batch["position_ids"].tolist() == [positions]


@pytest.mark.parametrize("kind", ["class", "number", "several"])
def test_labels_of_sequences(kind):
    features = examples(5, kind)
    want = torch.tensor([feature["labels"] for feature in features])
    for changed in (
        features,
        [{"label": f["labels"], "input_ids": f["input_ids"]} for f in features],
        [{k: torch.tensor(v) for k, v in f.items()} for f in features],
    ):
        got = CLASSES(changed)["labels"]
        assert got.dtype == (torch.int64 if kind == "class" else torch.float32)
        assert torch.equal(got, want)


def test_padding_is_dropped_and_labels_may_be_missing():
    feature = {"input_ids": [7, 8, 1], "attention_mask": [1, 1, 0]}
    batch = TOKENS([feature | {"labels": [2, -100, 5]}] * 2)
    assert batch["input_ids"].tolist() == [[7, 8, 7, 8]]
    assert batch["labels"].tolist() == [[2, -100, 2, -100]]
    for collator in (TOKENS, CLASSES):
        assert set(collator([feature])) == {
            "input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
            "max_length_k",
        }  # fmt: skip


FEATURE = {"input_ids": [5, 6], "labels": [0, 1]}


@pytest.mark.parametrize(
    ("collator", "features", "message"),
    [
        (TOKENS, [], "features: expected at least one example, got none"),
        (TOKENS, [{"labels": [1]}], r"features: expected input_ids in each, got only \['labels'\]"),
        (TOKENS, [FEATURE, {"input_ids": [5]}], "features: expected labels in all examples or in"),
        (CLASSES, [{"input_ids": [5], "label": 1}, {"input_ids": [5]}], "expected label in all"),
        (
            TOKENS,
            [FEATURE, FEATURE | {"labels": [1]}],
            r"labels: expected an integer for each of 2 tokens in example 1, got int64 of shape",
        ),
        (TOKENS, [FEATURE | {"labels": [0.5, 1]}], "labels: expected an integer for each of 2"),
        (TOKENS, [FEATURE | {"labels": ["B", "I"]}], "labels: expected an integer for each of 2"),
        (TOKENS, [FEATURE | {"attention_mask": [1]}], "input_ids: expected an integer for each"),
        (CLASSES, [FEATURE | {"labels": "good"}], "labels: expected numbers of one shape, got <U4"),
        (
            CLASSES,
            [FEATURE, FEATURE | {"labels": 1.5}],
            r"labels: expected numbers of one shape, got float64 of shape \[\], int64 of shape",
        ),
    ],
)
def test_refuses(collator, features, message):
    with pytest.raises(ValueError, match=message):
        collator(features)


@pytest.mark.parametrize(
    ("collator", "kind", "start"), [(CLASSES, "several", "fork"), (TOKENS, "tokens", "spawn")]
)
def test_workers_collate(collator, kind, start):
    features = examples(8, kind)
    assert pickle.loads(pickle.dumps(collator)) == collator
    loader = DataLoader(
        features, batch_size=4, collate_fn=collator, num_workers=1, multiprocessing_context=start
    )
    for number, batch in enumerate(loader):
        want = collator(features[4 * number : 4 * number + 4])
        assert list(batch) == list(want)
        assert all(torch.equal(torch.as_tensor(batch[k]), torch.as_tensor(want[k])) for k in want)


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("BertForSequenceClassification", "class", {}),
        ("BertForSequenceClassification", "number", {"num_labels": 1}),
        ("BertForTokenClassification", "tokens", {}),
    ],
)
def test_trainer_has_the_losses_of_padded_stock(tmp_path, name, kind, changes):
    pytest.importorskip("accelerate")
    stock = make(name, hidden_size=32, intermediate_size=48, initializer_range=0.02, **changes)
    found = {}
    for key, model, collator in (
        ("stock", clone(stock), padded),
        ("packed", hf.unpad(stock), TOKENS if kind == "tokens" else CLASSES),
    ):
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=str(tmp_path / key), max_steps=8, per_device_train_batch_size=4,
                per_device_eval_batch_size=4,
                learning_rate=1e-3, logging_steps=1, dataloader_num_workers=2, report_to="none",
                use_cpu=True, save_strategy="no", disable_tqdm=True, seed=5,
            ),
            train_dataset=examples(24, kind),
            data_collator=collator,
        )  # fmt: skip
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        found[key] = torch.tensor(losses), trainer.predict(examples(10, kind, seed=1))
    (want, stock_out), (got, packed_out) = found["stock"], found["packed"]
    assert got.shape == (8,)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert packed_out.metrics["test_loss"] == pytest.approx(
        stock_out.metrics["test_loss"], rel=1e-3, abs=1e-3
    )
    if kind != "tokens":
        assert_same_values(
            torch.from_numpy(packed_out.predictions), torch.from_numpy(stock_out.predictions), 1e-3
        )
        assert np.array_equal(packed_out.label_ids, stock_out.label_ids)
