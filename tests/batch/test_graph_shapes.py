"""Padding a packed batch to a graph shape: real tokens get the same results."""

import dataclasses

import numpy as np
import pytest
import torch

from bert_unpad import ops
from bert_unpad.batch import PackedInputs, VarlenBatch, pad, unpad
from bert_unpad.batch.graph_shapes import GraphShape, GraphShapes, pad_to
from bert_unpad.nn import BertForPreTraining
from tests.nn.test_bert import TINY, backward, make_inputs, make_model
from tests.support.seeds import derived
from tests.support.tolerances import assert_same_gradients, assert_same_values

BATCHES = [[12, 9, 0, 5, 1], [24, 24, 24, 24, 24, 24], [3] * 9, [], [0, 0], [1]]
SHAPES = GraphShapes(sequences=6, max_seqlen=TINY.max_position_embeddings, masked_share=0.15)


def sizes(inputs: PackedInputs) -> tuple[int, ...]:
    """All that a captured graph takes for granted."""
    batch, rows = inputs.batch, inputs.query_rows
    return (
        *(batch.total, batch.batch_size, batch.max_seqlen, batch.seqlen, rows.max_seqlen),
        *(len(rows.positions), len(rows.mlm_rows), len(rows.cls_rows), inputs.num_masked),
    )


def expected_sizes(shape: GraphShape) -> tuple[int, ...]:
    return (
        *(shape.tokens, shape.sequences, shape.max_seqlen, shape.max_seqlen),
        *(shape.max_query_rows, shape.query_rows, shape.masked, shape.first_tokens),
        shape.masked,
    )


@pytest.mark.parametrize("masked_fraction", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("lengths", BATCHES)
def test_a_padded_batch_has_the_shape(lengths: list[int], masked_fraction: float) -> None:
    inputs = make_inputs(lengths, masked_fraction=masked_fraction)
    shape = SHAPES.choose(inputs)
    padded = pad_to(inputs, shape)
    assert sizes(padded) == expected_sizes(shape)
    batch, rows, total = padded.batch, padded.query_rows, inputs.batch.total
    # The packing is valid, and real sequences lie where they lay.
    assert batch.cu_seqlens[-1] == len(batch.indices) == len(batch.position_ids) == shape.tokens
    assert batch.lengths[: len(lengths)].tolist() == lengths
    assert batch.lengths.max() <= shape.max_seqlen
    assert torch.equal(torch.sort(batch.order).values, torch.arange(shape.sequences).int())
    assert torch.equal(batch.lengths[batch.order.long()].sort(descending=True).values,
                       batch.lengths[batch.order.long()])  # fmt: skip
    assert torch.equal(padded.input_ids[:total], inputs.input_ids)
    assert torch.equal(batch.position_ids[:total], inputs.batch.position_ids)
    assert (batch.position_ids < shape.max_seqlen).all()
    x = torch.randn(shape.tokens, 2)
    assert torch.equal(unpad(pad(x, batch), batch), x)
    # So are the last layer's rows; what is added lies in the added tokens and has no label.
    count = len(inputs.query_rows.positions)
    assert torch.equal(rows.positions[:count], inputs.query_rows.positions)
    assert (rows.positions[count:] >= total).all()
    assert (rows.positions[count:] < shape.tokens).all()
    assert rows.cu_seqlens[-1] == len(rows.positions)
    assert 0 <= rows.cu_seqlens.diff().min() <= rows.cu_seqlens.diff().max() <= rows.max_seqlen
    assert (rows.mlm_rows[inputs.num_masked :] >= count).all()
    assert (padded.masked_labels[inputs.num_masked :] == -100).all()
    assert (rows.cls_labels[len(inputs.query_rows.cls_rows) :] == -100).all()


def step(model: BertForPreTraining, inputs: PackedInputs, dtype: torch.dtype = torch.float32):
    """Losses and gradients, always with the same dropout."""
    torch.manual_seed(derived(2))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        return backward(model, inputs)


@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_losses_and_gradients_are_those_of_the_batch(lengths: list[int], dropout: float) -> None:
    """To rounding: for another number of rows a matrix library may add in another order."""
    model = make_model(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    inputs = make_inputs(lengths, masked_fraction=0.3)
    out, grads = step(model, inputs)
    padded_out, padded_grads = step(model, SHAPES.pad(inputs))
    assert_same_values(padded_out, out)
    assert_same_gradients(padded_grads, grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", BATCHES)
def test_what_the_added_tokens_are_changes_no_bit(lengths: list[int], dtype: torch.dtype) -> None:
    """No real token sees them, and all that they add to a gradient is a zero."""
    model = make_model(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    padded = SHAPES.pad(make_inputs(lengths, masked_fraction=0.3))
    other = dataclasses.replace(padded, input_ids=padded.input_ids.clone())
    total = sum(lengths)
    other.input_ids[total:] = torch.randint(1, TINY.vocab_size, other.input_ids[total:].shape)
    out, grads = step(model, padded, dtype)
    other_out, other_grads = step(model, other, dtype)
    for got, want in zip([*other_out, *other_grads.values()], [*out, *grads.values()], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_our_operators_compute_a_row_alike_whatever_follows_it(dtype: torch.dtype) -> None:
    """With their gradients, bit for bit; only products are left to PyTorch."""
    lengths, added, rng = [12, 0, 9, 1], [24, 7], torch.tensor([5, 6])
    total, rows, hidden = sum(lengths), sum(lengths + added), 48
    torch.manual_seed(derived(0))
    qkv = torch.randn(rows, 3, 2, hidden // 2).to(dtype)
    x, residual, dout = (torch.randn(rows, hidden).to(dtype) for _ in range(3))
    weight, bias = torch.randn(hidden), torch.randn(hidden)
    labels = torch.randint(hidden, (rows,))

    def run(lengths: list[int]) -> list[torch.Tensor]:
        count = sum(lengths)
        leaves = [t[:count].clone().requires_grad_() for t in (qkv, x, residual)]
        batch = VarlenBatch.from_lengths(lengths)
        outs = [
            ops.varlen_attention(leaves[0], batch, dropout_p=0.2, rng=rng).flatten(1),
            ops.bias_gelu(leaves[1], bias),
            ops.dropout_add_layer_norm(leaves[1], leaves[2], weight, bias, dropout_p=0.2, rng=rng),
        ]
        torch.autograd.backward(outs, [dout[:count]] * len(outs))
        logits = x[:count].clone().requires_grad_()
        ops.masked_cross_entropy(logits, labels[:count])[0].backward()
        return [
            *(out.detach()[:total] for out in outs),
            *(t.grad[:total] for t in (*leaves, logits)),
        ]

    for got, want in zip(run(lengths + added), run(lengths), strict=True):
        assert torch.equal(got, want)


def test_autocast_and_recomputing_take_padded_batches() -> None:
    """Losses and gradients to a few roundings of bf16, which are of 1 in 256."""
    model = make_model()
    inputs = make_inputs([20, 3, 7])
    tolerance = 4 * torch.finfo(torch.bfloat16).eps
    for recompute in ("none", "gelu", "layer"):
        model.bert.encoder.recompute = recompute
        out, grads = step(model, inputs, torch.bfloat16)
        padded_out, padded_grads = step(model, SHAPES.pad(inputs), torch.bfloat16)
        for got, want in ((padded_out[0], out[0]), (padded_out[2], out[2])):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=0.0)
        assert_same_gradients(padded_grads, grads, tolerance)


def test_a_batch_from_a_mask_keeps_its_columns() -> None:
    batch = VarlenBatch.from_mask(torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]]))
    inputs = PackedInputs.build(batch, torch.arange(5))
    padded = SHAPES.pad(inputs)
    assert padded.batch.position_ids[:5].tolist() == [1, 2, 0, 2, 3]
    columns = TINY.max_position_embeddings
    assert padded.batch.indices[:5].tolist() == [1, 2, columns, columns + 2, columns + 3]


def test_few_shapes_serve_many_batches() -> None:
    """BERT-large's second phase: 48 sequences of the lengths of Wikipedia."""
    draw = np.random.default_rng(derived(0))
    shapes = GraphShapes(sequences=48, max_seqlen=512, masked_share=0.15)
    chosen, real, padded = set(), 0, 0
    for _ in range(40):
        lengths = np.minimum(draw.geometric(1 / 280, 48) + 5, 512)
        masked = np.concatenate(
            [begin + 1 + np.sort(draw.permutation(n - 1)[: max(1, round(0.15 * n))])
             for begin, n in zip(np.cumsum(lengths) - lengths, lengths, strict=True)]
        )  # fmt: skip
        inputs = PackedInputs.build(
            VarlenBatch.from_lengths(lengths),
            torch.zeros(int(lengths.sum()), dtype=torch.int64),
            masked_positions=torch.from_numpy(masked),
            masked_labels=torch.from_numpy(masked),
        )
        shape = shapes.choose(inputs)
        assert sizes(pad_to(inputs, shape)) == expected_sizes(shape)
        chosen.add(shape)
        real, padded = real + inputs.batch.total, padded + shape.tokens
    assert len(chosen) <= 16
    assert padded < 1.025 * real
    assert len({shape.tokens for shape in chosen}) == len(chosen)  # nothing else varies


def test_what_does_not_fit_is_refused() -> None:
    inputs = make_inputs([12, 9])
    with pytest.raises(ValueError, match="at most max_seqlen = 8 tokens, got a batch of length 12"):
        GraphShapes(2, 8, 0.15).choose(inputs)
    with pytest.raises(ValueError, match="masked_share: expected a share"):
        GraphShapes(2, 8, 1.5)
    with pytest.raises(ValueError, match="sequences: expected 1 or more, got 0"):
        GraphShapes(0, 8, 0.15)
    shape = SHAPES.choose(inputs)
    for name, value in {
        "tokens": 21, "masked": 3, "first_tokens": 1, "max_seqlen": 11, "max_query_rows": 2,
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"shape.{name}: expected room for the batch"):
            pad_to(inputs, dataclasses.replace(shape, **{name: value}))
    with pytest.raises(ValueError, match="inputs: expected a batch on the CPU"):
        pad_to(inputs.to("meta"), shape)
