"""The self-test's cases of a whole encoder layer, which is float32 whatever the inputs' type."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from bert_unpad import ops
from bert_unpad.ops.encoder_layer import (
    Affine,
    LayerParameters,
    LayerShape,
    encoder_finish,
    encoder_project,
    pack_int8,
)
from bert_unpad.ops.encoder_layer import encoder_layers as whole_layers
from bert_unpad.self_test.compare import LIMITS, Compared, Inputs, Skip, case

_HIDDEN, _HEADS, _LENGTHS = 64, 2, [5, 40]


@case
def encoder_layers(inputs: Inputs) -> Iterator[Compared]:
    return _layer(inputs, lambda weight: weight, LIMITS[torch.float32])


@case
def encoder_layers_int8(inputs: Inputs) -> Iterator[Compared]:
    return _layer(inputs, pack_int8, 0.05)


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
