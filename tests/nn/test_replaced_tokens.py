"""Replaced-token detection: drawing, replacing, the two losses, and Hugging Face's files."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn import (
    PRESETS,
    EncoderConfig,
    EncoderForPreTraining,
    ReplacedTokenPreTraining,
    generator_config,
)
from bert_unpad.nn.replaced_tokens import replace_tokens, sample_tokens
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_gradients, assert_same_values

VOCAB = 93  # not a multiple of 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 40,
    "embedding_size": 16,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def make_config(**changes) -> EncoderConfig:
    return EncoderConfig(**PRESETS["electra-small"] | SIZES | changes)


def make_model(share: float = 0.5, **changes) -> ReplacedTokenPreTraining:
    torch.manual_seed(derived(1))
    config = make_config(initializer_range=0.2, **changes)
    return ReplacedTokenPreTraining(config, generator_config(config, share))


def make_inputs(lengths, seed=0) -> PackedInputs:
    rng = np.random.default_rng(derived(seed))
    total = sum(lengths)
    places = np.flatnonzero(rng.random(total) < 0.3)
    labels = rng.integers(5, VOCAB, len(places))
    labels[1::5] = -100
    return PackedInputs.build(
        VarlenBatch.from_lengths(lengths),
        torch.from_numpy(rng.integers(5, VOCAB, total)),
        masked_positions=torch.from_numpy(places),
        masked_labels=torch.from_numpy(labels),
    )


def test_drawn_tokens_follow_the_softmax():
    torch.manual_seed(derived(2))
    logits = torch.randn(7).mul(2)
    logits[3] = -torch.inf
    count = 60_000
    drawn = sample_tokens(logits.expand(count, 7))
    assert drawn.dtype == torch.int64
    found = torch.bincount(drawn, minlength=7).double()
    wanted = logits.double().softmax(0) * count
    assert found[3] == 0
    others = wanted > 0
    chi = ((found - wanted)[others] ** 2 / wanted[others]).sum()
    assert chi < 22.5  # 5 degrees of freedom: one in 2,500


def test_drawing_is_repeatable_and_bounded():
    logits = torch.randn(1300, 11)
    torch.manual_seed(derived(3))
    first = sample_tokens(logits)
    torch.manual_seed(derived(3))
    assert torch.equal(first, sample_tokens(logits))
    again = [sample_tokens(logits, torch.Generator().manual_seed(derived(0))) for _ in range(2)]
    assert torch.equal(*again)
    sure = torch.full((600, 11), -1e9)
    sure[torch.arange(600), torch.arange(600) % 11] = 0
    assert torch.equal(sample_tokens(sure), torch.arange(600) % 11)
    assert sample_tokens(torch.empty(0, 11)).shape == (0,)
    assert sample_tokens(torch.full((2, 11), torch.nan)).max() <= 10


def test_replacing_equals_a_loop():
    inputs = make_inputs([9, 0, 17, 1, 30], seed=4)
    drawn = torch.randint(5, VOCAB, (inputs.num_masked,))
    drawn[::3] = inputs.masked_labels[::3].clamp(min=5)  # some are the true token
    made, replaced = replace_tokens(inputs, drawn)
    ids, labels = inputs.input_ids.tolist(), [0] * inputs.batch.total
    for place, true, new in zip(
        inputs.masked_positions.tolist(), inputs.masked_labels.tolist(), drawn.tolist(), strict=True
    ):
        if true != -100:
            ids[place], labels[place] = new, int(new != true)
    assert made.input_ids.tolist() == ids
    assert replaced.tolist() == labels
    assert 0 < sum(labels) < inputs.num_masked
    assert made.batch is inputs.batch


@pytest.mark.parametrize("lengths", [[9, 5, 33], [1], [0, 7], []])
def test_losses_are_those_of_the_two_models(lengths):
    model = make_model().eval()
    inputs = make_inputs(lengths, seed=5)
    found = model(inputs)
    logits, none = model.logits(inputs)
    assert none is None
    labels = inputs.masked_labels
    mlm = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(found.mlm_loss_sum, mlm)
    assert found.mlm_correct == (logits.argmax(-1) == labels).sum()
    drawn = sample_tokens(logits, torch.Generator().manual_seed(0))  # as the model does
    made, replaced = replace_tokens(inputs, drawn)
    scores = model.detector_logits(made)
    rtd = F.binary_cross_entropy_with_logits(scores, replaced.float(), reduction="sum")
    torch.testing.assert_close(found.rtd_loss_sum, rtd)
    assert found.rtd_correct == ((scores > 0) == replaced.bool()).sum()
    again = model(inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_gradients_of_shared_embeddings_add_up():
    """Those of a generator and a discriminator with embeddings of their own."""
    model = make_model(**NO_DROPOUT)
    inputs = make_inputs([20, 13, 31], seed=6)
    torch.manual_seed(derived(7))
    out = model(inputs)
    (out.mlm_loss_sum + 50 * out.rtd_loss_sum).backward()
    discriminator = model._alone(model.config, model)
    generator = model._alone(model.generator.config, model.generator)
    for part in (discriminator, generator):
        part.load_state_dict({k: v.clone() for k, v in part.state_dict().items()}, assign=True)
        part.requires_grad_(True).train()
    generator(inputs).mlm_loss_sum.backward()
    torch.manual_seed(derived(7))
    drawn = sample_tokens(generator.logits(inputs)[0])
    (50 * discriminator.detect(*replace_tokens(inputs, drawn)).rtd_loss_sum).backward()
    grads = [{n: p.grad for n, p in part.named_parameters()} for part in (discriminator, generator)]
    for name, parameter in model.named_parameters():
        own = name.removeprefix("generator.")
        if name != own:
            expected = grads[1][own]
        elif name.startswith("bert.embeddings.") and "projection" not in name:
            expected = grads[0][name] + grads[1][name]
        else:
            expected = grads[0][name]
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-4)


def test_compiled_it_draws_and_learns_the_same():
    model = make_model(**NO_DROPOUT).train()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for lengths in ([20, 13, 31], [9, 5]):
        inputs, found = make_inputs(lengths, seed=11), []
        for call in (model, compiled):
            torch.manual_seed(derived(12))
            out = call(inputs)
            (out.mlm_loss_sum + 50 * out.rtd_loss_sum).backward()
            found.append((out, {name: p.grad for name, p in model.named_parameters()}))
            model.zero_grad()
        (want, want_grads), (got, got_grads) = found
        assert_same_values(list(got), list(want))
        assert_same_gradients(got_grads, want_grads)
    model.eval()
    with torch.no_grad():
        assert_same_values(list(compiled(inputs)), list(model(inputs)))


def test_an_empty_batch_gives_every_parameter_a_gradient_of_zero():
    model = make_model().train()
    out = model(make_inputs([]))
    (out.mlm_loss_sum + out.rtd_loss_sum).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_each_parameter_has_one_name():
    model = make_model(share=0.25)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(model.state_dict())
    shared = [name for name in names if name.startswith("generator.bert.embeddings.")]
    assert {name.split(".")[3] for name in shared} == {"projection"}
    alone = EncoderForPreTraining(model.generator.config)
    embeddings = alone.bert.embeddings.word_embeddings.weight.numel()
    parts = sum(p.numel() for p in alone.parameters())
    whole = sum(p.numel() for p in model.parameters())
    assert whole < parts + sum(p.numel() for p in EncoderForPreTraining(model.config).parameters())
    assert model.generator.word_embeddings is model.word_embeddings
    assert model.word_embeddings.numel() == embeddings


@pytest.mark.parametrize(
    ("share", "heads", "hidden", "intermediate"),
    [(0.25, 1, 8, 12), (0.5, 2, 16, 24), (1, 4, 32, 48)],
)
def test_sizes_of_the_generator(share, heads, hidden, intermediate):
    config = make_config()
    found = generator_config(config, share)
    assert (found.num_attention_heads, found.hidden_size) == (heads, hidden)
    assert found.intermediate_size == intermediate
    assert (found.embedding_width, found.head_dim) == (16, config.head_dim)
    assert found.heads == ("mlm",)
    assert found.num_hidden_layers == config.num_hidden_layers
    assert generator_config(config, 0.01).num_attention_heads == 1


def test_flops_are_those_of_both():
    model = make_model()
    both = EncoderForPreTraining(model.config), EncoderForPreTraining(model.generator.config)
    assert model.num_flops([9, 5], 3) == sum(part.num_flops([9, 5], 3) for part in both)


def test_saved_and_loaded(tmp_path):
    model = make_model().eval()
    model.save_pretrained(tmp_path)
    again = ReplacedTokenPreTraining.from_pretrained(tmp_path).eval()
    inputs = make_inputs([30, 4], seed=8)
    for a, b in zip(model(inputs), again(inputs), strict=True):
        assert torch.equal(a, b)
    changed = ReplacedTokenPreTraining.from_pretrained(tmp_path, hidden_dropout_prob=0.3)
    assert changed.config.hidden_dropout_prob == 0.3
    assert changed.generator.config.hidden_dropout_prob == 0.3
    with pytest.raises(FileNotFoundError, match=r"generator"):
        ReplacedTokenPreTraining.from_pretrained(tmp_path / "generator")


def test_transformers_computes_the_same(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = make_model().eval()
    model.save_pretrained(tmp_path)
    inputs = make_inputs([30], seed=9)
    ids = inputs.input_ids[None]
    theirs = transformers.ElectraForPreTraining.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(input_ids=ids).logits[0], model.detector_logits(inputs), rtol=1e-4, atol=1e-4
        )
        theirs = transformers.ElectraForMaskedLM.from_pretrained(tmp_path / "generator").eval()
        torch.testing.assert_close(
            theirs(input_ids=ids).logits[0], model.logits(inputs, True)[0], rtol=1e-4, atol=1e-4
        )


def test_models_that_do_not_fit():
    config = make_config()
    generator = generator_config(config, 0.5)
    for change, name in (
        ({"embedding_size": 24}, "embedding_width"),
        ({"vocab_size": 80}, "vocab_size"),
        ({"max_position_embeddings": 20}, "max_length"),
    ):
        with pytest.raises(ValueError, match=f"^generator: expected a {name} of"):
            ReplacedTokenPreTraining(config, dataclasses.replace(generator, **change))
    with pytest.raises(ValueError, match="heads: expected a model with mlm"):
        ReplacedTokenPreTraining(config, dataclasses.replace(generator, heads=("rtd",)))
