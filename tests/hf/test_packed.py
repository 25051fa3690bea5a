"""Packed input and the collator that makes it."""

import pickle

import pytest
import torch

from bert_unpad import hf
from bert_unpad.batch import VarlenBatch
from bert_unpad.batch import unpad as pack
from tests.support.hf_models import (
    MASKS,
    VOCAB,
    assert_same_step,
    call_arguments,
    clone,
    make,
    run,
    transformers,
)
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_values

pytestmark = [
    pytest.mark.filterwarnings("ignore::bert_unpad.hf.StockFallbackWarning"),
]
LENGTHS = VarlenBatch.from_mask(MASKS["right"])


def packed_arguments(call: dict, lengths: VarlenBatch = LENGTHS) -> dict:
    """The same call with the tokens of the mask packed into one row."""
    columns = ("input_ids", "token_type_ids")
    packed = {k: pack(v, lengths)[None] for k, v in call.items() if k in columns}
    for key in ("labels", "next_sentence_label"):
        if key in call:
            value = call[key]
            packed[key] = pack(value, lengths)[None] if value.dim() == 2 else value
    packed["cu_seq_lens_q"] = packed["cu_seq_lens_k"] = lengths.cu_seqlens
    packed["max_length_q"] = packed["max_length_k"] = lengths.max_seqlen
    return packed


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "BertForPreTraining", "BertForMaskedLM", "BertForSequenceClassification",
        "BertForTokenClassification", "DistilBertForMaskedLM", "ElectraForMaskedLM",
        "RobertaForMaskedLM", "MPNetForMaskedLM", "DebertaV2ForMaskedLM",
    ],
)  # fmt: skip
def test_packed_input_equals_the_padded_batch(name, positions):
    stock = make(name)
    ours = hf.unpad(clone(stock))
    call = call_arguments(name, MASKS["right"])
    counts = name.startswith(("Roberta", "MPNet"))
    if counts:  # which counts positions of tokens that are no padding
        call["input_ids"][call["input_ids"] == 1] = 2
    want, packed = run(stock, call), packed_arguments(call)
    if positions:
        offset = 2 if counts else 0
        packed["position_ids"] = (LENGTHS.position_ids + offset)[None]
    got = run(ours, packed)
    assert_same_values(got[0]["loss"], want[0]["loss"])
    for key, value in got[0].items():
        expected = want[0][key]
        if expected.dim() == 3:
            expected = pack(expected, LENGTHS)[None]
        assert_same_values(value, expected)
    assert_same_step(({}, got[1]), ({}, want[1]), None)


@pytest.mark.parametrize("name", ["RobertaModel", "MPNetForMaskedLM"])
def test_positions_of_another_model_are_refused(name):
    ours = hf.unpad(make(name))
    packed = packed_arguments(call_arguments(name, MASKS["right"], labels=False))
    packed["position_ids"] = LENGTHS.position_ids[None]
    with pytest.raises(ValueError, match="position_ids: expected positions from 2 on"):
        ours(**packed)


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize("family", ["MPNet", "DebertaV2"])
def test_heads_that_drop_what_marks_packed_input_refuse_it(family, head):
    name = f"{family}For{head}"
    ours = hf.unpad(make(name))
    call = call_arguments(name, MASKS["right"], labels=False)
    packed = packed_arguments(call)
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected none"):
        ours(**packed)


def test_packed_input_that_makes_no_sense_is_refused():
    ours = hf.unpad(make("BertModel"))
    ids = torch.zeros(1, 6, dtype=torch.int64)

    def cu(*values):
        return torch.tensor(values, dtype=torch.int32)

    assert ours(input_ids=ids, cu_seq_lens_q=cu(0, 2, 6)).pooler_output.shape == (2, 64)
    with pytest.raises(
        ValueError, match="expected integers that rise from 0 to the number of tokens, 6"
    ):
        ours(input_ids=ids, cu_seq_lens_q=cu(0, 2, 5))
    for strange in (cu(0, 7, 6), cu(0, 4, 2, 6), cu(0, 2, 6).float()):
        with pytest.raises(ValueError, match="cu_seq_lens_q: expected integers that rise"):
            ours(input_ids=ids, cu_seq_lens_q=strange)
    with pytest.raises(ValueError, match="expected one of them, got both"):
        ours(input_ids=ids, attention_mask=torch.ones(1, 6), cu_seq_lens_q=cu(0, 6))
    with pytest.raises(ValueError, match=r"input_ids: expected shape \[1, tokens\]"):
        ours(input_ids=ids.expand(2, 6), cu_seq_lens_q=cu(0, 12))
    with pytest.raises(ValueError, match="expected no empty sequence"):
        ours(input_ids=ids, cu_seq_lens_q=cu(0, 6, 6))
    head = hf.unpad(make("RobertaForSequenceClassification"))
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected none, because this model's head"):
        head(input_ids=ids, cu_seq_lens_q=cu(0, 2, 6))


def test_packed_input_never_runs_the_stock_modules():
    """Which would attend across sequences."""
    packed = packed_arguments(call_arguments("BertModel", MASKS["right"], labels=False))
    for option in ("output_hidden_states", "output_attentions", "use_cache"):
        for name in ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"):
            ours = hf.unpad(make(name))
            with pytest.raises(ValueError, match=f"packed input .* cannot be .* {option}"):
                ours(**packed, **{option: True})
    ours.bert.encoder.layer[0].attention.register_forward_hook(lambda *arguments: None)
    with pytest.raises(ValueError, match="because a module inside its layers has a hook"):
        ours(**packed)


class Tokenizer:
    """What the collator reads of a tokenizer."""

    mask_token_id = 4
    all_special_ids = (0, 2, 3)

    def __len__(self) -> int:
        return VOCAB


def examples(count: int = 50, **more) -> list[dict]:
    generator = torch.Generator().manual_seed(derived(0))
    found = []
    for index in range(count):
        length = 3 + index % 20
        ids = torch.randint(5, VOCAB, (length,), generator=generator)
        ids[0], ids[-1] = 2, 3
        types = (torch.arange(length) > length // 2).long().tolist()
        found.append({"input_ids": ids.tolist(), "token_type_ids": types} | more)
    return found


def test_collator_packs_and_masks_as_bert_does():
    features = examples(400, next_sentence_label=1)
    batch = hf.DataCollatorForPackedMLM(Tokenizer(), seed=1)(features)
    original = torch.tensor([token for f in features for token in f["input_ids"]])
    total = len(original)
    for key in ("input_ids", "labels", "token_type_ids", "position_ids"):
        assert batch[key].shape == (1, total)
        assert batch[key].dtype == torch.int64
    lengths = torch.tensor([len(f["input_ids"]) for f in features])
    assert torch.equal(batch["cu_seq_lens_q"].diff(), lengths.int())
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 22
    assert torch.equal(batch["position_ids"][0], VarlenBatch.from_lengths(lengths).position_ids)
    types = [t for f in features for t in f["token_type_ids"]]
    assert batch["token_type_ids"][0].tolist() == types
    assert batch["next_sentence_label"].tolist() == [1] * 400
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    chosen = labels != -100
    assert torch.equal(labels[chosen], original[chosen])
    assert torch.equal(ids[~chosen], original[~chosen])
    special = (original == 2) | (original == 3)
    assert not (chosen & special).any()
    count = int(chosen.sum())
    assert abs(count / int((~special).sum()) - 0.15) < 0.02
    assert abs((ids[chosen] == 4).sum().item() / count - 0.8) < 0.06
    assert abs((ids[chosen] == original[chosen]).sum().item() / count - 0.1) < 0.05
    again = hf.DataCollatorForPackedMLM(Tokenizer(), seed=1)(features)
    assert torch.equal(again["input_ids"], batch["input_ids"])


def test_collator_keeps_labels_and_drops_padding():
    feature = {
        "input_ids": [2, 7, 8, 3, 0],
        "attention_mask": [1, 1, 1, 1, 0],
        "labels": [-100, 9, -100, -100, -100],
    }
    batch = hf.DataCollatorForPackedMLM(Tokenizer())([feature, feature])
    assert batch["input_ids"].tolist() == [[2, 7, 8, 3] * 2]
    assert batch["labels"].tolist() == [[-100, 9, -100, -100] * 2]
    assert "token_type_ids" not in batch
    special = {"input_ids": [2, 7, 8], "special_tokens_mask": [1, 1, 1]}
    masked = hf.DataCollatorForPackedMLM(Tokenizer(), mlm_probability=0.99)([special])
    assert masked["labels"].tolist() == [[-100] * 3]


def test_each_worker_and_epoch_has_masks_of_its_own():
    feature = {"input_ids": list(range(5, 5 + 40)) * 10}

    def masks(collator) -> list[torch.Tensor]:
        """Of two workers, in two epochs."""
        generator = torch.Generator().manual_seed(derived(1))
        loader = torch.utils.data.DataLoader(
            [feature] * 4, num_workers=2, collate_fn=collator, generator=generator
        )
        return [batch["labels"] for _ in range(2) for batch in loader]

    collator = hf.DataCollatorForPackedMLM(Tokenizer(), seed=1)
    collator([feature])  # what the main process draws does not matter
    found = masks(collator)
    assert len({tuple(labels[0].tolist()) for labels in found}) == len(found) == 8
    sent = pickle.loads(pickle.dumps(collator))  # as to a worker that is spawned
    assert all(map(torch.equal, masks(sent), found))
    other = masks(hf.DataCollatorForPackedMLM(Tokenizer(), seed=2))
    assert not any(map(torch.equal, other, found))


def test_collator_refuses():
    collator = hf.DataCollatorForPackedMLM(Tokenizer())
    with pytest.raises(ValueError, match="expected at least one example"):
        collator([])
    with pytest.raises(
        ValueError, match="features: expected token_type_ids in all examples or in none"
    ):
        collator([*examples(1), {"input_ids": [2, 3]}])
    with pytest.raises(ValueError, match="mlm_probability: expected a number in"):
        hf.DataCollatorForPackedMLM(Tokenizer(), mlm_probability=0.0)


def test_collated_batches_train():
    ours = hf.unpad(make("BertForMaskedLM"))
    batch = hf.DataCollatorForPackedMLM(Tokenizer(), seed=0)(examples(6))
    losses = []
    optimizer = torch.optim.Adam(ours.parameters(), lr=1e-2)
    for _ in range(8):
        optimizer.zero_grad()
        loss = ours(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("compiled", [False, True])
def test_positions_that_restart_need_lengths(compiled):
    """What DataCollatorWithFlattening makes by default may be one sequence or several."""
    model = hf.unpad(make("BertModel"))
    call = torch.compile(model, backend="aot_eager") if compiled else model
    features = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10, 11]}]
    batch = transformers.DataCollatorWithFlattening()(features)
    given = {key: batch[key] for key in ("input_ids", "position_ids")}
    with pytest.raises((ValueError, RuntimeError), match="position_ids: expected positions that"):
        call(**given)
    model(**given, attention_mask=torch.ones(1, 7))  # one sequence
    model(input_ids=given["input_ids"], position_ids=torch.arange(7)[None] * 2)
