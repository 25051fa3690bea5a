"""Training and serving through Hugging Face's own tools: what they do with ours and with stock."""

import pytest
import torch

from bert_unpad import hf
from tests.support.hf_models import (
    MASKS,
    assert_same_step,
    call_arguments,
    clone,
    gradients,
    make,
    transformers,
)
from tests.support.processes import run_ranks
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_values

MASK = MASKS["right"]
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dog", "run"],
]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: index for index, word in enumerate(WORDS)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip


def dataset(count: int) -> list[dict]:
    """Sequences of 3 to 12 tokens, some of which have labels."""
    generator = torch.Generator().manual_seed(derived(0))
    found = []
    for index in range(count):
        ids = torch.randint(5, len(WORDS), (3 + index * 7 % 10,), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) > 0.4, -100)
        labels[1] = ids[1]
        ids[labels >= 0] = 4
        found.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return found


def train(tmp_path, model, tokenizer, steps: int, collator=None, **arguments):
    """The losses of a Trainer's steps, and the Trainer."""
    losses = []

    class Trainer(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    settings = {
        "output_dir": str(tmp_path), "max_steps": steps, "per_device_train_batch_size": 4,
        "learning_rate": 1e-3, "report_to": "none", "use_cpu": True, "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True, "seed": 5,
    }  # fmt: skip
    trainer = Trainer(
        model=model,
        args=transformers.TrainingArguments(**settings | arguments),
        train_dataset=dataset(48),
        data_collator=collator or transformers.DataCollatorForTokenClassification(tokenizer),
    )
    trainer.train()
    return torch.tensor(losses), trainer


def small(name: str = "BertForMaskedLM", **changes):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": len(WORDS)}
    return make(name, **sizes | {"pad_token_id": 0} | changes)


def test_trainer_gives_the_loss_curve_of_stock(tmp_path, tokenizer):
    pytest.importorskip("accelerate")
    stock = small()
    ours = hf.unpad(clone(stock))
    want, reference = train(tmp_path, stock, tokenizer, 100)
    got, trainer = train(tmp_path, ours, tokenizer, 100)
    assert got.shape == (100,)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)
    assert got[-5:].mean() < 0.8 * got[:5].mean()
    # Its evaluation reads the logits.
    predictions = [t.predict(dataset(6)) for t in (trainer, reference)]
    ours_logits, stock_logits = (
        torch.from_numpy(p.predictions)[torch.from_numpy(p.label_ids) != -100] for p in predictions
    )
    torch.testing.assert_close(ours_logits, stock_logits, rtol=1e-3, atol=1e-3)
    assert predictions[0].metrics["test_loss"] == pytest.approx(
        predictions[1].metrics["test_loss"], rel=1e-4
    )


@pytest.mark.parametrize(
    ("arguments", "tolerance"),
    [
        ({"gradient_accumulation_steps": 2}, 1e-4),
        ({"gradient_checkpointing": True}, 1e-4),
        ({"bf16": True}, 2e-2),
    ],
)
def test_trainers_settings(tmp_path, tokenizer, arguments, tolerance):
    pytest.importorskip("accelerate")
    stock = small()
    want, _ = train(tmp_path, clone(stock), tokenizer, 6, **arguments)
    got, _ = train(tmp_path, hf.unpad(stock), tokenizer, 6, **arguments)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=0)


def test_trainer_takes_packed_batches(tmp_path, tokenizer):
    pytest.importorskip("accelerate")
    stock = small()
    want, _ = train(tmp_path, clone(stock), tokenizer, 6)
    collator = hf.DataCollatorForPackedMLM(tokenizer)
    got, _ = train(tmp_path, hf.unpad(stock), tokenizer, 6, collator)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


def test_losses_with_dropout_agree_over_seeds():
    """Mean loss of the last 10 of 20 steps, 6 seeds each: equal but for chance."""
    calls = [call_arguments("BertForMaskedLM", MASK, seed=seed) for seed in range(4)]
    means = {"stock": [], "ours": []}
    for seed in range(6):
        start = make("BertForMaskedLM", dropout=0.2, hidden_size=32, intermediate_size=48)
        for key in means:
            model = clone(start)
            model = hf.unpad(model) if key == "ours" else model
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            torch.manual_seed(derived(seed))
            losses = []
            for step in range(20):
                optimizer.zero_grad()
                loss = model(**calls[step % len(calls)]).loss
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            means[key].append(sum(losses[-10:]) / 10)
    stock, ours = torch.tensor(means["stock"]), torch.tensor(means["ours"])
    assert stock.std() > 0
    error = ((stock.var() + ours.var()) / 6).sqrt()
    assert (stock.mean() - ours.mean()).abs() < 4 * error


def ddp(model: torch.nn.Module):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    return model, optimizer, accelerator.backward


def fsdp2(model: torch.nn.Module):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Tensor.backward


def compiled_fsdp2(model: torch.nn.Module):
    for layer in model.bert.encoder.layer:
        layer.compile(backend="eager")
    return fsdp2(model)


def fsdp1(model: torch.nn.Module):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({transformers.models.bert.modeling_bert.BertLayer})
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Tensor.backward


WRAPS = (ddp, fsdp2, compiled_fsdp2, fsdp1)


def distributed_steps(rank: int, world_size: int) -> dict[str, list[float]]:
    """Losses of three steps of this rank: stock and ours, in each wrapper."""
    calls = [call_arguments("BertForPreTraining", MASK, seed=10 * s + rank) for s in range(3)]
    losses: dict[str, list[float]] = {}
    for wrap in WRAPS:
        for kind in ("stock", "ours"):
            model = make("BertForPreTraining")
            model, optimizer, backward = wrap(hf.unpad(model) if kind == "ours" else model)
            found = losses[f"{wrap.__name__}, {kind}"] = []
            for call in calls:
                optimizer.zero_grad()
                loss = model(**call).loss
                backward(loss)
                optimizer.step()
                found.append(loss.item())
    return losses


def test_two_processes():
    pytest.importorskip("accelerate")
    answers = run_ranks(distributed_steps, 2)
    for answer in answers:
        for wrapper in (wrap.__name__ for wrap in WRAPS):
            ours = answer[f"{wrapper}, ours"]
            assert ours == pytest.approx(answer[f"{wrapper}, stock"], rel=1e-4)
            assert ours[2] != ours[0]
    assert answers[0]["ddp, ours"] != answers[1]["ddp, ours"]


def test_pipelines(tokenizer, packed_calls):
    texts = ["the cat sat on a [MASK] and saw the dog", "a [MASK] run", "[MASK] cat"]
    for task, head in (
        ("fill-mask", "MaskedLM"),
        ("text-classification", "SequenceClassification"),
    ):
        stock = small(f"BertFor{head}").eval()
        answers = [
            transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")(
                texts, batch_size=3
            )
            for model in (stock, hf.unpad(clone(stock)))
        ]
        for want, got in zip(*answers, strict=True):
            want, got = (x if isinstance(x, list) else [x] for x in (want, got))
            assert [g.get("token_str", g.get("label")) for g in got] == [
                w.get("token_str", w.get("label")) for w in want
            ]
            assert [g["score"] for g in got] == pytest.approx([w["score"] for w in want], rel=1e-4)
        assert len(packed_calls) == 2
        packed_calls.clear()


def test_mean_pooling():
    """A sentence encoder by hand: the mean of the real tokens' states."""
    stock = make("BertModel").eval()
    call = call_arguments("BertModel", MASKS["holes"])
    keep = call["attention_mask"].float()[..., None]
    pooled = [
        (model(**call).last_hidden_state * keep).sum(1) / keep.sum(1)
        for model in (stock, hf.unpad(clone(stock)))
    ]
    assert_same_values(pooled[1], pooled[0])


def test_sentence_transformers(tokenizer, tmp_path, packed_calls):
    library = pytest.importorskip("sentence_transformers")
    small("BertModel").eval().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = library.SentenceTransformer(str(tmp_path), device="cpu")  # with mean pooling
    texts = ["the cat sat on a mat", "a dog", "run and run and run"]
    want = encoder.encode(texts)
    assert packed_calls == []
    got = hf.unpad(encoder).encode(texts)
    assert len(packed_calls) == 2
    assert_same_values(torch.from_numpy(got), torch.from_numpy(want))


@pytest.mark.parametrize("order", ["adapt, then unpad", "unpad, then adapt"])
def test_peft(order):
    """LoRA on queries, values and all dense layers; merging it again."""
    peft = pytest.importorskip("peft")
    targets = ["query", "value", "dense"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    models = []
    for packed in (False, True):
        model = make("BertForMaskedLM")
        if packed and order.startswith("unpad"):
            hf.unpad(model)
        torch.manual_seed(derived(0))
        model = peft.get_peft_model(model, config)
        if packed and order.startswith("adapt"):
            hf.unpad(model)
        models.append(model)
    call = call_arguments("BertForMaskedLM", MASK)
    steps = []
    for model in models:
        loss = model(**call).loss
        loss.backward()
        steps.append(({"loss": loss.detach()}, gradients(model)))
    assert any("lora" in name for name in steps[0][1])
    assert_same_step(steps[1], steps[0], MASK)
    merged = [model.merge_and_unload()(**call).loss for model in models]
    assert_same_values(merged[1], merged[0])
