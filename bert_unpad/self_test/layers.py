"""Cases of the self-test for embeddings, LayerNorm, matrix products, GELU and loss."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from bert_unpad import ops
from bert_unpad._capability import multiplies
from bert_unpad.ops.delayed_scaling import DelayedScaling
from bert_unpad.ops.fp8 import QuantizedWeight
from bert_unpad.ops.norm_fp8 import dropout_add_norm_fp8
from bert_unpad.self_test.compare import (
    DROPOUT,
    Compared,
    Inputs,
    Skip,
    case,
    check_dropout_rate,
    compare,
    dropped,
)

# Numbers in 8 bits have 3 (E4M3) or 2 (E5M2) bits of mantissa; errors up to 0.1 were seen.
FP8_LIMIT = 0.2
# What BERT adds to the variance.
BERT_EPS = 1e-12


@case
def dropout_add_layer_norm(inputs: Inputs) -> Iterator[Compared]:
    leaves = {
        "x": inputs.normal(67, 256),
        "residual": inputs.normal(67, 256),
        "weight": 1 + inputs.parameter(256, scale=0.3),
        "bias": inputs.parameter(256),
        "x_bias": inputs.parameter(256),
    }

    def ours(x, residual, weight, bias, x_bias, rng):
        p = 0.0 if rng is None else DROPOUT
        return ops.dropout_add_layer_norm(
            x, residual, weight, bias, dropout_p=p, eps=BERT_EPS, x_bias=x_bias, rng=rng
        )

    def plain(x, residual, weight, bias, x_bias, kept):
        sums = residual + dropped(x + x_bias, kept)
        return functional.layer_norm(sums, sums.shape[-1:], weight, bias, BERT_EPS)

    # Dropout of ones: after LayerNorm kept values are above zero, dropped ones below.
    rng, ones = inputs.rng(), torch.ones_like(leaves["x"])
    unit, zero = torch.ones_like(leaves["bias"]), torch.zeros_like(leaves["bias"])
    kept = ours(ones, torch.zeros_like(ones), unit, zero, zero, rng) > 0
    yield from _compare_with_dropout(inputs, ours, plain, leaves, rng, kept)


@case
def dropout_add_rms_norm(inputs: Inputs) -> Iterator[Compared]:
    leaves = {
        "x": inputs.normal(67, 256),
        "residual": inputs.normal(67, 256),
        "weight": 1 + inputs.parameter(256, scale=0.3),
    }

    def plain(x, residual, weight):
        total = residual + x
        return _both((total, functional.rms_norm(total, total.shape[-1:], weight, 1e-6)))

    yield from compare(
        inputs,
        lambda *leaves: _both([*ops.dropout_add_rms_norm(*leaves, return_sum=True)]),
        plain,
        leaves,
    )


@case
def layer_norm(inputs: Inputs) -> Iterator[Compared]:
    leaves = {"x": inputs.normal(67, 256), "weight": 1 + inputs.parameter(256, scale=0.3)}
    plain = lambda x, weight: functional.layer_norm(x, (256,), weight, eps=1e-5)  # noqa: E731
    yield from compare(inputs, lambda x, weight: ops.layer_norm(x, weight), plain, leaves)


@case
def rms_norm(inputs: Inputs) -> Iterator[Compared]:
    leaves = {"x": inputs.normal(67, 256), "weight": 1 + inputs.parameter(256, scale=0.3)}
    plain = lambda x, weight: functional.rms_norm(x, (256,), weight, 1e-6)  # noqa: E731
    yield from compare(inputs, lambda x, weight: ops.rms_norm(x, weight), plain, leaves)


def _compare_with_dropout(
    inputs: Inputs,
    ours: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    leaves: dict[str, Tensor],
    rng: Tensor,
    kept: Tensor,
) -> Iterator[Compared]:
    """Compares without and with dropout, whose key is ours' last argument, its mask plain's."""
    check_dropout_rate(kept)
    for last, mask in ((None, None), (rng, kept)):
        yield from compare(
            inputs,
            lambda *leaves, last=last: ours(*leaves, last),
            lambda *leaves, mask=mask: plain(*leaves, mask),
            leaves,
        )


@case
def bias_gelu(inputs: Inputs) -> Iterator[Compared]:
    leaves = {"x": inputs.normal(67, 260), "bias": inputs.parameter(260)}
    for kind in ("none", "tanh"):
        yield from compare(
            inputs,
            lambda x, bias, kind=kind: ops.bias_gelu(x, bias, approximate=kind),
            lambda x, bias, kind=kind: functional.gelu(x + bias, approximate=kind),
            leaves,
        )


_GATES = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
}


@case
def glu(inputs: Inputs) -> Iterator[Compared]:
    leaves = {"x": inputs.normal(67, 260), "bias": inputs.parameter(260)}
    for kind, gate in _GATES.items():

        def plain(x, bias, gate=gate):
            a, b = (x + bias).chunk(2, -1)
            return gate(a) * b

        yield from compare(inputs, lambda x, b, kind=kind: ops.glu(x, kind, b), plain, leaves)


@case
def rotary_(inputs: Inputs) -> Iterator[Compared]:
    positions = inputs.integers(32768, 67)
    for interleaved in (False, True):

        def plain(x, interleaved=interleaved):
            powers = torch.arange(0, 32, 2, dtype=torch.float64, device=x.device) / 32
            angles = positions.double()[:, None, None] * 10000.0**-powers
            turns = torch.polar(torch.ones_like(angles), angles)
            pairs = x[:, :3, :32].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
            pairs = pairs if interleaved else pairs.transpose(-1, -2)
            turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
            turned = turned if interleaved else turned.transpose(-1, -2)
            turned = torch.cat([turned.flatten(-2).to(x.dtype), x[:, :3, 32:]], -1)
            return torch.cat([turned, x[:, 3:]], 1)

        yield from compare(
            inputs,
            lambda x, interleaved=interleaved: ops.rotary_(
                x * 1, positions, heads=3, rotary_dim=32, interleaved=interleaved
            ),
            plain,
            {"x": inputs.normal(67, 4, 40)},
        )


@case
def embedding_layer_norm(inputs: Inputs) -> Iterator[Compared]:
    entries = (60, 40, 2)
    ids = [inputs.integers(n, 100) for n in entries]
    ids[0][::2] = 3  # half of the tokens are one word
    names = ("words", "positions", "types")
    leaves = {name: inputs.parameter(n, 256) for name, n in zip(names, entries, strict=True)}
    leaves |= {"weight": 1 + inputs.parameter(256, scale=0.3), "bias": inputs.parameter(256)}

    def ours(*tables_and_rng):
        *tables, rng = tables_and_rng
        p = 0.0 if rng is None else DROPOUT
        return ops.embedding_layer_norm(
            *ids, *tables, dropout_p=p, eps=BERT_EPS, out_dtype=inputs.dtype, rng=rng
        )

    def plain(words, positions, types, weight, bias, kept):
        sums = words[ids[0]] + positions[ids[1]] + types[ids[2]]
        return dropped(functional.layer_norm(sums, (256,), weight, bias, BERT_EPS), kept)

    # LayerNorm with a weight of 0 and a bias of 1 gives ones.
    rng, *tables, weight, bias = inputs.rng(), *leaves.values()
    kept = ours(*tables, torch.zeros_like(weight), torch.ones_like(bias), rng) != 0
    yield from _compare_with_dropout(inputs, ours, plain, leaves, rng, kept)


@case
def masked_cross_entropy(inputs: Inputs) -> Iterator[Compared]:
    rows, columns, vocab_size = 45, 520, 509
    logits = inputs.normal(rows, columns, scale=2)
    wide = logits[:, :vocab_size].double()
    labels = inputs.integers(vocab_size, rows)
    # The first of equal logits counts as the largest.
    places = torch.arange(vocab_size, device=inputs.device)
    best = torch.where(wide == wide.amax(1, keepdim=True), places, vocab_size).amin(1)
    labels[::3] = best[::3]
    labels[1::5] = -100
    for inplace in (False, True):
        counts: list[Tensor] = []

        def ours(logits, inplace=inplace, counts=counts):
            # The gradient may overwrite the logits, so they must not be the leaf itself.
            loss, correct = ops.masked_cross_entropy(
                logits.clone(), labels, vocab_size=vocab_size, inplace_backward=inplace
            )
            counts.append(correct)
            return loss

        yield from compare(
            inputs,
            ours,
            lambda x: functional.cross_entropy(x[:, :vocab_size], labels, reduction="sum"),
            {"logits": logits},
        )
        yield Compared("correct predictions", counts[0], (best == labels).sum(), 0.0)


def _both(pair: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return torch.cat(pair, dim=-1)


@case
def linear(inputs: Inputs) -> Iterator[Compared]:
    leaves = {
        "x": inputs.normal(37, 64),
        "weight": inputs.parameter(48, 64),
        "bias": inputs.parameter(48),
    }

    def accumulating(x, weight, bias):
        ops.accumulate_in_place(weight)
        weight.grad = torch.zeros_like(weight)
        return ops.linear(x, weight, bias)

    for ours in (lambda *leaves: ops.linear(*leaves), accumulating):
        yield from compare(inputs, ours, functional.linear, leaves)


@case
def linear_residual(inputs: Inputs) -> Iterator[Compared]:
    leaves = {"x": inputs.normal(37, 64), "weight": inputs.parameter(48, 64)}
    yield from compare(
        inputs,
        lambda x, weight: _both(ops.linear_residual(x, weight)),
        lambda x, weight: _both((functional.linear(x, weight), x)),
        leaves,
    )


@case
def mlp(inputs: Inputs) -> Iterator[Compared]:
    leaves = {
        "x": inputs.normal(37, 64),
        "weight1": inputs.parameter(128, 64, scale=0.125),
        "bias1": inputs.parameter(128),
        "weight2": inputs.parameter(64, 128, scale=0.1),
    }
    for kind in ("none", "tanh"):

        def plain(x, weight1, bias1, weight2, kind=kind):
            inner = functional.gelu(functional.linear(x, weight1, bias1), approximate=kind)
            return _both((functional.linear(inner, weight2), x))

        for recompute in (False, True):
            yield from compare(
                inputs,
                lambda *leaves, kind=kind, recompute=recompute: _both(
                    ops.mlp(*leaves, approximate=kind, recompute=recompute)
                ),
                plain,
                leaves,
            )


@case
def glu_mlp(inputs: Inputs) -> Iterator[Compared]:
    leaves = {
        "x": inputs.normal(37, 64),
        "weight1": inputs.parameter(256, 64, scale=0.125),
        "bias1": inputs.parameter(256),
        "weight2": inputs.parameter(64, 128, scale=0.1),
    }
    for kind in ("gelu", "silu"):  # a rounded weight may change a ReLU's slope altogether

        def plain(x, weight1, bias1, weight2, gate=_GATES[kind]):
            a, b = functional.linear(x, weight1, bias1).chunk(2, -1)
            return _both((functional.linear(gate(a) * b, weight2), x))

        yield from compare(
            inputs, lambda *leaves, kind=kind: _both(ops.glu_mlp(*leaves, kind=kind)), plain, leaves
        )


@case
def fp8_linear(inputs: Inputs) -> Iterator[Compared]:
    if not multiplies(inputs.device, "fp8"):
        raise Skip("8-bit products need compute capability 8.9 or later")
    leaves = {
        "x": inputs.normal(37, 64),
        "weight": inputs.parameter(48, 64),
        "bias": inputs.parameter(48),
    }

    def with_renewed_copy(x, weight, bias):
        copy = QuantizedWeight(weight)
        for tensor in copy.tensors:
            tensor.zero_()
        torch.autograd.graph.increment_version(weight)
        copy.renew(weight)
        return ops.fp8_linear(x, weight, bias)

    def accumulating(x, weight, bias):
        ops.accumulate_in_place(weight)
        weight.grad = torch.zeros_like(weight)
        return ops.fp8_linear(x, weight, bias)

    for ours in (ops.fp8_linear, with_renewed_copy, accumulating):
        yield from compare(inputs, ours, functional.linear, leaves, limit=FP8_LIMIT)
    yield from _fp8_mlp(inputs)


def _fp8_mlp(inputs: Inputs) -> Iterator[Compared]:
    """The feed-forward half with delayed scales, those of a first pass; of x and of its norm."""
    leaves = {
        "x": inputs.normal(37, 64),
        "weight1": inputs.parameter(128, 64, scale=0.125),
        "bias1": inputs.parameter(128),
        "weight2": inputs.parameter(64, 128, scale=0.1),
    }
    for more in ({}, {"norm": 1 + inputs.parameter(64, scale=0.3)}):
        scaling = DelayedScaling(2, device=inputs.device)

        def ours(x, weight1, bias1, weight2, norm=None, scaling=scaling):
            if norm is not None:
                x = dropout_add_norm_fp8(x, None, norm, None, scaling[0].input, eps=BERT_EPS)
            scales = (scaling[0], scaling[1])
            return _both(ops.mlp(x, weight1, bias1, weight2, fp8=True, scales=scales))

        def plain(x, weight1, bias1, weight2, norm=None):
            x = x if norm is None else functional.layer_norm(x, (64,), norm, eps=BERT_EPS)
            inner = functional.gelu(functional.linear(x, weight1, bias1))
            return _both((functional.linear(inner, weight2), x))

        given = leaves | more
        y = ours(*(leaf.clone().requires_grad_() for leaf in given.values()))
        y.backward(inputs.normal(*y.shape))
        scaling.update()
        # Errors up to 0.18 were seen, of two products one after the other.
        yield from compare(inputs, ours, plain, given, 2 * FP8_LIMIT)
