"""The self-test's cases of a whole encoder layer, which is float32 whatever the inputs' type."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from bert_unpad import _C, ops
from bert_unpad.ops.encoder_layer import (
    Affine,
    EncoderEmbeddings,
    LayerParameters,
    LayerShape,
    encoder_finish,
    encoder_project,
    pack_weight,
)
from bert_unpad.ops.encoder_layer import encoder_layers as whole_layers
from bert_unpad.ops.encoder_layer import encoder_model as whole_model
from bert_unpad.self_test.compare import LIMITS, Compared, Inputs, Skip, case

_HIDDEN, _HEADS, _LENGTHS = 64, 2, [5, 40]


@case
def encoder_layers(inputs: Inputs) -> Iterator[Compared]:
    return _layer(inputs, lambda weight: weight, LIMITS[torch.float32])


@case
def encoder_layers_int8(inputs: Inputs) -> Iterator[Compared]:
    return _layer(inputs, lambda weight: pack_weight(weight, torch.int8), 0.05)


@case
def encoder_layers_bf16(inputs: Inputs) -> Iterator[Compared]:
    if not _C.cpu_isa().endswith(("bf16", "amx")):
        raise Skip("this CPU multiplies no bf16")
    return _layer(inputs, lambda weight: pack_weight(weight, torch.bfloat16), 0.05)


@case
def encoder_model(inputs: Inputs) -> Iterator[Compared]:
    if inputs.device.type != "cpu":
        raise Skip("it is for CPUs")
    table, linear = inputs.parameter(9, _HIDDEN), inputs.parameter(_HIDDEN, _HIDDEN, scale=0.1)
    norm = Affine(torch.ones(_HIDDEN), None)
    affine = Affine(linear, None)
    layer = LayerParameters(*(affine,) * 5, None, affine, (None, norm, norm)).tensors()
    shape = LayerShape(1, 1, _HIDDEN, _HIDDEN, "gelu", False, False, (1e-5,) * 3)
    ids = torch.arange(9).repeat(3, 1)
    mask = torch.arange(9) < torch.tensor([[9], [1], [5]])
    embeddings = EncoderEmbeddings(table, table, None, norm, None, (1e-5, 1e-5))
    found = whole_model(ids, mask, None, embeddings, layer, [shape], result="mean")
    x = functional.layer_norm(2 * table[ids[mask]], (_HIDDEN,))
    cu_seqlens = torch.tensor([0, 9, 10, 15], dtype=torch.int32)
    rows = whole_layers(x, cu_seqlens, 9, layer, [shape]).split([9, 1, 5])
    yield Compared("mean", found, torch.stack([row.mean(0) for row in rows]), LIMITS[torch.float32])


def _layer(inputs: Inputs, pack: Callable[[Tensor], Tensor], limit: float) -> Iterator[Compared]:
    if inputs.device.type != "cpu":
        raise Skip("it is for CPUs")
    weights = [inputs.parameter(_HIDDEN, _HIDDEN, scale=_HIDDEN**-0.5) for _ in range(6)]
    x = inputs.parameter(sum(_LENGTHS), _HIDDEN)
    wide, one, none = [w.double() for w in weights], torch.ones(_HIDDEN), torch.zeros(_HIDDEN)

    def normalised(x: Tensor) -> Tensor:
        return functional.layer_norm(x, (_HIDDEN,))

    q, k, v = (
        (x.double() @ w.T).unflatten(1, (_HEADS, -1)).transpose(0, 1).split(_LENGTHS, 1)
        for w in wide[:3]
    )
    mixed = [functional.scaled_dot_product_attention(*parts) for parts in zip(q, k, v, strict=True)]
    attended = torch.cat(mixed, 1).transpose(0, 1).flatten(1)
    middle = normalised(x.double() + attended @ wide[3].T)
    expected = normalised(middle + functional.gelu(middle @ wide[4].T) @ wide[5].T)
    cu_seqlens = torch.tensor([0, _LENGTHS[0], sum(_LENGTHS)], dtype=torch.int32)
    width, longest = _HIDDEN // _HEADS, max(_LENGTHS)
    shape = LayerShape(_HEADS, _HEADS, width, _HIDDEN, "gelu", False, False, (1e-5,) * 3)
    norm = Affine(one, none)
    query, key, value, out, first, second = (Affine(pack(w), None) for w in weights)
    layer = LayerParameters(query, key, value, out, first, None, second, (None, norm, norm))
    tensors = layer.tensors()
    yield Compared(
        "result", whole_layers(x, cu_seqlens, longest, tensors, [shape]), expected, limit
    )
    qkv = encoder_project(x, tensors, shape)
    ours = ops.varlen_attention(qkv, cu_seqlens, longest, num_heads=_HEADS)
    found = encoder_finish(x, ours, tensors, shape)
    yield Compared("result of two operators", found, expected, limit)
