"""The model on packed tokens: its shortcuts against the plain computation, and its edges.

Equality with another implementation (transformers) is tests/nn/test_weights.py's matter.
"""

import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.nn import BertConfig, BertForPreTraining
from bert_unpad.nn.flops import forward_flops, training_flops
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_gradients, assert_same_values

TINY = BertConfig(
    vocab_size=61,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=96,
    max_position_embeddings=24,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
LENGTHS = [12, 9, 0, 5, 1]


def make_model(seed: int = 0, **changes) -> BertForPreTraining:
    """A model with weights large enough for the loss to depend on every part of it."""
    torch.manual_seed(derived(seed))
    model = BertForPreTraining(dataclasses.replace(TINY, initializer_range=0.2, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model


def make_inputs(lengths=LENGTHS, seed: int = 1, masked_fraction: float = 0.5) -> PackedInputs:
    generator = torch.Generator().manual_seed(derived(seed))
    batch = VarlenBatch.from_lengths(lengths)
    first = set(batch.cu_seqlens.tolist())
    draw = torch.rand(batch.total, generator=generator)
    masked = [i for i in range(batch.total) if i not in first and draw[i] < masked_fraction]

    def integers(high: int, size: int) -> torch.Tensor:
        return torch.randint(high, (size,), generator=generator)

    return PackedInputs.build(
        batch=batch,
        input_ids=integers(TINY.vocab_size, batch.total),
        token_type_ids=integers(2, batch.total),
        masked_positions=torch.tensor(masked, dtype=torch.int64),
        masked_labels=integers(TINY.vocab_size, len(masked)),
        next_sentence_labels=integers(2, batch.batch_size),
    )


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def backward(model, inputs) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model.zero_grad()
    out = model(inputs)
    (out.mlm_loss_sum + out.nsp_loss_sum).backward()
    return [part.detach() for part in out], gradients(model)


def test_loss_from_some_rows_equals_the_loss_from_all_positions():
    model, inputs = make_model(), make_inputs()
    assert inputs.num_masked > 3
    out, grads = backward(model, inputs)

    model.zero_grad()
    mlm_logits, nsp_logits = model.logits(inputs, all_positions=True)
    assert mlm_logits.shape == (inputs.batch.total, TINY.vocab_size)
    kept = torch.tensor(LENGTHS) > 0
    mlm_logits = mlm_logits[inputs.masked_positions]
    nsp_logits, nsp_labels = nsp_logits[kept], inputs.next_sentence_labels[kept]
    mlm = F.cross_entropy(mlm_logits, inputs.masked_labels, reduction="sum")
    nsp = F.cross_entropy(nsp_logits, nsp_labels, reduction="sum")
    (mlm + nsp).backward()

    assert_same_values(out[0], mlm.detach())
    assert_same_values(out[2], nsp.detach())
    assert out[1] == (mlm_logits.argmax(1) == inputs.masked_labels).sum()
    assert out[3] == (nsp_logits.argmax(1) == nsp_labels).sum()
    assert [part.dtype for part in out] == [torch.float32, torch.int64] * 2
    assert_same_gradients(grads, gradients(model))
    assert all(grad.abs().max() > 0 for grad in grads.values())


def test_logits_of_rows_equal_logits_of_all_positions():
    model, inputs = make_model(), make_inputs()
    with torch.no_grad():
        some, nsp_some = model.logits(inputs)
        every, nsp_every = model.logits(inputs, all_positions=True)
    assert_same_values(some, every[inputs.masked_positions])
    assert_same_values(nsp_some, nsp_every)
    assert (nsp_some[2] == 0).all()  # the empty sequence


def test_sequences_do_not_see_each_other():
    model, inputs = make_model(), make_inputs()
    hidden = model.encode(inputs)
    assert hidden.shape == (sum(LENGTHS), TINY.hidden_size)
    for start, length in zip(inputs.batch.cu_seqlens.tolist(), LENGTHS, strict=False):
        tokens = slice(start, start + length)
        alone = PackedInputs.build(
            VarlenBatch.from_lengths([length]),
            inputs.input_ids[tokens],
            inputs.token_type_ids[tokens],
        )
        assert_same_values(model.encode(alone), hidden[tokens])


def test_a_split_batch_adds_up_to_the_whole():
    """Sums are what makes ranks with unequal shares add up."""
    model, inputs = make_model(), make_inputs([7, 7])
    whole, whole_grads = backward(model, inputs)
    parts = []
    for b in range(2):
        here = (inputs.masked_positions // 7) == b
        tokens = slice(7 * b, 7 * b + 7)
        part = PackedInputs.build(
            VarlenBatch.from_lengths([7]),
            inputs.input_ids[tokens],
            inputs.token_type_ids[tokens],
            inputs.masked_positions[here] - 7 * b,
            inputs.masked_labels[here],
            inputs.next_sentence_labels[b : b + 1],
        )
        parts.append(backward(model, part))
    assert_same_values(whole, [a + b for a, b in zip(parts[0][0], parts[1][0], strict=True)])
    assert_same_gradients(whole_grads, {n: parts[0][1][n] + parts[1][1][n] for n in whole_grads})


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
@pytest.mark.parametrize("recompute", ["none", "gelu", "layer"])
def test_without_tokens_the_loss_is_zero_and_every_gradient_is_there(lengths, recompute):
    model = make_model()
    model.bert.encoder.recompute = recompute
    out, grads = backward(model, make_inputs(lengths))
    assert [part.item() for part in out] == [0, 0, 0, 0]
    for name, grad in grads.items():
        assert grad is not None, name
        assert (grad == 0).all(), name
    mlm, nsp = model.logits(make_inputs(lengths))
    assert mlm.shape == (0, TINY.vocab_size)
    assert nsp.shape == (len(lengths), 2)


def test_without_masked_tokens_only_the_next_sentence_counts():
    model = make_model()
    out, grads = backward(model, make_inputs(masked_fraction=0.0))
    assert out[0] == out[1] == 0
    assert out[2] > 0
    assert (grads["cls.predictions.bias"] == 0).all()
    assert grads["cls.seq_relationship.weight"].abs().max() > 0


def test_padded_vocabulary_stays_out_of_loss_and_gradient():
    model, inputs = make_model(), make_inputs()
    assert model.config.padded_vocab_size == model.word_embeddings.shape[0] == 64
    before, _ = backward(model, inputs)
    with torch.no_grad():
        model.word_embeddings[61:].fill_(50.0)
        model.cls.predictions.bias[61:].fill_(50.0)
    after, grads = backward(model, inputs)
    assert_same_values(before, after)
    assert (grads["bert.embeddings.word_embeddings.weight"][61:] == 0).all()
    assert (grads["cls.predictions.bias"][61:] == 0).all()


@pytest.mark.parametrize("recompute", ["none", "gelu", "layer"])
def test_frozen_lower_layers_run_forward_only(recompute):
    model, inputs = make_model(), make_inputs()
    _, full = backward(model, inputs)
    frozen = ("bert.embeddings.", "bert.encoder.layer.0.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    model.bert.encoder.recompute = recompute
    recorded = []
    for layer in model.bert.encoder.layer:
        layer.register_forward_hook(lambda module, args, out: recorded.append(out.requires_grad))
    _, grads = backward(model, inputs)
    assert recorded[:3] == [False, True, True]
    trained = {name: grad for name, grad in grads.items() if not name.startswith(frozen)}
    assert all(grads[name] is None for name in grads.keys() - trained.keys())
    assert_same_gradients(trained, {name: full[name] for name in trained})


def test_dropout_follows_the_seed_and_stops_in_eval():
    model = make_model(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    inputs = make_inputs()

    def loss(seed: int) -> float:
        torch.manual_seed(derived(seed))
        return model(inputs).mlm_loss_sum.item()

    assert loss(1) == loss(1)
    assert loss(1) != loss(2)
    model.eval()
    assert loss(1) == loss(2)
    state = torch.get_rng_state()
    model(inputs)
    assert torch.equal(state, torch.get_rng_state())
    no_dropout = make_model().eval()
    assert loss(1) == no_dropout(inputs).mlm_loss_sum.item()


def test_autocast_computes_in_bf16_with_fp32_parameters():
    model, inputs = make_model(), make_inputs()
    exact, exact_grads = backward(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.encode(inputs).dtype == torch.bfloat16
        out, grads = backward(model, inputs)
    assert model.encode(inputs).dtype == torch.float32
    assert out[0].dtype == torch.float32
    torch.testing.assert_close(out[0], exact[0], rtol=0.03, atol=0.0)
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        similarity = F.cosine_similarity(grad.flatten(), exact_grads[name].flatten(), dim=0)
        assert similarity > 0.97, name


def test_compiled_model_equals_eager_and_serves_other_lengths():
    model = make_model(num_hidden_layers=2)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    compilations = set()
    for lengths in (LENGTHS, [7, 3, 3, 2], [24, 11]):
        # As many masked tokens as sequences, or one, would be compiled for that alone.
        inputs = make_inputs(lengths, masked_fraction=1.0)
        out, grads = backward(compiled, inputs)[0], gradients(model)
        want, want_grads = backward(model, inputs)
        assert_same_values(out, want)
        assert_same_gradients(grads, want_grads)
        compilations.add(counter.frame_count)
    assert len(compilations) == 1


def test_initial_weights():
    torch.manual_seed(derived(0))
    model = BertForPreTraining(dataclasses.replace(TINY, initializer_range=0.03))
    for name, parameter in model.named_parameters():
        if "LayerNorm.weight" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            if "word_embeddings" in name:
                assert (parameter[61:] == 0).all()
                parameter = parameter[:61]
            tolerance = 0.03 * 5 / parameter.numel() ** 0.5
            assert abs(parameter.std().item() - 0.03) < tolerance, name
            assert abs(parameter.mean().item()) < tolerance, name


def test_longer_than_the_position_embedding_is_refused():
    with pytest.raises(ValueError, match="max_position_embeddings = 24 tokens, got 25"):
        make_model()(make_inputs([25]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act: expected one of"),
        (
            {"hidden_size": 10, "num_attention_heads": 3},
            "hidden_size: expected a multiple of num_attention_heads = 3, got 10",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected an integer from 1"),
        ({"vocab_size": 10.5}, "vocab_size: expected an integer"),
        ({"hidden_dropout_prob": 1.0}, r"hidden_dropout_prob: expected a number in \[0, 1\)"),
        ({"layer_norm_eps": 0}, "layer_norm_eps: expected a number above 0"),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type: expected 'absolute'",
        ),
        ({"is_decoder": True}, "is_decoder: expected False"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: expected True"),
        ({"model_type": "gpt2"}, "model_type: expected one of bert, roberta, .*, got 'gpt2'"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads: expected none"),
    ],
)
def test_config_refuses(values, message):
    with pytest.raises(ValueError, match=message):
        BertConfig.from_dict(values)


def test_config_keeps_unknown_fields(tmp_path):
    values = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "id2label": {"0": "no"},
        "use_cache": True,
    }
    config = BertConfig.from_dict(values)
    assert config.head_dim == 16
    config.to_json(tmp_path / "config.json")
    assert BertConfig.from_json(tmp_path / "config.json") == config
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.items() >= (values | {"model_type": "bert"}).items()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_config_must_be_a_json_object(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        BertConfig.from_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("hidden_act", "approximate"),
    [("gelu", "none"), ("gelu_new", "tanh"), ("gelu_pytorch_tanh", "tanh")],
)
def test_gelu_variants(hidden_act, approximate):
    assert BertConfig(hidden_act=hidden_act).gelu_approximate == approximate


def test_flops_take_lengths_in_any_form():
    model, inputs = make_model(), make_inputs()
    expected = training_flops(TINY, LENGTHS, inputs.num_masked)
    assert model.num_flops(inputs) == expected == 3 * forward_flops(TINY, inputs)
    for form in (inputs.batch, torch.tensor(LENGTHS), np.array(LENGTHS, np.uint16), LENGTHS):
        assert model.num_flops(form, inputs.num_masked) == expected
    assert model.num_flops(LENGTHS) == model.num_flops(LENGTHS, round(0.15 * sum(LENGTHS)))
    assert model.num_flops([]) == 0


def test_flops_of_bert_large_on_wikipedia():
    """Half a TFLOP for a sequence of about 255 tokens is the published figure."""
    large = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    assert 0.45e12 < training_flops(large, [255]) < 0.53e12
