"""The matrix products of a BERT-large step: sizes, epilogues, and how often each is computed.

`benchmarks.calibrate` measures them, `benchmarks.cuda_step` adds them up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bert_unpad.nn.flops import MASKED_FRACTION
from bert_unpad.ops.fp8 import quantize_fp8

SEQUENCES = 48
LAYERS, HIDDEN, INNER, VOCAB, POSITIONS = 24, 1024, 4096, 30528, 512
PASSES = ("forward", "input gradient", "weight gradient")

_ops = torch.ops.bert_unpad


class Layer(NamedTuple):
    """One linear layer, and what its products do besides."""

    name: str
    rows: int
    features: int
    out: int
    count: int
    """How many there are in a step with BERT's own GELU; 0 for other forms and a tiny one."""
    encoder: bool = False
    """Whether `precision: fp8` computes it in 8 bits."""
    bias: bool = False
    """The forward pass adds it, the weight gradient's product adds up its gradient."""
    residual: bool = False
    """The input gradient's product adds the residual connection's gradient."""
    gelu: str = ""
    """`after`: the forward product computes the tanh GELU of its result; `before`: the input
    gradient's multiplies by the GELU's derivative."""

    @property
    def flops(self) -> int:
        """Of one pass."""
        return 2 * self.rows * self.features * self.out

    def epilogues(self) -> dict[str, str]:
        """What each pass's product does besides, by the pass."""
        bias = "bias" if self.bias else "none"
        before = "GELU's derivative" if self.gelu == "before" else "none"
        done = (
            "bias and GELU" if self.gelu == "after" else bias,
            "sum with the residual's" if self.residual else before,
            "bias's gradient" if self.bias else "none",
        )
        return dict(zip(PASSES, done, strict=True))


def layers(tokens: int, sequences: int = SEQUENCES) -> list[Layer]:
    """The linear layers of BERT-large on a packed batch.

    The last layer takes keys and values of all tokens. The rest it computes for the tokens that a
    loss reads: masked ones, and each sequence's first.
    """
    masked, whole = round(MASKED_FRACTION * tokens), LAYERS - 1
    read = masked + sequences
    inner = {"encoder": True, "residual": True}
    return [
        Layer("queries, keys, values", tokens, HIDDEN, 3 * HIDDEN, whole, bias=True, **inner),
        Layer("attention's output", tokens, HIDDEN, HIDDEN, whole, True),
        Layer("inner", tokens, HIDDEN, INNER, whole, **inner),
        Layer("inner, tanh", tokens, HIDDEN, INNER, 0, bias=True, residual=True, gelu="after"),
        Layer("outer", tokens, INNER, HIDDEN, whole, True),
        Layer("outer, tanh", tokens, INNER, HIDDEN, 0, gelu="before"),
        Layer("last layer: keys, values", tokens, HIDDEN, 2 * HIDDEN, 1, True, True),
        Layer("last layer: queries", read, HIDDEN, HIDDEN, 1, bias=True, **inner),
        Layer("last layer: attention's output", read, HIDDEN, HIDDEN, 1, True),
        Layer("last layer: inner", read, HIDDEN, INNER, 1, **inner),
        Layer("last layer: outer", read, INNER, HIDDEN, 1, True),
        Layer("masked tokens: transform", masked, HIDDEN, HIDDEN, 1),
        Layer("masked tokens: decoder", masked, HIDDEN, VOCAB, 1, bias=True),
        Layer("pooler", sequences, HIDDEN, HIDDEN, 0, bias=True),
    ]


Steps = dict[str, Callable[[], object]]


def bf16_products(layer: Layer, device: str) -> Steps:
    """What computes each pass's product in bf16, with weight gradients in fp32."""
    x, weight, dy, bias = _operands(layer, device)
    addend = torch.randn_like(x) if layer.residual else None
    pre = torch.randn_like(x) if layer.gelu == "before" else None
    gelu, given = layer.gelu == "after", bias if layer.bias else None
    return {
        "forward": lambda: _ops.linear(x, weight, given, gelu),
        "input gradient": lambda: _ops.linear_dgrad(dy, weight, addend, pre),
        "weight gradient": lambda: _ops.linear_wgrad(dy, x, layer.bias, torch.float32),
    }


def fp8_products(layer: Layer, device: str) -> Steps:
    """The same in 8 bits, without the rounding."""
    x, weight, dy, bias = _operands(layer, device)
    given = bias if layer.bias else None
    (q, q_t, q_scale), (w, w_t, w_scale) = quantize_fp8(x, False), quantize_fp8(weight, False)
    d, d_t, d_scale = quantize_fp8(dy, True)
    product, low = _ops.fp8_product, torch.bfloat16
    return {
        "forward": lambda: product(w, q, w_scale, q_scale, given, low, False),
        "input gradient": lambda: product(w_t, d, w_scale, d_scale, None, low, False),
        "weight gradient": lambda: product(q_t, d_t, q_scale, d_scale, None, torch.float32, True),
    }


def _operands(layer: Layer, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random x, weight, dy and bias: a clock depends on how many bits change."""
    rows, features, out = layer.rows, layer.features, layer.out
    x, weight, dy, bias = (
        torch.randn(shape, device=device).bfloat16()
        for shape in ((rows, features), (out, features), (rows, out), (out,))
    )
    return x, weight.div_(features**0.5), dy, bias
