"""Padding a packed batch to a bucket's sizes: real tokens get the same results."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from test_nn import TINY, backward, make_inputs, make_model

from bert_unpad.batch import PackedInputs, VarlenBatch, pad, unpad
from bert_unpad.batch.buckets import Bucket, Buckets, pad_to

BATCHES = [[12, 9, 0, 5, 1], [24, 24, 24, 24, 24, 24], [3] * 9, [], [0, 0], [1]]
BUCKETS = Buckets(sequences=6, max_seqlen=TINY.max_position_embeddings, masked_share=0.15)


def sizes(inputs: PackedInputs) -> tuple[int, ...]:
    """All that a captured graph takes for granted."""
    batch, rows = inputs.batch, inputs.query_rows
    return (
        *(batch.total, batch.batch_size, batch.max_seqlen, batch.seqlen, rows.max_seqlen),
        *(len(rows.positions), len(rows.mlm_rows), len(rows.cls_rows), inputs.num_masked),
    )


def expected_sizes(bucket: Bucket) -> tuple[int, ...]:
    return (
        *(bucket.tokens, bucket.sequences, bucket.max_seqlen, bucket.max_seqlen),
        *(bucket.max_query_rows, bucket.query_rows, bucket.masked, bucket.first_tokens),
        bucket.masked,
    )


@pytest.mark.parametrize("masked_fraction", [0.0, 0.15, 1.0])
@pytest.mark.parametrize("lengths", BATCHES)
def test_a_padded_batch_has_the_bucket_s_sizes(lengths: list[int], masked_fraction: float) -> None:
    inputs = make_inputs(lengths, masked_fraction=masked_fraction)
    bucket = BUCKETS.choose(inputs)
    padded = pad_to(inputs, bucket)
    assert sizes(padded) == expected_sizes(bucket)
    batch, rows, total = padded.batch, padded.query_rows, inputs.batch.total
    # The packing is valid, and real sequences lie where they lay.
    assert batch.cu_seqlens[-1] == len(batch.indices) == len(batch.position_ids) == bucket.tokens
    assert batch.lengths[: len(lengths)].tolist() == lengths
    assert batch.lengths.max() <= bucket.max_seqlen
    assert torch.equal(torch.sort(batch.order).values, torch.arange(bucket.sequences).int())
    assert torch.equal(batch.lengths[batch.order.long()].sort(descending=True).values,
                       batch.lengths[batch.order.long()])  # fmt: skip
    assert torch.equal(padded.input_ids[:total], inputs.input_ids)
    assert torch.equal(batch.position_ids[:total], inputs.batch.position_ids)
    assert (batch.position_ids < bucket.max_seqlen).all()
    x = torch.randn(bucket.tokens, 2)
    assert torch.equal(unpad(pad(x, batch), batch), x)
    # So are the last layer's rows; what is added lies in the added tokens and has no label.
    count = len(inputs.query_rows.positions)
    assert torch.equal(rows.positions[:count], inputs.query_rows.positions)
    assert (rows.positions[count:] >= total).all()
    assert (rows.positions[count:] < bucket.tokens).all()
    assert rows.cu_seqlens[-1] == len(rows.positions)
    assert 0 <= rows.cu_seqlens.diff().min() <= rows.cu_seqlens.diff().max() <= rows.max_seqlen
    assert (rows.mlm_rows[inputs.num_masked :] >= count).all()
    assert (padded.masked_labels[inputs.num_masked :] == -100).all()
    assert (rows.cls_labels[len(inputs.query_rows.cls_rows) :] == -100).all()


@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_losses_are_the_same_bits(lengths: list[int], dropout: float) -> None:
    """And gradients to 1e-6 of their largest entry: their sums run over more, zero, rows.

    A product with a single row takes another routine of the matrix library, and other bits.
    """
    model = make_model(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    inputs = make_inputs(lengths, masked_fraction=0.3)
    torch.manual_seed(2)
    out, grads = backward(model, inputs)
    torch.manual_seed(2)
    padded_out, padded_grads = backward(model, BUCKETS.pad(inputs))
    for got, want in zip(padded_out, out, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5 if lengths == [1] else 0.0, atol=0.0)
    for name, want in grads.items():
        error = (padded_grads[name] - want).abs().max()
        assert error <= (1e-5 if lengths == [1] else 1e-6) * want.abs().max(), name


def test_autocast_and_recomputing_take_padded_batches() -> None:
    model = make_model()
    inputs = make_inputs([20, 3, 7])
    for recompute in ("none", "gelu", "layer"):
        model.bert.encoder.recompute = recompute
        with torch.autocast("cpu", torch.bfloat16):
            out, grads = backward(model, inputs)
            padded_out, padded_grads = backward(model, BUCKETS.pad(inputs))
        assert torch.equal(padded_out[0], out[0])
        for name, want in grads.items():
            torch.testing.assert_close(padded_grads[name], want, rtol=0.02, atol=1e-3)


def test_a_batch_from_a_mask_keeps_its_columns() -> None:
    batch = VarlenBatch.from_mask(torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]]))
    inputs = PackedInputs.build(batch, torch.arange(5))
    padded = BUCKETS.pad(inputs)
    assert padded.batch.position_ids[:5].tolist() == [1, 2, 0, 2, 3]
    columns = TINY.max_position_embeddings
    assert padded.batch.indices[:5].tolist() == [1, 2, columns, columns + 2, columns + 3]


def test_few_buckets_serve_many_batches() -> None:
    """BERT-large's second phase: 48 sequences of the lengths of Wikipedia."""
    draw = np.random.default_rng(0)
    buckets = Buckets(sequences=48, max_seqlen=512, masked_share=0.15)
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
        bucket = buckets.choose(inputs)
        assert sizes(pad_to(inputs, bucket)) == expected_sizes(bucket)
        chosen.add(bucket)
        real, padded = real + inputs.batch.total, padded + bucket.tokens
    assert len(chosen) <= 16
    assert padded < 1.025 * real
    assert len({bucket.tokens for bucket in chosen}) == len(chosen)  # nothing else varies


def test_what_does_not_fit_is_refused() -> None:
    inputs = make_inputs([12, 9])
    with pytest.raises(ValueError, match="max_seqlen = 8 tokens, got a batch of length 12"):
        Buckets(2, 8, 0.15).choose(inputs)
    with pytest.raises(ValueError, match="masked_share must be in"):
        Buckets(2, 8, 1.5)
    with pytest.raises(ValueError, match="sequences must be >= 1"):
        Buckets(0, 8, 0.15)
    bucket = BUCKETS.choose(inputs)
    for name, value in {
        "tokens": 21, "masked": 3, "first_tokens": 1, "max_seqlen": 11, "max_query_rows": 2,
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"bucket.{name}: .*does not fit"):
            pad_to(inputs, dataclasses.replace(bucket, **{name: value}))
    with pytest.raises(ValueError, match=r"inputs must be on the CPU"):
        pad_to(inputs.to("meta"), bucket)
