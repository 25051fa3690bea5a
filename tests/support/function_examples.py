"""Arguments of the public functions of bert_unpad.ops that take tensors, by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from bert_unpad.ops.delayed_scaling import DelayedScaling
from bert_unpad.ops.norm_fp8 import dropout_add_norm_fp8

TOKENS, HIDDEN = 8, 32


def examples() -> dict[str, tuple[Callable[..., Any], dict[str, Tensor]]]:
    """Each function, with what is no tensor bound, and its tensors: fresh ones, on a CPU.

    What follows a colon in a name is no part of the function's.
    """

    def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape or (TOKENS, HIDDEN)).to(dtype)

    def ids() -> Tensor:
        return torch.zeros(TOKENS, dtype=torch.int64)

    batch, rng, vector = VarlenBatch.from_lengths([3, 5]), torch.tensor([1, 2]), rows(HIDDEN)
    dropped = {"x_bias": rows(HIDDEN), "rng": rng}
    norm = {"x": rows(), "residual": rows(), "weight": rows(HIDDEN), "bias": rows(HIDDEN)}
    rms = {name: norm[name] for name in ("x", "residual", "weight")}
    linear = {"x": rows(), "weight": rows(16, HIDDEN), "bias": rows(16)}
    low = {**linear, "x": rows(dtype=torch.bfloat16)}
    mlp = {"x": rows(), "weight1": rows(64, HIDDEN), "bias1": rows(64), "weight2": rows(16, 64)}
    glu = {**mlp, "weight2": rows(16, 32)}
    scaling = DelayedScaling(2)
    scales = (scaling[0], scaling[1])
    tables = {name: rows(4, HIDDEN) for name in ("word", "position", "token_type")}
    all_ids = {name: ids() for name in ("input_ids", "position_ids", "token_type_ids")}
    cu = {f"cu_seqlens_{of}": batch.cu_seqlens.clone() for of in "qk"}
    attend = partial(ops.varlen_attention, batch=batch, dropout_p=0.1)
    cross = partial(ops.varlen_cross_attention, max_seqlen_q=5, max_seqlen_k=5, dropout_p=0.1)
    buckets = torch.zeros(3, dtype=torch.int32)
    add_norm = partial(ops.dropout_add_layer_norm, dropout_p=0.1)
    add_rms_norm = partial(ops.dropout_add_rms_norm, dropout_p=0.1)
    cross_entropy = partial(ops.masked_cross_entropy, inplace_backward=True)
    loss = {"logits": rows(), "labels": ids()}

    def biased(qkv: Tensor, **parts: Tensor) -> Tensor:
        names = {name.removeprefix("position_bias."): part for name, part in parts.items()}
        return ops.varlen_attention(qkv, batch, position_bias=ops.PositionBias(**names))

    parts = {
        "position_bias.buckets": buckets,
        "position_bias.table": rows(2, 2),
        "position_bias.query": rows(TOKENS, 2, 2),
        "position_bias.key": rows(TOKENS, 2, 2),
    }
    return {
        "bias_gelu": (ops.bias_gelu, {"x": rows(), "bias": vector}),
        "glu": (partial(ops.glu, kind="silu"), {"x": rows(), "bias": vector}),
        "dropout_add_layer_norm": (add_norm, norm | dropped),
        "dropout_add_layer_norm: sum": (partial(add_norm, return_sum=True), norm | dropped),
        "dropout_add_rms_norm": (add_rms_norm, rms | dropped),
        "dropout_add_norm_fp8": (
            partial(dropout_add_norm_fp8, scale=scaling[0].input, dropout_p=0.1),
            norm | dropped,
        ),
        "layer_norm": (ops.layer_norm, {name: norm[name] for name in ("x", "weight", "bias")}),
        "rms_norm": (ops.rms_norm, {name: norm[name] for name in ("x", "weight")}),
        "embedding_layer_norm": (
            partial(ops.embedding_layer_norm, dropout_p=0.1),
            all_ids | tables | {"ln_weight": vector, "ln_bias": rows(HIDDEN), "rng": rng},
        ),
        "masked_cross_entropy": (ops.masked_cross_entropy, loss),
        "masked_cross_entropy: in place": (cross_entropy, loss),
        "linear": (ops.linear, linear),
        "linear: 16 bits": (ops.linear, low),
        "linear_residual": (ops.linear_residual, linear),
        "linear_residual: 16 bits": (ops.linear_residual, low),
        "mlp": (ops.mlp, mlp),
        "mlp: recomputed": (partial(ops.mlp, recompute=True, approximate="tanh"), mlp),
        "mlp: 8 bits": (partial(ops.mlp, fp8=True), mlp),
        "mlp: delayed scales": (partial(ops.mlp, fp8=True, scales=scales), mlp),
        "glu_mlp": (ops.glu_mlp, glu),
        "glu_mlp: 8 bits": (partial(ops.glu_mlp, fp8=True), glu),
        "fp8_linear": (ops.fp8_linear, linear),
        "rotary_": (
            partial(ops.rotary_, heads=2),
            {"x": rows(TOKENS, 3, 16), "positions": torch.arange(TOKENS)},
        ),
        "varlen_attention": (attend, {"qkv": rows(TOKENS, 3, 2, 16), "rng": rng}),
        "varlen_attention: bias": (biased, {"qkv": rows(TOKENS, 3, 2, 16), **parts}),
        "varlen_cross_attention": (
            cross,
            {
                "q": rows(TOKENS, 2, 16),
                "kv": rows(TOKENS, 2, 2, 16),
                **cu,
                "query_positions": torch.arange(TOKENS, dtype=torch.int32),
                "rng": rng,
                "order": batch.order.clone(),
            },
        ),
    }


def public_name(name: str) -> str:
    """The function's name without what follows a colon."""
    return name.partition(":")[0]


def apart(t: Tensor) -> Tensor:
    """A copy that is not contiguous: its elements are 2 apart, those of a row in its memory 1."""
    wide = torch.ones((2, *t.shape)).to(t.dtype)
    wide[0] = t
    return wide.movedim(0, -1).contiguous()[..., 0]
